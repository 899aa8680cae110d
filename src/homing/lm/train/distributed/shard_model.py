"""Divides a model among the ranks with torch's FSDP2, so that it may be larger than the memory of one GPU.

    ddp     every rank holds all weights, gradients and optimizer state
    zero2   divided among all ranks; the weights are gathered once per forward pass, and kept until the backward pass
    zero3   divided among all ranks; each block is gathered when it is needed, in forward and again in backward
    hsdp    zero3 within groups of ranks, with a copy in each group: the ranks of a machine, or half of them if there is
            only one machine

One FSDP group per block, and one for the rest (embedding, head, final norm). Weights are gathered and gradients summed
in fp32, so that a step computes what one process would. Gradients are summed and not averaged, because each rank's loss
is already its share of the step's mean.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from homing.errors import UsageError
from homing.lm.model import Decoder
from homing.lm.model.row_shards import Shards, local
from homing.lm.train.distributed.ranks import Ranks
from homing.units import format_bytes
from homing.wire.run_json import Phase

__all__ = ["begin_backward", "gathered_copy", "pick_parallel", "release", "shard_model"]

# Methods of Decoder through which a forward pass may start; FSDP gathers the root's weights at their beginning.
_ENTRIES = ("loss", "token_losses", "next_logits", "hidden")
# Share of free GPU memory that weights, gradients and state may take; activations and logits need the rest.
_SHARE = 0.75


def pick_parallel(
    asked: str, phase: Phase, num_params: int, ranks: Ranks, free_bytes: int | None, precision: str
) -> tuple[str, str]:
    """Return how to divide the model of a phase, and the reason as a sentence ("" if there was nothing to choose).

    `asked` is train.parallel. `auto` takes the first of ddp, zero2 and zero3 that fits into `free_bytes` per rank
    (None: unknown), because each communicates more than the one before it.
    """
    if ranks.count == 1:
        return "ddp", "" if asked in ("auto", "ddp") else f"train.parallel: {asked} has no effect with one rank."
    if phase.method != "full" or phase.kind == "rl":
        assert asked in ("auto", "ddp"), "run files with this combination are refused"
        return "ddp", ""
    if asked == "hsdp" and (ranks.count < 4 or ranks.count % 2):
        raise UsageError(
            what=f"train.parallel: hsdp needs an even number of ranks, at least 4, but there are {ranks.count}.",
            why="hsdp divides the model among the ranks of a group, and keeps a copy in every group.",
            fix="Set train.parallel: zero3, which divides the model among all ranks.",
        )
    if asked != "auto":
        return asked, ""
    if free_bytes is None or phase.optimizer.states == "int8":
        return "ddp", ""
    needed = {kind: held_bytes(kind, phase, num_params, ranks.count, precision) for kind in ("ddp", "zero2", "zero3")}
    room = int(_SHARE * free_bytes)
    kind = next((kind for kind, size in needed.items() if size <= room), "zero3")
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in needed.items())
    fits = "is the first that fits" if needed[kind] <= room else "needs the least"
    return kind, (
        f"train.parallel: {kind}, which {fits} in {format_bytes(room)} per GPU (weights, gradients and state: {sizes})."
    )


def held_bytes(kind: str, phase: Phase, num_params: int, num_ranks: int, precision: str) -> int:
    """Return roughly how many bytes of weights, gradients and optimizer state each rank holds at the peak of a step."""
    state = 0 if phase.offload == "optimizer" else 4 if phase.optimizer.kind == "muon" else 8
    # Matmuls in 16 bits use a copy of their weights, which autograd keeps until the backward pass of its block.
    copies = 0 if precision == "fp32" or phase.recompute == "all" else 2
    if kind == "ddp":
        return num_params * (4 + 4 + state + copies)
    gathered = 4 if kind == "zero2" else 0
    return num_params * (4 + 4 + state) // num_ranks + num_params * (gathered + copies)


def shard_model(model: Decoder, kind: str, ranks: Ranks, device: torch.device) -> None:
    """Divide the model's parameters, which need not be initialized yet, and move this rank's rows to `device`."""
    mesh = _mesh(kind, ranks, device)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=kind != "zero2")
    fully_shard(model, mesh=mesh)
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for name in _ENTRIES:
        register_fsdp_forward_method(model, name)
    own = mesh["shard"]
    model.shards = Shards(
        kind, own.get_group(), own.get_local_rank(), own.size(),
        is_first_copy=mesh.ndim == 1 or mesh["copy"].get_local_rank() == 0,
    )  # fmt: skip


def _mesh(kind: str, ranks: Ranks, device: torch.device) -> DeviceMesh:
    if kind != "hsdp":
        return init_device_mesh(device.type, (ranks.count,), mesh_dim_names=("shard",))
    own = ranks.local_count if ranks.local_count < ranks.count else ranks.count // 2
    return init_device_mesh(device.type, (ranks.count // own, own), mesh_dim_names=("copy", "shard"))


def _fsdp_modules(model: Decoder) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def begin_backward(model: Decoder, *, is_last: bool) -> None:
    """Call before each micro-batch. With zero2 the weights stay gathered until the last one of the step."""
    if model.shards is not None and model.shards.kind == "zero2":
        assert isinstance(model, FSDPModule)
        model.set_reshard_after_backward(is_last)


def release(model: Decoder) -> None:
    """Free gathered weights after a forward pass without backward; `parameters()` are this rank's rows again."""
    for module in _fsdp_modules(model):
        module.reshard()


@torch.no_grad()
def gathered_copy(model: Decoder, *, is_kept: bool) -> Decoder | None:
    """Return an undivided copy of the model in its compute dtype, on ranks with `is_kept`; None on the others.

    All ranks must call this, and the ranks of one copy of the model must agree on which of them keep it.
    """
    shards = model.shards
    assert shards is not None
    copy: Decoder | None = None
    if is_kept:
        with torch.device("meta"):
            copy = Decoder(model.shape)
        copy.compute_dtype, copy.has_flex = model.compute_dtype, model.has_flex
    for name, parameter in model.named_parameters():
        whole = _gathered(local(parameter), parameter.shape, shards)
        if copy is not None:
            path, _, kind = name.rpartition(".")
            dtype = model.compute_dtype if whole.dim() > 1 else whole.dtype
            setattr(copy.get_submodule(path), kind, torch.nn.Parameter(whole.to(dtype), requires_grad=False))
    return None if copy is None else copy.to(model.device)


def _gathered(mine: Tensor, shape: Any, shards: Shards) -> Tensor:
    each = -(-shape[0] // shards.count)
    padded = mine.new_zeros(each, *shape[1:])
    padded[: len(mine)] = mine
    whole = mine.new_empty(each * shards.count, *shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=shards.group)
    return whole[: shape[0]]
