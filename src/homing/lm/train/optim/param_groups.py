"""The optimizer: Muon for the 2-D matrices of the blocks, AdamW for everything else.

    parameters                    muon     adamw    learning rate  weight decay
    2-D matrices of the blocks    Muon     AdamW    lr             weight_decay
    embedding                     AdamW    AdamW    lr_embedding   none
    head, or a tied matrix        AdamW    AdamW    lr_head        none
    norms and biases              AdamW    AdamW    lr_norm        none
    adapters (method lora)        AdamW    AdamW    lr             weight_decay; none for magnitudes

With `states: int8`, AdamW keeps 8-bit moments for all but small tensors (`Adam8Group`). With `offload`, the state of
all but small tensors is in host memory and is streamed through the GPU in each step.

`step` never waits for the device: learning rates are Python numbers, the step counter is a device tensor, and nothing
is read back. State is saved as named tensors and restored exactly; the vocabulary's padding rows are cut off, as they
are when weights are saved.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from homing.errors import DataError
from homing.lm.model.decoder import Decoder
from homing.lm.model.row_shards import Part, Shards, local, part_of, put
from homing.lm.train.distributed.ranks import ALONE, Ranks
from homing.lm.train.optim.adamw import BLOCK, LEAST_SIZE, Adam8Group, AdamBase, AdamGroup
from homing.lm.train.optim.muon import EAGER, MuonGroup, compiled_parts
from homing.lm.train.optim.muon_shards import ShardedMuonGroup, assign
from homing.lm.train.optim.offload import Load, Now, Place
from homing.wire.run_json import Optimizer as OptimizerSpec

__all__ = ["Optimizer", "build_optimizer", "clip_gradients", "grad_norm", "state_bytes"]

AnyMuon = MuonGroup | ShardedMuonGroup


def build_optimizer(model: Decoder, spec: OptimizerSpec, ranks: Ranks = ALONE, place: Place | None = None) -> Optimizer:
    """Return a new optimizer that keeps its state in `place` (default: the same device as the parameters).

    Move the model to its device before calling this.
    """
    place = place or Place(model.device)
    assert spec.kind in ("muon", "adamw"), f"unknown optimizer {spec.kind!r}"
    parts: dict[str, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts[_part(name, parameter, is_tied=model.shape.is_tied)].append((name, parameter))
    lr = {"block": spec.lr, "embedding": spec.lr_embedding, "head": spec.lr_head, "small": spec.lr_norm}
    # Learning rates of parameters that only `swift` has. keep_scales get a hundredth of the usual rate, because they
    # are multiplied together over all layers, so their effect is exponential in depth.
    lr |= {"values": 0.5 * spec.lr_embedding, "scalars": spec.lr_scalar, "keep": 0.01 * spec.lr_scalar}
    lr |= {"adapter": spec.lr, "magnitude": spec.lr}
    blocks = parts.pop("block", []) if spec.kind == "muon" else []
    muon = _muon_groups(blocks, spec, model.shards, ranks, place)
    adam: list[AdamBase] = []
    for part, named in parts.items():
        decay = spec.weight_decay if part in ("block", "adapter") else 0.0
        adam += _adam_groups(named, spec, place, lr=lr[part], decay=decay)
    return Optimizer(model, muon, adam, place)


def state_bytes(model: Decoder, spec: OptimizerSpec) -> int:
    """Return how many bytes of host memory the optimizer state would take if offloaded, without allocating any."""
    moment = 1 + 4 / BLOCK if spec.states == "int8" else 4
    total = 0.0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if spec.kind == "muon" and _part(name, parameter, is_tied=model.shape.is_tied) == "block":
            total += 4 * local(parameter).numel()
        elif local(parameter).numel() >= LEAST_SIZE:
            total += 2 * moment * local(parameter).numel()
    return int(total)


def _muon_groups(
    named: list[tuple[str, nn.Parameter]], spec: OptimizerSpec, shards: Shards | None, ranks: Ranks, place: Place
) -> list[AnyMuon]:
    by_shape: dict[torch.Size, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in named:
        by_shape[parameter.shape].append((name, parameter))
    if shards is None:
        return [MuonGroup(same, spec, ranks, place) for same in by_shape.values()]
    owners = dict(zip((n for n, _ in named), assign([p.shape for _, p in named], shards.count), strict=True))
    return [
        ShardedMuonGroup(same, [owners[name] for name, _ in same], spec, shards, place) for same in by_shape.values()
    ]


def _adam_groups(
    named: list[tuple[str, nn.Parameter]], spec: OptimizerSpec, place: Place, *, lr: float, decay: float
) -> list[AdamBase]:
    assert spec.states in ("fp32", "int8"), f"unknown states {spec.states!r}"
    same: dict[str, Any] = {"lr": lr, "betas": (spec.beta1, spec.beta2), "eps": spec.eps, "decay": decay}
    small = [(name, parameter) for name, parameter in named if local(parameter).numel() < LEAST_SIZE]
    large = [(name, parameter) for name, parameter in named if local(parameter).numel() >= LEAST_SIZE]
    if spec.states == "fp32" and not place.is_away:
        small, large = named, []  # put all parameters in one group, so that a single fused kernel steps them all
    groups: list[AdamBase] = []
    if small:
        groups.append(AdamGroup(small, **same))
    if large:
        kind = Adam8Group if spec.states == "int8" else AdamGroup
        groups.append(kind(large, **same, place=place))
    return groups


def _part(name: str, parameter: nn.Parameter, *, is_tied: bool) -> str:
    if ".adapter." in name:
        # Adapters do not use Muon: their low-rank factors do not benefit from equal steps in every direction.
        return "adapter" if parameter.dim() == 2 else "magnitude"
    if name == "lm_head.weight" or (is_tied and name == "model.embed_tokens.weight"):
        return "head"
    if name == "model.embed_tokens.weight":
        return "embedding"
    if name.endswith("value_embed.weight"):
        return "values"
    if name.endswith(("gate.weight", "_scale", "first_scales")):
        return "scalars"
    if name.endswith("keep_scales"):
        return "keep"
    is_block_matrix = parameter.dim() == 2 and re.match(r"model\.layers\.\d+\.", name)
    return "block" if is_block_matrix else "small"


class Optimizer:
    """The optimizer for all of a model's parameters.

    `step(lr_scale)` multiplies every learning rate by `lr_scale`, the schedule's current value.
    """

    def __init__(self, model: Decoder, muon: Sequence[AnyMuon], adam: Sequence[AdamBase], place: Place) -> None:
        self.model, self.place = model, place
        self.muon, self.adam = list(muon), list(adam)
        self._loads = [load for muon_group in self.muon for load in muon_group.loads()]
        self._loads += [load for adam_group in self.adam for load in adam_group.loads()]
        # The step counter is on the device, where AdamW's kernel reads it, so that the host never waits for its value.
        self.step_count = torch.zeros((), device=model.device, dtype=torch.float32)

    @property
    def num_steps(self) -> int:
        """The number of steps taken, excluding skipped steps. Reading it makes the host wait for the device."""
        return int(self.step_count)

    @torch.no_grad()
    def step(self, lr_scale: float, is_good: Tensor | None = None, *, num_steps: int = 0) -> None:
        """Take one step.

        If `is_good` (a 0-dim device tensor) is 0, weights and state stay unchanged: the step is skipped without the
        host ever reading that value. `num_steps`, the number of steps already taken, sets the momentum warmup.
        """
        is_good = torch.ones_like(self.step_count) if is_good is None else is_good.to(torch.float32)
        self.step_count += is_good
        self._take(self._loads, Now(lr_scale, self.step_count, is_good, num_steps))

    def _take(self, loads: Sequence[Load], now: Now) -> None:
        for load, states in self.place.pass_over(loads):
            load.step(states, now)

    def compile_steps(self, *, is_on: bool = True, **settings: Any) -> None:
        """Make Muon compile its steps at the next call. AdamW is not compiled, because it uses a fused kernel."""
        groups = [group for group in self.muon if isinstance(group, MuonGroup)]
        parts = compiled_parts(**settings) if is_on and groups else EAGER
        for muon_group in groups:
            muon_group.parts = parts

    def rehearse(self) -> None:
        """Take a step that changes nothing, so that any compilation happens, or fails, now.

        Ranks do not communicate during this step, so a rank on which compilation fails does not block the others.
        """
        compiled = [group for group in self.muon if isinstance(group, MuonGroup) and group.is_compiled]
        for parameter in [parameter for group in compiled for parameter in group.parameters]:
            parameter.grad = torch.zeros_like(parameter)
        nothing = Now(0.0, self.step_count, torch.zeros_like(self.step_count), is_rehearsed=True)
        self._take([load for group in compiled for load in group.loads()], nothing)
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    # -- state -------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Return name -> state tensor. These are views of the live state: save or copy them before the next step.

        If the model is divided among ranks, call `state_parts` instead.
        """
        assert self.model.shards is None, "this rank holds only a part of the state"
        return {name: part.tensor for name, part in self.state_parts().items()}

    def state_parts(self) -> dict[str, Part]:
        """Return name -> the part of this state tensor that this rank holds, as views of the live state."""
        self.place.settle()
        count = part_of(torch.tensor(self.num_steps, dtype=torch.int64), self.model.shards, 1)
        return {**dict(self._state()), "num_steps": count}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore saved state exactly. Raise DataError naming each missing, unknown or wrongly shaped tensor."""
        self.place.settle()
        live = dict(self._state())
        problems = [f"{name} is missing." for name in [*live, "num_steps"] if name not in tensors]
        problems += [f"{name} belongs to another optimizer." for name in tensors if name not in {*live, "num_steps"}]
        for name in live.keys() & tensors.keys():
            if live[name].shape != tuple(tensors[name].shape):
                problems.append(f"{name} has shape {tuple(tensors[name].shape)}, not {live[name].shape}.")
        if problems:
            raise DataError(
                what="The optimizer state does not match this run.",
                why="\n".join(sorted(problems)[:12]),
                fix="Resume with the model and optimizer of the run that saved it, or start a new run.",
            )
        for name, part in live.items():
            put(part, tensors[name])
        self.step_count.fill_(float(tensors["num_steps"]))

    def _state(self) -> Iterator[tuple[str, Part]]:
        for muon_group in self.muon:
            yield from muon_group.state()
        for adam_group in self.adam:
            yield from adam_group.state(self.model)


@torch.no_grad()
def grad_norm(model: nn.Module) -> Tensor:
    """Return the 2-norm of all gradients as a device tensor. Reading its value makes the host wait for the device."""
    grads = _grads(model)
    assert grads, "no gradients; call backward() first"
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    shards = getattr(model, "shards", None)
    if shards is None:
        return norm
    total = norm.square()
    dist.all_reduce(total, group=shards.group)
    return total.sqrt()


def _grads(model: nn.Module) -> list[Tensor]:
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients to a total norm of at most `max_norm` (0: no clipping); return the norm before clipping."""
    norm = grad_norm(model)
    if max_norm > 0:
        torch._foreach_mul_(_grads(model), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
