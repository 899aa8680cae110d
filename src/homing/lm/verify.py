"""The torch part of `homing verify`: build the model, count it, take one step, look at every gradient.

    count by part -> build -> forward and backward on 2 rows of 64 tokens -> loss near ln(vocabulary)?
    -> a finite, non-zero gradient for every parameter?

It finds what a rented GPU would find an hour later, on a laptop, for nothing. Where the whole model does not fit in
this machine's memory, the step is taken with fewer layers, and the report says so.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from homing.errors import DataError, HomingError
from homing.lm.device import describe_device, pick_device
from homing.lm.model import Decoder, check_shape, count_params
from homing.lm.shards.pack import PackedStream, check_ids
from homing.lm.shards.read import open_split, read_manifest
from homing.wire import names
from homing.wire.run import Run

__all__ = ["StepReport", "VerifyReport", "take_step", "verify"]

BATCH, TOKENS = 2, 64  # the dummy batch that people know from their own verify scripts

# Fresh weights spread the logits a little, which costs about 0.1 nats over uniform; real text, where a row repeats
# itself, adds a few tenths. A wrong mask, a wrong scale or a head that sees its own target is off by nats.
LOSS_TOLERANCE = 0.75

BYTES_PER_PARAM = 8  # fp32 weights and gradients; the activations of two short rows are small beside them
MEMORY_SHARE = 0.6  # of what is free: the person is using this machine for other things too


@dataclass(frozen=True)
class StepReport:
    loss: float
    grad_norms: dict[str, float]
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class VerifyReport:
    parts: dict[str, int]  # part -> parameters; a tied head counts 0
    num_params: int
    device: str
    batch: str  # where the two rows came from
    num_layers: int
    num_layers_run: int  # fewer where the whole model does not fit here
    loss: float
    expected_loss: float  # ln(vocabulary)
    grad_norm: float
    step_s: float
    problems: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "is_ok": self.is_ok}


def verify(run: Run, run_dir: Path) -> VerifyReport:
    """Problems are in the report, all of them; only what keeps the model from being built at all is raised."""
    check_shape(run.model)
    parts = count_params(run.model)
    num_params = sum(parts.values())
    problems = []
    if run.sizes.num_params != num_params:
        problems.append(f"run.json says {run.sizes.num_params:,} parameters, the model has {num_params:,}.")
    device = pick_device(run.train.device)
    num_layers_run = _layers_that_fit(run, device)
    shape = dataclasses.replace(run.model, num_layers=num_layers_run)
    started = time.perf_counter()
    model = Decoder(shape)
    if model.num_params() != sum(count_params(shape).values()):
        problems.append(f"the built model has {model.num_params():,} parameters, its table says otherwise.")
    model.init_weights(run.seed)
    model.to(device)
    ids_BT, targets_BT, source = _batch(run, run_dir)
    step = take_step(model, ids_BT.to(device), targets_BT.to(device))
    expected = math.log(shape.vocab_size)
    return VerifyReport(
        parts=parts,
        num_params=num_params,
        device=describe_device(device),
        batch=source,
        num_layers=run.model.num_layers,
        num_layers_run=num_layers_run,
        loss=step.loss,
        expected_loss=expected,
        grad_norm=math.sqrt(sum(norm**2 for norm in step.grad_norms.values())),
        step_s=time.perf_counter() - started,
        problems=problems + step.problems + _of_tasks(run, run_dir),
    )


def take_step(model: Decoder, ids_BT: Tensor, targets_BT: Tensor) -> StepReport:
    """One forward and backward, and everything about it that should not be."""
    watcher = _Watcher(model)
    try:
        loss = model.loss(ids_BT, targets_BT)
        torch.autograd.backward(loss)
    except RuntimeError as exc:
        raise DataError(
            what=f"The model cannot compute: {watcher.where()}.",
            why=str(exc).splitlines()[0],
            fix="Check the sizes under model: in the run file against those in the first line.",
        ) from exc
    finally:
        watcher.remove()
    norms = {n: float(p.grad.norm()) if p.grad is not None else 0.0 for n, p in model.named_parameters()}
    expected, found = math.log(model.shape.vocab_size), float(loss.detach())
    problems = []
    if not abs(found - expected) <= LOSS_TOLERANCE:  # written so that a NaN is a problem too
        problems.append(
            f"the first loss is {found:.3f}; fresh weights should give ln({model.shape.vocab_size:,}) = {expected:.3f}."
        )
    not_finite = [name for name, norm in norms.items() if not math.isfinite(norm)]
    dead = [name for name, norm in norms.items() if norm == 0.0]
    problems += [_listed("not finite", not_finite)] if not_finite else []
    problems += [_listed("zero, so it would never learn", dead)] if dead else []
    return StepReport(found, norms, problems)


def _listed(fault: str, found: list[str]) -> str:
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"the gradient is {fault}: {', '.join(found[:8])}{more}."


def _batch(run: Run, run_dir: Path) -> tuple[Tensor, Tensor, str]:
    """Two rows of the prepared text where there is some, else of random ids."""
    context = min(TOKENS, run.model.context)
    count = BATCH * context + 1
    data_dir = run_dir / run.data.dir
    if (data_dir / names.MANIFEST).is_file():
        manifest = read_manifest(data_dir)
        # Open weights may have more rows than their tokenizer has ids.
        is_fit = (
            manifest.vocab_size <= run.model.vocab_size if run.base else manifest.vocab_size == run.model.vocab_size
        )
        if not is_fit:
            raise DataError(
                what="Data and model do not have the same vocabulary.",
                why=f"{data_dir / names.MANIFEST} says {manifest.vocab_size:,} tokens, "
                f"the run's model.vocab_size is {run.model.vocab_size:,}.",
                fix=f"Set model.vocab_size: {manifest.vocab_size}, or run `homing prep {run.name}` again.",
            )
        stream = PackedStream(open_split(data_dir, manifest, "train"), seed=run.seed)
        ids = stream.read(0, count)
        check_ids(ids, run.model.vocab_size, "train")
        tokens = torch.from_numpy(ids).long()
        source = f"{BATCH} x {context} tokens of {data_dir}"
    else:
        generator = torch.Generator("cpu").manual_seed(run.seed)
        tokens = torch.randint(run.model.vocab_size, (count,), generator=generator)
        source = f"{BATCH} x {context} random ids; nothing is prepared yet"
    return tokens[:-1].view(BATCH, context), tokens[1:].view(BATCH, context), source


def _of_tasks(run: Run, run_dir: Path) -> list[str]:
    """Of phases of rl: every file of questions read, every reward.py loaded, as the trainer will do it."""
    from homing.lm.phases.rl import Reinforce  # takes a moment to load, and few runs have one

    data_dir, problems = run_dir / run.data.dir, []
    for phase in run.phases if (data_dir / names.TOKENIZER).is_file() else []:
        if phase.kind == "rl":
            try:
                with Reinforce(run, phase, data_dir).judging():
                    pass
            except HomingError as error:
                problems.append("; ".join(str(error).splitlines()))
    return problems


def _layers_that_fit(run: Run, device: torch.device) -> int:
    free = _free_bytes(device)
    parts, layers = count_params(run.model), run.model.num_layers
    if free is None:
        return layers
    fixed = parts["embedding"] + parts["head"] + run.model.width
    per_layer = (sum(parts.values()) - fixed) // layers
    fitting = int((free * MEMORY_SHARE / BYTES_PER_PARAM - fixed) // per_layer)
    if fitting < 1:
        needed = BYTES_PER_PARAM * (fixed + per_layer)
        raise DataError(
            what="Not even one layer of this model fits into the memory of this machine.",
            why=f"It needs {needed:,} bytes; {free:,} are free here, and homing takes {MEMORY_SHARE:.0%} at most.",
            fix="homing verify --no-run checks what can be checked without building it.",
        )
    return min(layers, fitting)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        # What could be had, file caches included; the free pages alone would be far too few on a busy machine.
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # macOS has no such file
        return None


class _Watcher:
    """Knows which module was entered last and with what, so that a shape error can be named by its layer."""

    def __init__(self, model: nn.Module) -> None:
        self.entered: list[tuple[str, nn.Module, Any]] = []
        self.handles = []
        for name, module in model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._enter(name)))
            self.handles.append(module.register_forward_hook(self._leave))

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            self.entered.append((name, module, inputs))

        return hook

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.entered.pop()

    def where(self) -> str:
        if not self.entered:
            return "in the head or the loss"
        name, module, inputs = self.entered[-1]
        given = [tuple(i.shape) for i in inputs if isinstance(i, Tensor)]
        own = [f"{n} {tuple(p.shape)}" for n, p in module.named_parameters(recurse=False)]
        return f"{name or 'the decoder'} got {given[0] if given else 'nothing'}" + (f", its {own[0]}" if own else "")

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
