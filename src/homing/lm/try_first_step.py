"""Runs the part of `homing verify` that needs torch: builds the first phase as the trainer would, and takes one step.

    parameter count by part -> initial weights -> adapters if any -> 2 rows of the phase's data
    -> forward and backward -> is the loss plausible? -> is every trained tensor's gradient finite and non-zero?

This runs on a laptop at no cost and finds problems that would otherwise show up an hour later on a rented GPU. Weights
or data that are missing or do not fit in this machine's memory are replaced by random numbers of the same shape, and
the report lists them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from homing.errors import DataError, HomingError
from homing.lm.data.shards.read_shards import read_manifest
from homing.lm.device import describe_device, pick_device, pick_precision
from homing.lm.model import Decoder, check_shape, count_params, lora
from homing.lm.model.loss import IGNORED
from homing.lm.model.open_weights.find_tensors import INDEX
from homing.lm.phases import open_phase
from homing.lm.train.build_phase import describe_start, load_model, start_of
from homing.lm.train.compute.batch import Batch
from homing.wire import file_names
from homing.wire.run_json import Phase, Run

__all__ = ["StepReport", "VerifyReport", "take_step", "verify"]

BATCH, TOKENS = 2, 64  # number of rows, and number of tokens per row: typical sizes for a dummy batch

# With fresh weights the logits vary a little, so the loss is about 0.1 nats above that of a uniform guess, and
# repetitions in real text add a few tenths. With a wrong mask, a wrong scale or a head that sees its own target, the
# loss is off by whole nats.
LOSS_TOLERANCE = 0.75

BYTES_PER_PARAM = 8  # fp32 weights and gradients; the activations of two short rows are small in comparison
BYTES_PER_FROZEN = 6  # frozen weights: up to 4 bytes (fp32) when read, plus 2 bytes as stored
MEMORY_SHARE = 0.6  # fraction of free memory to use, because the user also needs the machine for other things


@dataclass(frozen=True)
class StepReport:
    loss: float
    grad_norms: dict[str, float]
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class VerifyReport:
    parts: dict[str, int]  # part -> number of parameters, which is 0 for a tied head
    num_params: int
    device: str
    phase: str  # the phase that was tested: always the run's first, because later phases start from its result
    weights: str  # description of the initial weights
    num_adapter_params: int  # number of adapter parameters; 0 if all weights are trained
    batch: str  # description of the two rows of data
    num_layers: int
    num_layers_run: int  # number of layers tested; fewer than num_layers if the model does not fit on this machine
    loss: float
    expected_loss: float  # ln(vocabulary)
    grad_norm: float
    step_s: float
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # findings that deserve a look but may not be problems
    left_out: list[str] = field(default_factory=list)  # one sentence for each thing that was not checked

    @property
    def is_ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "is_ok": self.is_ok}


def verify(run: Run, run_dir: Path) -> VerifyReport:
    """Verify a run and return a report of all problems found. Raises only if the model cannot be built at all."""
    check_shape(run.model)
    parts = count_params(run.model)
    num_params = sum(parts.values())
    problems = []
    if run.sizes.num_params != num_params:
        problems.append(f"run.json says {run.sizes.num_params:,} parameters, but the model has {num_params:,}.")
    here = _Here(run, run_dir, (run_dir / run.data.dir).resolve(), pick_device(run.train.device))
    phase, started = run.phases[0], time.perf_counter()
    built = _build(here, phase)
    if phase.method == "full" and built.model.num_params() != sum(count_params(built.model.shape).values()):
        problems.append(
            f"the model has {built.model.num_params():,} parameters, but its shape implies a different number."
        )
    batch, source, is_real = _batch(here, phase, built.model)
    step = take_step(
        built.model, batch.ids_RT, batch.targets_RT, segments_BT=batch.segments_RT,
        is_fresh=not built.is_trained,
    )  # fmt: skip
    return VerifyReport(
        parts=parts,
        num_params=num_params,
        device=describe_device(here.device),
        phase=phase.kind,
        weights=built.weights,
        num_adapter_params=0 if built.model.lora is None else lora.num_adapter_params(built.model),
        batch=source,
        num_layers=run.model.num_layers,
        num_layers_run=built.model.shape.num_layers,
        loss=step.loss,
        expected_loss=math.log(run.model.vocab_size),
        grad_norm=math.sqrt(sum(norm**2 for norm in step.grad_norms.values())),
        step_s=time.perf_counter() - started,
        problems=problems + step.problems + _of_tasks(run, run_dir),
        notes=_of_trained(step.loss, run.model.vocab_size) if built.is_trained and is_real else [],
        left_out=[*built.left_out, *([] if is_real else [f"The data of {phase.kind}: {source}."]), *_later(run)],
    )


def _later(run: Run) -> list[str]:
    """Describe what is not checked: later phases and, for rl, anything that needs samples from a trained model."""
    kinds = [phase.kind for phase in run.phases]
    said = ["rl: no samples were generated or scored."] if kinds[0] == "rl" else []
    return said + [f"{kind}: it starts from the result of {before}." for before, kind in itertools.pairwise(kinds)]


def take_step(
    model: Decoder, ids_BT: Tensor, targets_BT: Tensor, *, segments_BT: Tensor | None = None, is_fresh: bool = True
) -> StepReport:
    """Run one forward and backward pass; report everything that is wrong with the loss or the gradients."""
    watcher = _Watcher(model)
    try:
        if model.lora is not None:
            lora.begin_step(model, 0)
        loss = model.loss(ids_BT, targets_BT, segments=segments_BT)
        torch.autograd.backward(loss)
    except RuntimeError as exc:
        raise DataError(
            what=f"The forward pass failed: {watcher.where()}.",
            why=str(exc).splitlines()[0],
            fix="Compare the sizes under model: in the run file with the shapes above.",
        ) from exc
    finally:
        watcher.remove()
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    norms = {n: float(p.grad.norm()) if p.grad is not None else 0.0 for n, p in learning.items()}
    problems = _of_loss(float(loss.detach()), model.shape.vocab_size, is_fresh=is_fresh)
    not_finite = [name for name, norm in norms.items() if not math.isfinite(norm)]
    # In a new LoRA adapter, matrix B is zero, so matrix A has no gradient in the first step.
    asleep = {name for name, p in learning.items() if model.lora is not None and _other_half_is_zero(name, learning)}
    dead = [name for name, norm in norms.items() if norm == 0.0 and name not in asleep]
    problems += [_listed("not finite", not_finite)] if not_finite else []
    problems += [_listed("zero, so these weights would never train", dead)] if dead else []
    return StepReport(float(loss.detach()), norms, problems)


def _of_loss(found: float, vocab_size: int, *, is_fresh: bool) -> list[str]:
    expected = math.log(vocab_size)
    if is_fresh and not abs(found - expected) <= LOSS_TOLERANCE:  # also true for NaN
        return [f"the first loss is {found:.3f}; fresh weights should give ln({vocab_size:,}) = {expected:.3f}."]
    return [] if math.isfinite(found) else [f"the first loss is {found:.3f}."]


def _of_trained(found: float, vocab_size: int) -> list[str]:
    """Return a note if the loss of trained weights is worse than guessing.

    Such a loss is not necessarily a problem: small models are often overconfident on text unlike their training data.
    """
    if found <= math.log(vocab_size):
        return []
    return ["the first loss is worse than guessing: these weights were trained on very different data."]


def _listed(fault: str, found: list[str]) -> str:
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"the gradient is {fault}: {', '.join(found[:8])}{more}."


@dataclass(frozen=True)
class _Here:
    run: Run
    run_dir: Path
    data_dir: Path
    device: torch.device


@dataclass(frozen=True)
class _Model:
    model: Decoder
    weights: str
    is_trained: bool
    left_out: list[str] = field(default_factory=list)


def _build(here: _Here, phase: Phase) -> _Model:
    """Build the model as the trainer does, but with random weights if the real ones are not on this machine."""
    start, run = start_of(here, phase, None), here.run
    num_layers = _layers_that_fit(run, here.device, BYTES_PER_PARAM if phase.method == "full" else BYTES_PER_FROZEN)
    is_whole = num_layers == run.model.num_layers
    if start is not None and is_whole and _is_here(start):
        torch.manual_seed(run.seed)
        return _Model(load_model(here, phase, start)[0], describe_start(here, start), is_trained=True)
    model = Decoder(dataclasses.replace(run.model, num_layers=num_layers))
    model.init_weights(run.seed, phase.optimizer.kind)
    model.to(here.device)
    if phase.lora is not None:
        lora.freeze(model, lora.storage_for(phase.method, pick_precision(run.train.precision, here.device)))
        lora.add_lora(model, phase.lora, seed=run.seed)
    if start is None:
        return _Model(model, "fresh ones", is_trained=False)
    named = run.base.address if run.base and not phase.init_from else describe_start(here, start)
    why = "they do not fit in the memory of this machine" if not is_whole else "they are not on this machine"
    return _Model(model, "random ones of that shape", False, [f"The weights of {named}: {why}."])


def _is_here(folder: Path) -> bool:
    """Return whether the weights are on this machine.

    In the case of open weights, this machine may have only the metadata, because the instance downloads them.
    """
    if any((folder / name).is_file() for name in (file_names.WEIGHTS, file_names.ADAPTER)):
        return True
    try:
        shards = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / str(name)).is_file() for name in shards)


def _other_half_is_zero(name: str, learning: dict[str, nn.Parameter]) -> bool:
    other = learning.get(name.replace("lora_A", "lora_B"))
    return "lora_A" in name and other is not None and not bool(other.detach().any())


def _batch(here: _Here, phase: Phase, model: Decoder) -> tuple[Batch, str, bool]:
    """Return two short rows (real data from the phase, or random ids), a description, and whether they are real data.

    Real rows are read in the same way as by the trainer.
    """
    run, device = here.run, here.device
    # An rl phase learns from samples that it generates. Use the run's text instead, if there is any.
    reads = dataclasses.replace(phase, kind="pretrain", rl=None) if phase.kind == "rl" else phase
    folder = (here.run_dir / reads.data.dir).resolve() if reads.data else here.data_dir
    digest = reads.data.manifest_sha256 if reads.data else run.data.manifest_sha256
    if digest and (folder / file_names.MANIFEST).is_file():
        _check_vocabulary(run, folder)
        two = dataclasses.replace(reads, batch_tokens=BATCH * run.model.context)
        work = open_phase(run, two, data_dir=here.data_dir, run_dir=here.run_dir)
        with work.open_batches(model, first_row=0, device=device) as batches:
            batch = _cut(batches.next())
        learned = f", of which {batch.num_targets} are trained on" if batch.segments_RT is not None else ""
        return batch, f"{BATCH} x {batch.ids_RT.shape[1]} tokens of {folder}{learned}", True
    context = min(TOKENS, run.model.context)
    generator = torch.Generator("cpu").manual_seed(run.seed)
    tokens = torch.randint(run.model.vocab_size, (BATCH * context + 1,), generator=generator).to(device)
    shape = (BATCH, context)
    why = "no text is prepared" if phase.kind == "rl" else "nothing is prepared yet"
    source = f"{BATCH} x {context} random ids; {why}"
    return Batch(tokens[:-1].view(shape), tokens[1:].view(shape), BATCH * context), source, False


def _cut(batch: Batch) -> Batch:
    """Truncate the batch to TOKENS positions, or to more if a long question precedes the first trained target."""
    is_learned_T = (batch.targets_RT != IGNORED).any(dim=0)
    first = int(is_learned_T.int().argmax()) if bool(is_learned_T.any()) else 0
    end = max(TOKENS, first + TOKENS // 2)
    targets_RT = batch.targets_RT[:, :end]
    segments_RT = None if batch.segments_RT is None else batch.segments_RT[:, :end]
    num_targets = int((targets_RT != IGNORED).sum())
    return dataclasses.replace(
        batch, ids_RT=batch.ids_RT[:, :end], targets_RT=targets_RT, segments_RT=segments_RT, num_targets=num_targets
    )


def _check_vocabulary(run: Run, folder: Path) -> None:
    manifest = read_manifest(folder)
    # Open weights may have more embedding rows than their tokenizer has ids.
    is_fit = manifest.vocab_size <= run.model.vocab_size if run.base else manifest.vocab_size == run.model.vocab_size
    if not is_fit:
        raise DataError(
            what="Data and model have different vocabularies.",
            why=f"{folder / file_names.MANIFEST} says {manifest.vocab_size:,} tokens, but "
            f"the run's model.vocab_size is {run.model.vocab_size:,}.",
            fix=f"Set model.vocab_size: {manifest.vocab_size}, or run `homing prep {run.name}` again.",
        )


def _of_tasks(run: Run, run_dir: Path) -> list[str]:
    """Check rl phases: read every question file and load every reward.py, as the trainer does; return the problems."""
    # Imported here because the import is slow, and few runs have an rl phase.
    from homing.lm.phases.rl import Reinforce

    data_dir, problems = run_dir / run.data.dir, []
    for phase in run.phases if (data_dir / file_names.TOKENIZER).is_file() else []:
        if phase.kind == "rl":
            try:
                with Reinforce(run, phase, data_dir).judging():
                    pass
            except HomingError as error:
                problems.append("; ".join(str(error).splitlines()))
    return problems


def _layers_that_fit(run: Run, device: torch.device, bytes_per_param: int) -> int:
    free = _free_bytes(device)
    parts, layers = count_params(run.model), run.model.num_layers
    if free is None:
        return layers
    fixed = parts["embedding"] + parts["head"] + run.model.width
    per_layer = (sum(parts.values()) - fixed) // layers
    fitting = int((free * MEMORY_SHARE / bytes_per_param - fixed) // per_layer)
    if fitting < 1:
        needed = bytes_per_param * (fixed + per_layer)
        raise DataError(
            what="Not even one layer of this model fits in the memory of this machine.",
            why=f"It needs {needed:,} bytes. {free:,} are free, of which homing uses at most {MEMORY_SHARE:.0%}.",
            fix="Verify the run without building the model: homing verify --no-run",
        )
    return min(layers, fitting)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        # Use MemAvailable, which includes reclaimable file caches. MemFree would be far too low on a busy machine.
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # macOS has no /proc/meminfo
        return None


class _Watcher:
    """Records the most recently entered module and its inputs, so that a shape error can name the layer."""

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
            return "the error is in the head or the loss"
        name, module, inputs = self.entered[-1]
        given = [tuple(i.shape) for i in inputs if isinstance(i, Tensor)]
        own = [f"{n} has shape {tuple(p.shape)}" for n, p in module.named_parameters(recurse=False)]
        return f"{name or 'the decoder'} got {given[0] if given else 'no tensor'}" + (f"; its {own[0]}" if own else "")

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
