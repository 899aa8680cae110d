"""Gradients to weights: Muon on the matrices of the blocks, AdamW on the rest.

    part                          muon     adamw    rate          decay
    2-D matrices of the blocks    Muon     AdamW    lr            weight_decay
    embedding                     AdamW    AdamW    lr_embedding  none
    head, or a tied matrix        AdamW    AdamW    lr_head       none
    norms and biases              AdamW    AdamW    lr_norm       none
    adapters (method lora)        AdamW    AdamW    lr            weight_decay; their magnitudes none

With `states: int8` the moments of AdamW are kept in eight bits, in all but small tensors (`adam8`). With `offload` the
state of all but small tensors lives in the host's memory and passes over the card in each step.

`step` never waits for the device: rates are host numbers, the step counter lives beside the state, and nothing is read
back. State goes to disk as named tensors and comes back exactly; padding rows of the vocabulary are cut as in the
weights.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from homing.errors import DataError
from homing.lm.model.decoder import Decoder
from homing.lm.train.adam import AdamBase, AdamGroup
from homing.lm.train.adam8 import BLOCK, LEAST_SIZE, Adam8Group
from homing.lm.train.muon import EAGER, MuonGroup, compiled_parts
from homing.lm.train.offload import Load, Now, Place
from homing.lm.train.ranks import ALONE, Ranks
from homing.wire.run import Optimizer as OptimizerSpec

__all__ = ["Optimizer", "build_optimizer", "clip_gradients", "grad_norm", "state_bytes"]


def build_optimizer(model: Decoder, spec: OptimizerSpec, ranks: Ranks = ALONE, place: Place | None = None) -> Optimizer:
    """State is made on the device the parameters are on now, or in `place`; so move the model first."""
    place = place or Place(model.device)
    assert spec.kind in ("muon", "adamw"), f"unknown optimizer {spec.kind!r}"
    parts: dict[str, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts[_part(name, parameter, is_tied=model.shape.is_tied)].append((name, parameter))
    lr = {"block": spec.lr, "embedding": spec.lr_embedding, "head": spec.lr_head, "small": spec.lr_norm}
    # Those of swift. What is kept of the stream is raised to the power of the layers, so it moves a hundredth as fast.
    lr |= {"values": 0.5 * spec.lr_embedding, "scalars": spec.lr_scalar, "keep": 0.01 * spec.lr_scalar}
    lr |= {"adapter": spec.lr, "magnitude": spec.lr}
    muon: list[MuonGroup] = []
    if spec.kind == "muon":
        by_shape: dict[torch.Size, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, parameter in parts.pop("block", []):
            by_shape[parameter.shape].append((name, parameter))
        muon = [MuonGroup(named, spec, ranks, place) for named in by_shape.values()]
    adam: list[AdamBase] = []
    for part, named in parts.items():
        decay = spec.weight_decay if part in ("block", "adapter") else 0.0
        adam += _adam_groups(named, spec, place, lr=lr[part], decay=decay)
    return Optimizer(model, muon, adam, place)


def state_bytes(model: Decoder, spec: OptimizerSpec) -> int:
    """Of the state that would live in the host's memory; known before any of it is made."""
    moment = 1 + 4 / BLOCK if spec.states == "int8" else 4
    total = 0.0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if spec.kind == "muon" and _part(name, parameter, is_tied=model.shape.is_tied) == "block":
            total += 4 * parameter.numel()
        elif parameter.numel() >= LEAST_SIZE:
            total += 2 * moment * parameter.numel()
    return int(total)


def _adam_groups(
    named: list[tuple[str, nn.Parameter]], spec: OptimizerSpec, place: Place, *, lr: float, decay: float
) -> list[AdamBase]:
    assert spec.states in ("fp32", "int8"), f"unknown states {spec.states!r}"
    same: dict[str, Any] = {"lr": lr, "betas": (spec.beta1, spec.beta2), "eps": spec.eps, "decay": decay}
    small = [(name, parameter) for name, parameter in named if parameter.numel() < LEAST_SIZE]
    large = [(name, parameter) for name, parameter in named if parameter.numel() >= LEAST_SIZE]
    if spec.states == "fp32" and not place.is_away:
        small, large = named, []  # one kernel for all
    groups: list[AdamBase] = []
    if small:
        groups.append(AdamGroup(small, **same))
    if large:
        kind = Adam8Group if spec.states == "int8" else AdamGroup
        groups.append(kind(large, **same, place=place))
    return groups


def _part(name: str, parameter: nn.Parameter, *, is_tied: bool) -> str:
    if ".adapter." in name:
        # Not Muon: the two factors of a narrow product have no use for steps of equal length in every direction.
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
    """All parameters of one model. `step(lr_scale)` multiplies every rate by the schedule's fraction."""

    def __init__(self, model: Decoder, muon: Sequence[MuonGroup], adam: Sequence[AdamBase], place: Place) -> None:
        self.model, self.place = model, place
        self.muon, self.adam = list(muon), list(adam)
        self._loads = [load for muon_group in self.muon for load in muon_group.loads()]
        self._loads += [load for adam_group in self.adam for load in adam_group.loads()]
        # Kept on the device, as AdamW's kernel reads it there, and so that nobody waits to learn what it is.
        self.step_count = torch.zeros((), device=model.device, dtype=torch.float32)

    @property
    def num_steps(self) -> int:
        """Steps taken, without those that were skipped; whoever asks waits for the device."""
        return int(self.step_count)

    @torch.no_grad()
    def step(self, lr_scale: float, is_good: Tensor | None = None, *, num_steps: int = 0) -> None:
        """With `is_good` (one number on the device) 0, weights and state stay as they are: a step that is skipped
        without the host ever asking whether. `num_steps` of the run so far are what the momentum's growth goes by."""
        is_good = torch.ones_like(self.step_count) if is_good is None else is_good.to(torch.float32)
        self.step_count += is_good
        self._take(self._loads, Now(lr_scale, self.step_count, is_good, num_steps))

    def _take(self, loads: Sequence[Load], now: Now) -> None:
        for load, states in self.place.pass_over(loads):
            load.step(states, now)

    def compile_steps(self, *, is_on: bool = True, **settings: Any) -> None:
        """Muon's steps, compiled when they are next taken. AdamW has one kernel for all its parameters as it is."""
        parts = compiled_parts(**settings) if is_on and self.muon else EAGER
        for muon_group in self.muon:
            muon_group.parts = parts

    def rehearse(self) -> None:
        """A step that changes nothing: so that what compiles does so now, and fails now if it cannot. Ranks do not meet
        in it: one where it fails keeps no other waiting."""
        compiled = [group for group in self.muon if group.is_compiled]
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
        """Name -> tensor; views of the live state, so write or copy them before the next step."""
        self.place.settle()
        tensors = {name: self.model.cut_padding(owner, t).detach() for name, owner, t in self._state()}
        return {**tensors, "num_steps": torch.tensor(self.num_steps, dtype=torch.int64)}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The state as it was saved, bit for bit; a missing, foreign or misshapen tensor is refused by name."""
        self.place.settle()
        live = {name: self.model.cut_padding(owner, t) for name, owner, t in self._state()}
        problems = [f"{name} is missing." for name in [*live, "num_steps"] if name not in tensors]
        problems += [f"{name} belongs to another optimizer." for name in tensors if name not in {*live, "num_steps"}]
        for name in live.keys() & tensors.keys():
            if live[name].shape != tensors[name].shape:
                problems.append(f"{name} is {tuple(tensors[name].shape)}, not {tuple(live[name].shape)}.")
        if problems:
            raise DataError(
                what="The optimizer state does not fit this run.",
                why="\n".join(sorted(problems)[:12]),
                fix="Resume with the model and optimizer of the run that saved it, or begin a new run.",
            )
        for name, tensor in live.items():
            tensor.copy_(tensors[name])
        self.step_count.fill_(float(tensors["num_steps"]))

    def _state(self) -> Iterable[tuple[str, str, Tensor]]:
        """(name on disk, name of the parameter, live tensor)"""
        for muon_group in self.muon:
            for name, momentum in zip(muon_group.names, muon_group.momentum_MRC, strict=True):
                yield f"{name}.momentum", name, momentum
            for name, squares in zip(muon_group.names, muon_group.squares, strict=False):  # none where it is not used
                yield f"{name}.squares", name, squares
        for adam_group in self.adam:
            yield from adam_group.state(self.model)


@torch.no_grad()
def grad_norm(model: nn.Module) -> Tensor:
    """The 2-norm of all gradients together, as a tensor on the device: whoever reads it pays for the wait."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads, "no gradients; backward first"
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Shrinks all gradients together so that their norm is at most `max_norm` (0: leaves them); the norm before."""
    norm = grad_norm(model)
    if max_norm > 0:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
