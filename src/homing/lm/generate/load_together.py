"""Loads several models to use side by side. Adapters that were trained on the same base share one copy of its weights.

    sources -> what each needs -> compare with the free memory, before anything is loaded
            -> two or more adapters on one base, or a base and its adapters: the base once, frozen, in the compute dtype
               -> for each adapter a decoder that reads the same memory, with its own small matrices on top
            -> all others: `load_for_use`, each with its own weights

An adapter on a shared base is not merged into it. Its texts are those of the merged model, except where two tokens are
so close that rounding decides. The base of a QLoRA adapter is in the compute dtype, as when the adapter is used alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from homing.errors import UsageError
from homing.lm.device import describe_device, free_host_bytes, pick_device, pick_precision, use_device
from homing.lm.generate.load_adapter import add_adapter, find_base, frozen_base
from homing.lm.generate.load_model import Card, check_files, load_for_use, read_card
from homing.lm.model import Decoder, count_params
from homing.lm.model.decoder import PRECISIONS
from homing.lm.model.frozen_linear import FrozenWeight
from homing.lm.model.lora import check_base, storage_for
from homing.lm.model.open_weights import find_weights
from homing.lm.tokenizer import Tokenizer
from homing.units import format_bytes
from homing.wire import file_names

__all__ = ["Source", "load_together"]


@dataclass(frozen=True)
class Source:
    """A model to load. `base` is the folder of an adapter's base weights, if the checkpoint does not record it."""

    name: str
    folder: Path
    base: Path | None = None


@dataclass(frozen=True)
class _Found:
    source: Source
    card: Card
    base_folder: Path | None  # of an adapter


@dataclass(frozen=True)
class _Group:
    """Models that share their base weights, or a single model."""

    members: tuple[_Found, ...]

    @property
    def is_shared(self) -> bool:
        return len(self.members) > 1


def load_together(
    sources: Sequence[Source], device: str = "auto", *, precision: str = "auto"
) -> list[tuple[Decoder, Tokenizer]]:
    """Load the models in this order. Raises UsageError with figures, before loading, if they do not fit in memory."""
    where = pick_device(device)
    use_device(where)
    precision = pick_precision(precision, where)
    groups = _groups(sources)
    _check_memory(groups, where, precision)
    loaded: dict[int, tuple[Decoder, Tokenizer]] = {}
    for group in groups:
        if group.is_shared:
            loaded |= _load_shared(group, where, precision)
        else:
            (found,) = group.members
            source = found.source
            loaded[id(source)] = load_for_use(source.folder, str(where), precision=precision, base=source.base)
    return [loaded[id(source)] for source in sources]


def _groups(sources: Sequence[Source]) -> list[_Group]:
    found = [_find(source) for source in sources]
    adapters = {_key(each) for each in found if each.base_folder is not None}
    grouped: dict[tuple[str, ...], list[_Found]] = {}
    for number, each in enumerate(found):
        key = _key(each)
        grouped.setdefault(key if key in adapters else (*key, str(number)), []).append(each)
    return [_Group(tuple(members)) for members in grouped.values()]


def _find(source: Source) -> _Found:
    card = read_card(source.folder)
    if card.adapter_phase is None:
        return _Found(source, card, None)
    assert card.run is not None, "the card of an adapter must contain its run"
    return _Found(source, card, source.base or find_base(source.folder, card.run, card.adapter_phase))


def _key(found: _Found) -> tuple[str, ...]:
    """Return what must be equal for two models to share weights. The shape contains the context, which may differ."""
    return str((found.base_folder or found.source.folder).resolve()), repr(found.card.shape)


def _load_shared(group: _Group, where: torch.device, precision: str) -> dict[int, tuple[Decoder, Tokenizer]]:
    adapter = next(each for each in group.members if each.base_folder is not None)
    assert adapter.card.run is not None, "the card of an adapter must contain its run"
    assert adapter.base_folder is not None, "an adapter has a base"
    checked = {id(each.source): check_files(each.source.folder, each.card) for each in group.members}
    base, sha256 = frozen_base(adapter.base_folder, adapter.card.run, where, storage_for("lora", precision))
    loaded = {}
    for each in group.members:
        model = _sharing(base)
        if each.base_folder is not None:
            assert each.card.run is not None, "the card of an adapter must contain its run"
            assert each.card.adapter_phase is not None, "an adapter was trained in a phase"
            if each.card.base_sha256:
                check_base(each.card.base_sha256, sha256)
            add_adapter(model, find_weights(each.source.folder), each.card.run, each.card.adapter_phase)
            _prepare(model, PRECISIONS[precision])
        model.set_precision(precision)
        loaded[id(each.source)] = model.eval(), checked[id(each.source)]
    return loaded


def _sharing(base: Decoder) -> Decoder:
    """Return a decoder with the weights of `base` in the same memory, to which an adapter can be added."""
    shared = [*base.parameters(), *base.buffers(), *(m for m in base.modules() if isinstance(m, FrozenWeight))]
    return copy.deepcopy(base, {id(each): each for each in shared})


@torch.no_grad()
def _prepare(model: Decoder, dtype: torch.dtype) -> None:
    """Compute once what training computes in every step: DoRA's row norms, and A and B in the compute dtype."""
    for layer in model.modules():
        adapter = getattr(layer, "adapter", None)
        if adapter is None:
            continue
        if adapter.magnitude is not None:
            adapter.hold_lengths(layer.weight)
        for matrix in (adapter.lora_A, adapter.lora_B):
            matrix.requires_grad_(False)
            matrix.data = matrix.data.to(dtype)


# -- memory ------------------------------------------------------------------------------------------------------------


def _needs(groups: Sequence[_Group], dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes that each model needs: its weights, and the keys and values of one text.

    The first model of a group has the base. An adapter on a shared base adds only its own matrices.
    """
    needed = {}
    for group in groups:
        for number, found in enumerate(group.members):
            shape = found.card.shape
            weights = sum(count_params(shape).values()) * dtype.itemsize if number == 0 else 0
            adapter = found.source.folder / file_names.ADAPTER
            own = adapter.stat().st_size if group.is_shared and adapter.is_file() else 0
            cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * shape.context * dtype.itemsize
            needed[found.source.name] = weights + own + cache
    return needed


def _check_memory(groups: Sequence[_Group], where: torch.device, precision: str) -> None:
    free = torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else free_host_bytes()
    needed = _needs(groups, PRECISIONS[precision])
    total = sum(needed.values())
    if free is None or total <= free:
        return
    listed = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in needed.items())
    raise UsageError(
        what="The model does not fit in memory." if len(needed) == 1 else "The models do not fit in memory together.",
        why=f"They need {format_bytes(total)} ({listed}), but {describe_device(where)} has {format_bytes(free)} free."
        if len(needed) > 1
        else f"It needs {format_bytes(total)}, but {describe_device(where)} has {format_bytes(free)} free.",
        fix="Close other programs, or use a machine with more memory."
        if len(needed) == 1
        else "Leave out one of the --also models, or use a machine with more memory.",
    )
