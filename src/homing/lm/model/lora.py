"""LoRA: small trained adapters on top of a frozen model (arXiv:2106.09685), with rsLoRA and DoRA.

    load_base(model, tensors, storage=..., device=...)   fill a Decoder on the meta device with frozen weights, one at a
                                                         time, stored as fp32, bf16 or NF4; return their hash
    freeze(model, storage)                               the same for a Decoder that is already in memory
    add_lora(model, settings, seed)                      A random, B zero: the model's output does not change
    begin_step(model, step)                              set the dropout seed; call before each step's first forward
    model.weights_for_disk() / load_weights(tensors)     return / load only the adapters, under peft's names
    adapter_config(settings, base)                       return the contents of adapter_config.json for peft
    merge(model)                                         merge the adapters into the weights: a plain Decoder again
    adapters_now(model) / adapters_as(model, then)       copy the current adapters / use those copies in the model
    lengths_held(model)                                  cache DoRA's row norms inside a context

How a phase with method lora or qlora is set up:

    with torch.device("meta"):
        model = Decoder(run.model)
    storage = lora.storage_for(phase.method, precision)                     # "fp32" | "bf16" | "nf4"
    base_sha256 = lora.load_base(model, tensors, storage=storage, device=device)
    lora.add_lora(model, phase.lora, seed=run.seed)                         # on the device of the base
    optimizer = build_optimizer(model, phase.optimizer)                     # sees the adapter only
    ... lora.begin_step(model, step, first_row=...) at the start of each attempt at a step ...

`tensors` yields (name, tensor) pairs with the names of transformers, reading one tensor at a time. The checkpoint
contains adapter and optimizer and identifies the base by `base_sha256`. On resume, `check_base` rejects any other base.
Only the `stock` family supports adapters.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from homing.errors import IntegrityError, UsageError
from homing.lm.model.decoder import Decoder
from homing.lm.model.frozen_linear import (
    STORAGES,
    Adapter,
    DropoutClock,
    FrozenLinear,
    lay_together,
    lora_tensors,
    row_norms,
)
from homing.lm.model.layers import Linear
from homing.lm.model.model_shape import do_not_fit
from homing.lm.model.nf4 import dequantize_path
from homing.wire.run_json import Lora

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
    "load_base",
    "merge",
    "merged_sha256",
    "num_adapter_params",
    "storage_for",
]

# name of a target in the run file -> path of its module inside a block
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


def storage_for(method: str, precision: str) -> str:
    """Return the storage format of frozen weights: NF4 for qlora, else the compute dtype, to avoid casts."""
    if method == "qlora":
        return "nf4"
    return "fp32" if precision == "fp32" else "bf16"


# -- the base ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_base(
    model: Decoder, tensors: Iterable[tuple[str, Tensor]], *, storage: str, device: torch.device | str
) -> str:
    """Fill and freeze a Decoder on the meta device, one tensor at a time; return the sha256 of all weights.

    The hash does not depend on the order of the tensors or on the files they came from. Raises DataError, listing all
    tensors that do not fit.
    """
    # Remember only the shapes: a reference to a parameter would prevent it from being freed once it has been converted.
    wanted = {name: tuple(model.cut_padding(name, p).shape) for name, p in model.named_parameters()}
    digests: dict[str, str] = {}
    problems: list[str] = []
    for name, tensor in tensors:
        if name == "lm_head.weight" and model.lm_head is None:
            continue  # skip the redundant copy of a tied head, which some programs save
        if name not in wanted or name in digests:
            problems.append(f"{name} appears twice." if name in digests else f"{name} is not a weight of this model.")
        elif tuple(tensor.shape) != wanted[name]:
            problems.append(f"{name} has shape {tuple(tensor.shape)} in the file but {wanted[name]} in the model.")
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
    """Freeze a Decoder in memory, converting and freeing one matrix at a time; return the hash of its weights.

    The frozen weights are stored on `device`; if it is None, they stay on the model's device.
    """
    left = dict(model.named_parameters())
    pairs = ((name, model.cut_padding(name, left.pop(name).detach())) for name in list(left))
    return load_base(model, pairs, storage=storage, device=device or model.device)


def check_base(found_sha256: str, base_sha256: str) -> None:
    if found_sha256 != base_sha256:
        raise IntegrityError(
            what="The adapter in the checkpoint was trained on different base weights.",
            why=f"The checkpoint's base has the sha256 {found_sha256[:16] or '(none recorded)'}..., but the weights "
            f"loaded now have {base_sha256[:16]}...",
            fix="Set model.from to the original weights, or start over: homing train RUN --fresh",
        )


def merged_sha256(base_sha256: str, settings: Lora, adapter: Mapping[str, Tensor]) -> str:
    """Return a hash that identifies base weights with an adapter merged into them.

    The hash is computed from the inputs of the merge, because the merged weights may differ slightly between machines.
    """
    listed = [f"{name} {_tensor_sha256(adapter[name])}" for name in sorted(adapter)]
    how = replace(settings, dropout=0.0, targets=_expand(settings.targets))
    return hashlib.sha256("\n".join([base_sha256, repr(how), *listed]).encode()).hexdigest()


def _store(model: Decoder, name: str, tensor: Tensor, storage: str, device: torch.device) -> None:
    """Store one tensor of the frozen base model.

    Matrices of the blocks are stored in the format `storage`, embedding and head in 16 or 32 bits. Norms and biases are
    stored in 32 bits, because they are small and affect everything.
    """
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
    """Return the sha256 of a tensor's dtype, shape and bytes.

    The bytes are hashed in chunks, so that a memory-mapped tensor is never copied to memory as a whole.
    """
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    for start in range(0, len(flat), 2**26):
        digest.update(flat[start : start + 2**26].numpy().data)
    return digest.hexdigest()


# -- adapters ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def add_lora(model: Decoder, settings: Lora, seed: int) -> None:
    """Add adapters to the chosen projections of every block of a frozen model."""
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
            # B is still zero, so the row norms of W + scale B A are those of W itself.
            adapter.magnitude = nn.Parameter(row_norms(layer.weight, adapter))
        layer.adapter = adapter
    model.lora, model.dropout_clock = settings, clock


def is_same(one: Lora, other: Lora) -> bool:
    """Return whether an adapter trained with one of these settings can be used with the other.

    The dropout may differ, because it affects only training.
    """
    left, right = (replace(settings, dropout=0.0, targets=_expand(settings.targets)) for settings in (one, other))
    return left == right


def adapters_now(model: Decoder) -> dict[str, Adapter | None]:
    """Return a dict from layer name to a copy of its adapter, or to None if B is zero (so it has no effect yet)."""
    return {
        name: copy.deepcopy(adapter).requires_grad_(False) if bool(adapter.lora_B.any()) else None
        for name, layer in _adapted_layers(model)
        if (adapter := layer.adapter) is not None
    }


@contextlib.contextmanager
def adapters_as(model: Decoder, then: Mapping[str, Adapter | None]) -> Iterator[None]:
    """Inside this context, use adapters that `adapters_now` returned (None: use the layer's frozen weights alone).

    Use this for forward passes without gradients. The adapters in training are not modified.
    """
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
    """Inside this context, use cached row norms for DoRA instead of computing them in every forward pass.

    No weights may change in the meantime. The cache always uses the same memory, because a captured CUDA graph reads
    from fixed addresses.
    """
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
    """Set the dropout seed of a step. `first_row` is the first row of the step's batch that this rank processes."""
    if model.dropout_clock is not None:
        model.dropout_clock.begin_step(step, first_row)


def describe(model: Decoder) -> str:
    """Return a log line that states what is trained, how the base is stored and, for NF4, how it is dequantized."""
    assert model.lora is not None, "a model without adapters"
    chosen = ", ".join(_expand(model.lora.targets))
    ways = [word for word, is_on in (("rsLoRA", model.lora.is_rslora), ("DoRA", model.lora.is_dora)) if is_on]
    how = f" with {' and '.join(ways)}" if ways else ""
    read = f", dequantized by {dequantize_path(model.device)}" if model.base_storage == "nf4" else ""
    learns = f"Training {num_adapter_params(model):,} adapter parameters of rank {model.lora.rank}{how} on {chosen}"
    return f"{learns}; the base weights are frozen in {model.base_storage}{read}."


def num_adapter_params(model: Decoder) -> int:
    return sum(tensor.numel() for tensor in lora_tensors(model).values())


def adapter_config(settings: Lora, base: str) -> dict[str, Any]:
    """Return the contents of adapter_config.json: our settings, and peft's defaults for all other keys.

    `base` is the base model: a name on the Hub, or a folder.
    """
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
    """Turn the model into a plain fp32 Decoder by merging every adapter into its weight: W + scale B A.

    If the adapters use DoRA, their magnitudes are applied too.

    The result is equivalent to the adapted model. If the base was in NF4, the result includes NF4's rounding. To
    merge into the exact base, load it as fp32 or bf16.
    """
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
        problems.append(
            f"The {model.shape.family} family does not support adapters, because no other tool could load them."
        )
    unknown = [target for target in settings.targets if target not in (*TARGETS, "all")]
    problems += [f"lora.targets: {target!r} is not one of {', '.join((*TARGETS, 'all'))}." for target in unknown]
    if not settings.targets:
        problems.append("lora.targets is empty, so nothing would be trained.")
    if settings.rank < 1:
        problems.append(f"lora.rank must be at least 1, not {settings.rank}.")
    if settings.alpha <= 0:
        problems.append(f"lora.alpha must be greater than 0, not {settings.alpha}.")
    if not 0.0 <= settings.dropout < 1.0:
        problems.append(f"lora.dropout must be at least 0 and less than 1, not {settings.dropout}.")
    if problems:
        raise UsageError(
            what="Invalid adapter settings.",
            why="\n".join(problems),
            fix="Correct the invalid keys under lora: in the phase, or use method: full.",
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
    """Draw A uniformly from +-1 / sqrt(inputs), as in peft, with its own random generator, as in `init_weights`."""
    digest = hashlib.sha256(f"{seed}/{name}.lora_A".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(rank, num_in, device="cpu").uniform_(-(num_in**-0.5), num_in**-0.5, generator=generator)
