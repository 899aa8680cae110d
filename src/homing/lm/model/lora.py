"""LoRA: small trained matrices beside a model that stands still (arXiv:2106.09685), with rsLoRA and DoRA.

    load_base(model, tensors, storage=..., device=...)   a Decoder made on the meta device -> its weights, one at a
                                                         time, stored as fp32, bf16 or NF4, all frozen; -> their hash
    freeze(model, storage)                               the same for a Decoder that is already whole in memory
    add_lora(model, settings, seed)                      A drawn, B zero: the model computes what it did before
    begin_step(model, step)                              before each step's first forward: what dropout draws from
    model.weights_for_disk() / load_weights(tensors)     of such a model: the adapter alone, under peft's names
    adapter_config(settings, base)                       adapter_config.json as peft reads it
    merge(model)                                         adapters into their weights: a plain Decoder again
    adapters_now(model) / adapters_as(model, then)       the adapters as they are, and the model with them once more
    lengths_held(model)                                  DoRA's lengths computed once, while nothing learns

How a phase of method lora or qlora is set up:

    with torch.device("meta"):
        model = Decoder(run.model)
    storage = lora.storage_for(phase.method, precision)                     # "fp32" | "bf16" | "nf4"
    base_sha256 = lora.load_base(model, tensors, storage=storage, device=device)
    lora.add_lora(model, phase.lora, seed=run.seed)                         # on the device the base is on
    optimizer = build_optimizer(model, phase.optimizer)                     # sees the adapter only
    ... lora.begin_step(model, step, first_row=...) at the start of each try of a step ...

`tensors` are (name, tensor) pairs under the names of transformers, from an iterator that reads one at a time; nothing
else of it is held. The checkpoint holds adapter and optimizer and names the base by `base_sha256`; `check_base` refuses
another base on resume. Only the `stock` family takes adapters.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from homing.errors import DataError, IntegrityError, UsageError
from homing.lm.model.fit import do_not_fit
from homing.lm.model.frozen import STORAGES, Adapter, DropoutClock, FrozenLinear, lay_together, row_norms
from homing.lm.model.layers import Linear
from homing.lm.model.nf4 import dequantize_path
from homing.wire.run import Lora

if TYPE_CHECKING:
    from homing.lm.model.decoder import Decoder

__all__ = [
    "TARGETS",
    "adapter_config",
    "adapters_as",
    "adapters_now",
    "add_lora",
    "begin_step",
    "check_base",
    "describe",
    "freeze",
    "is_same",
    "lengths_held",
    "load_adapter",
    "load_base",
    "lora_tensors",
    "merge",
    "merged_sha256",
    "num_adapter_params",
    "storage_for",
]

# What a person writes -> the module inside a block.
TARGETS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_READ_THE_SAME = (("q", "k", "v"), ("gate", "up"))
_PEFT_PREFIX = "base_model.model."


def storage_for(method: str, precision: str) -> str:
    """What the frozen weights are stored in: NF4 for qlora, else what is computed in, so that no product casts them."""
    if method == "qlora":
        return "nf4"
    return "fp32" if precision == "fp32" else "bf16"


# -- the base ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_base(
    model: Decoder, tensors: Iterable[tuple[str, Tensor]], *, storage: str, device: torch.device | str
) -> str:
    """Fills and freezes a Decoder made on the meta device, one tensor after the other; returns the sha256 of them all,
    which does not depend on their order or on the files they came from."""
    # Shapes and not the parameters: a frozen one must go when its stored form has come.
    wanted = {name: tuple(model.cut_padding(name, p).shape) for name, p in model.named_parameters()}
    digests: dict[str, str] = {}
    problems: list[str] = []
    for name, tensor in tensors:
        if name == "lm_head.weight" and model.lm_head is None:
            continue  # a tied head that was stored a second time
        if name not in wanted or name in digests:
            problems.append(f"{name} is there twice." if name in digests else f"{name} is no weight of this model.")
        elif tuple(tensor.shape) != wanted[name]:
            problems.append(f"{name} is {tuple(tensor.shape)} in the file and {wanted[name]} in the model.")
        else:
            digests[name] = _tensor_sha256(tensor)
            _store(model, name, tensor, storage, torch.device(device))
    problems += [f"{name} is missing." for name in wanted if name not in digests and not problems]
    if problems:
        raise do_not_fit(problems)
    for number in range(model.shape.num_layers if model.shape.family == "stock" else 0):
        for group in _READ_THE_SAME:
            lay_together([_frozen_layer(model, number, target).weight for target in group])
    model.base_storage = storage
    model.model.rope.to(device)
    listed = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(listed.encode()).hexdigest()


def freeze(model: Decoder, storage: str, device: torch.device | None = None) -> str:
    """A Decoder in memory, frozen where it is or on `device`; each matrix is stored anew and let go before the next."""
    left = dict(model.named_parameters())
    pairs = ((name, model.cut_padding(name, left.pop(name).detach())) for name in list(left))
    return load_base(model, pairs, storage=storage, device=device or model.device)


def check_base(found_sha256: str, base_sha256: str) -> None:
    if found_sha256 != base_sha256:
        raise IntegrityError(
            what="The adapter in the checkpoint was trained on other base weights.",
            why=f"Their sha256 is {found_sha256[:16] or 'not given'}..., and that of the weights loaded now "
            f"is {base_sha256[:16]}...",
            fix="Put model.from back to the weights the run began with, or begin anew: homing train RUN --fresh",
        )


def merged_sha256(base_sha256: str, settings: Lora, adapter: Mapping[str, Tensor]) -> str:
    """What names a base that is other weights with an adapter put into them: what went in, and not the sums, whose last
    bits are another machine's own."""
    listed = [f"{name} {_tensor_sha256(adapter[name])}" for name in sorted(adapter)]
    how = replace(settings, dropout=0.0, targets=_expand(settings.targets))
    return hashlib.sha256("\n".join([base_sha256, repr(how), *listed]).encode()).hexdigest()


def _store(model: Decoder, name: str, tensor: Tensor, storage: str, device: torch.device) -> None:
    """Matrices of the blocks as `storage` says; embedding and head in 16 or 32 bits; norms and biases, which are small
    and in every sum, in 32."""
    path, kind = name.rsplit(".", 1)
    owner = model.get_submodule(path)
    dtype = torch.bfloat16 if storage == "nf4" else STORAGES[storage]
    dtype = torch.float32 if tensor.dim() == 1 else dtype
    if isinstance(owner, Linear) and path != "lm_head":
        owner = _replace(model, path, owner)
    if isinstance(owner, FrozenLinear) and kind == "weight":
        owner.weight.fill(tensor, storage, device)
    elif isinstance(owner, FrozenLinear):
        owner.bias = tensor.to(device, dtype)
    else:
        padded = torch.zeros(getattr(owner, kind).shape, device=device, dtype=dtype)
        model.cut_padding(name, padded).copy_(tensor)
        setattr(owner, kind, nn.Parameter(padded, requires_grad=False))


def _replace(model: Decoder, path: str, layer: Linear) -> FrozenLinear:
    frozen = FrozenLinear(layer.weight.shape[1], layer.weight.shape[0])
    parent, name = path.rsplit(".", 1)
    setattr(model.get_submodule(parent), name, frozen)
    return frozen


def _tensor_sha256(tensor: Tensor) -> str:
    """Of type, shape and bytes, in pieces: a slice of a mapped file is never copied whole."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    for start in range(0, len(flat), 2**26):
        digest.update(flat[start : start + 2**26].numpy().data)
    return digest.hexdigest()


# -- adapters ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def add_lora(model: Decoder, settings: Lora, seed: int) -> None:
    """Adapters on the chosen projections of every block of a frozen model."""
    _check(model, settings)
    clock = DropoutClock(seed)
    for name, layer in _targets(model, settings.targets):
        num_out, num_in = layer.weight.shape
        salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        adapter = Adapter(num_in, num_out, settings.rank, salt, clock, model.device)
        adapter.scale = settings.alpha / (math.sqrt(settings.rank) if settings.is_rslora else settings.rank)
        adapter.dropout = settings.dropout
        adapter.lora_A.copy_(_drawn(name, settings.rank, num_in, seed))
        if settings.is_dora:
            adapter.magnitude = nn.Parameter(row_norms(layer.weight, adapter))  # of W itself, as B is zero
        layer.adapter = adapter
    model.lora, model.dropout_clock = settings, clock


def is_same(one: Lora, other: Lora) -> bool:
    """Whether an adapter of the one is an adapter of the other. Dropout is how it learns, not what it is."""
    left, right = (replace(settings, dropout=0.0, targets=_expand(settings.targets)) for settings in (one, other))
    return left == right


def adapters_now(model: Decoder) -> dict[str, Adapter | None]:
    """Of each layer that has one, a copy as it is now; None where it adds nothing yet, as when it was just added."""
    return {
        name: copy.deepcopy(adapter).requires_grad_(False) if bool(adapter.lora_B.any()) else None
        for name, layer in _adapted_layers(model)
        if (adapter := layer.adapter) is not None
    }


@contextlib.contextmanager
def adapters_as(model: Decoder, then: Mapping[str, Adapter | None]) -> Iterator[None]:
    """The model with the adapters that `adapters_now` gave: with none of them it is the frozen weights alone. For
    forwards without gradients; what learns is not touched."""
    layers = _adapted_layers(model)
    live = [layer.adapter for _, layer in layers]
    try:
        for name, layer in layers:
            layer.adapter = then[name]
        yield
    finally:
        for (_, layer), adapter in zip(layers, live, strict=True):
            layer.adapter = adapter


@contextlib.contextmanager
def lengths_held(model: Decoder) -> Iterator[None]:
    """While nothing learns, DoRA's lengths stay the same: computed once, and not in every forward. Always in the same
    memory, where a captured step finds them again."""
    layers = [layer for _, layer in _adapted_layers(model)]
    held = [(layer, adapter) for layer in layers if (adapter := layer.adapter) and adapter.magnitude is not None]
    try:
        for layer, adapter in held:
            adapter.hold_lengths(layer.weight)
        yield
    finally:
        for _, adapter in held:
            adapter.is_held = False


def begin_step(model: Decoder, step: int, first_row: int = 0) -> None:
    """`first_row`: which row of the step's batch the first forward begins with, where ranks share one."""
    if model.dropout_clock is not None:
        model.dropout_clock.begin_step(step, first_row)


def lora_tensors(model: Decoder) -> dict[str, Tensor]:
    """Name in peft -> tensor, fp32, as adapter_model.safetensors holds them."""
    return {_peft_name(name): p.detach() for name, p in model.named_parameters() if ".adapter." in name}


@torch.no_grad()
def load_adapter(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """The opposite of `lora_tensors`; every name and shape must fit, and each one that does not is named."""
    live = lora_tensors(model)
    problems = [f"{name} is missing." for name in live if name not in tensors]
    problems += [f"{name} is not in this adapter." for name in tensors if name not in live]
    for name in live.keys() & tensors.keys():
        if live[name].shape != tensors[name].shape:
            problems.append(f"{name} is {tuple(tensors[name].shape)}, not {tuple(live[name].shape)}.")
    if problems:
        raise DataError(
            what="The adapter does not fit the model.",
            why="\n".join(sorted(problems)[:12]),
            fix="Use the rank and targets it was trained with: they stand in adapter_config.json beside it.",
        )
    for name, tensor in live.items():
        tensor.copy_(tensors[name])


def describe(model: Decoder) -> str:
    """For the log: what learns, beside what, and where the base is in four bits, how it is read."""
    assert model.lora is not None, "a model without adapters"
    chosen = ", ".join(_expand(model.lora.targets))
    ways = [word for word, is_on in (("rsLoRA", model.lora.is_rslora), ("DoRA", model.lora.is_dora)) if is_on]
    how = f" with {' and '.join(ways)}" if ways else ""
    read = f", dequantised by {dequantize_path(model.device)}" if model.base_storage == "nf4" else ""
    learns = f"{num_adapter_params(model):,} parameters of rank {model.lora.rank}{how} learn beside {chosen}"
    return f"{learns}; the weights stand still in {model.base_storage}{read}."


def num_adapter_params(model: Decoder) -> int:
    return sum(tensor.numel() for tensor in lora_tensors(model).values())


def adapter_config(settings: Lora, base: str) -> dict[str, Any]:
    """adapter_config.json: what peft needs to know, every other key at the value peft has by itself. `base` is a name
    on the Hub or a folder."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": [TARGETS[target].rsplit(".", 1)[1] for target in _expand(settings.targets)],
        "use_rslora": settings.is_rslora,
        "use_dora": settings.is_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "revision": None,
    }


@torch.no_grad()
def merge(model: Decoder) -> None:
    """W + scale B A (DoRA: at its magnitudes) in the place of each frozen weight: a plain Decoder in fp32, which
    computes what the adapted one did. Where the base was in NF4 it is the base as NF4 had it; merge into the base
    itself by loading it as fp32 or bf16."""
    for path, layer in [(p, m) for p, m in model.named_modules() if isinstance(m, FrozenLinear)]:
        plain = Linear(layer.weight.shape[1], layer.weight.shape[0], has_bias=layer.bias is not None)
        plain.to(model.device)
        plain.weight.copy_(_merged(layer))
        if plain.bias is not None and layer.bias is not None:
            plain.bias.copy_(layer.bias)
        parent, name = path.rsplit(".", 1)
        setattr(model.get_submodule(parent), name, plain)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    model.lora, model.dropout_clock, model.base_storage = None, None, ""


def _merged(layer: FrozenLinear) -> Tensor:
    weight, adapter = layer.weight.dense_weight(torch.float32), layer.adapter
    if adapter is None:
        return weight
    merged = torch.addmm(weight, adapter.lora_B, adapter.lora_A, alpha=adapter.scale)
    if adapter.magnitude is not None:
        merged *= (adapter.magnitude / merged.norm(dim=1)).unsqueeze(1)
    return merged


def _check(model: Decoder, settings: Lora) -> None:
    assert model.lora is None, "the model has adapters already; merge them first"
    problems = []
    if model.shape.family != "stock":
        problems.append(f"The {model.shape.family} family takes no adapters: no other program could open them.")
    unknown = [target for target in settings.targets if target not in (*TARGETS, "all")]
    problems += [f"lora.targets: {target!r} is none of {', '.join((*TARGETS, 'all'))}." for target in unknown]
    if not settings.targets:
        problems.append("lora.targets is empty: nothing would be trained.")
    if settings.rank < 1:
        problems.append(f"lora.rank: {settings.rank} must be at least 1.")
    if settings.alpha <= 0:
        problems.append(f"lora.alpha: {settings.alpha} must be above 0.")
    if not 0.0 <= settings.dropout < 1.0:
        problems.append(f"lora.dropout: {settings.dropout} must be at least 0 and under 1.")
    if problems:
        raise UsageError(
            what="These adapters cannot be made.",
            why="\n".join(problems),
            fix="Change these keys under lora: in the phase, or take method: full.",
        )


def _expand(targets: Iterable[str]) -> list[str]:
    named = set(targets)
    return [target for target in TARGETS if target in named or "all" in named]


def _targets(model: Decoder, targets: Iterable[str]) -> list[tuple[str, FrozenLinear]]:
    found = []
    for number in range(model.shape.num_layers):
        for target in _expand(targets):
            found.append((f"model.layers.{number}.{TARGETS[target]}", _frozen_layer(model, number, target)))
    return found


def _adapted_layers(model: Decoder) -> list[tuple[str, FrozenLinear]]:
    return [] if model.lora is None else _targets(model, model.lora.targets)


def _frozen_layer(model: Decoder, number: int, target: str) -> FrozenLinear:
    layer = model.get_submodule(f"model.layers.{number}.{TARGETS[target]}")
    assert isinstance(layer, FrozenLinear), "freeze the model or load its base before adding adapters"
    return layer


def _drawn(name: str, rank: int, num_in: int, seed: int) -> Tensor:
    """Uniform in +-1 / sqrt(inputs), which is what peft draws; from a generator of its own, as in `init`."""
    digest = hashlib.sha256(f"{seed}/{name}.lora_A".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(rank, num_in, device="cpu").uniform_(-(num_in**-0.5), num_in**-0.5, generator=generator)


def _peft_name(name: str) -> str:
    path, kind = name.split(".adapter.")
    ending = "lora_magnitude_vector" if kind == "magnitude" else f"{kind}.weight"
    return f"{_PEFT_PREFIX}{path}.{ending}"
