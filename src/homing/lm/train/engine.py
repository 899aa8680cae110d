"""A step on this machine: what was chosen for it, and what gives way where memory or the compiler fails.

    settle       choices of the checkpoint or new ones -> precision, compile, attention, rows at a time
    first_step   as any other, and what it took: seconds, memory, what was compiled; then graphs or none for the others
    gradients    rows -> micro-batches -> loss and gradients; out of memory: smaller ones, and once more
    update       gradients -> weights

It knows nothing of schedules, checkpoints or the end of a run. All ranks give way alike.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from homing.lm.device import free_memory
from homing.lm.model import lora
from homing.lm.model.backends import use_attention
from homing.lm.train.batch import Batch
from homing.lm.train.build import Built
from homing.lm.train.choices import lower_micro_batch, memory_warning, pick_attention, pick_choices, what_else
from homing.lm.train.compiling import Compiling
from homing.lm.train.control import Hopeless
from homing.lm.train.figures import Figures
from homing.lm.train.metrics import Tell
from homing.lm.train.passes import Passes
from homing.lm.train.session import Session
from homing.units import format_duration
from homing.wire.run import Phase

__all__ = ["Engine"]

_GOOD, _OUT_OF_MEMORY, _NOT_COMPILED = range(3)  # of a step, before all ranks act on it


class Engine:
    """Of one phase, on one rank."""

    def __init__(self, session: Session, phase: Phase, built: Built, tell: Tell) -> None:
        self.s, self.phase, self.tell = session, phase, tell
        self.model, self.optimizer = built.model, built.optimizer
        self.num_rows = built.work.rows_per_step // session.ranks.count  # of a step, on this rank
        self.micro_batch = 0
        self.compiling = Compiling(session, built, tell)
        train = session.run.train
        # Timing them is no rule that two starts would follow alike; a person may still ask for them by name.
        graphs = "off" if train.is_deterministic and train.graphs == "auto" else train.graphs
        self.passes = Passes(built.model, session.device, graphs, tell, session.ranks.count)
        self._picked: dict[str, Any] = {}

    @property
    def choices(self) -> dict[str, Any]:
        """As they are by now: they ride in every checkpoint."""
        graphs = {"graphs": self.passes.picked} if self.passes.picked else {}
        return {**self._picked, "micro_batch": self.micro_batch, "is_compiled": self.compiling.is_on, **graphs}

    @property
    def is_first_longer(self) -> bool:
        """The first step took what no later one takes."""
        return self.compiling.is_on or self.passes.has_tried

    def settle(self, before: dict[str, Any]) -> None:
        """`before`: the choices of the checkpoint, or none."""
        train, model, device = self.s.run.train, self.s.run.model, self.s.device
        picked, changed = pick_choices(train, self.phase, model, device, self.num_rows, before)
        picked, told = pick_attention(train, self.phase, model, device, picked)
        # Another card may have had more memory free, or a slow moment.
        picked, changed = self.s.ranks.agree((picked, changed))
        for text in told:
            self.tell("attention_picked", text, aloud=True)
        if changed:
            self.tell("choices_changed", f"Not as in the checkpoint: {', '.join(changed)}.", aloud=True)
        self._picked, self.micro_batch = picked.to_dict(), picked.micro_batch
        self.model.set_precision(picked.precision)
        self.model.set_recompute(self.phase.recompute)
        self.compiling.switch(is_on=picked.is_compiled)
        if device.type == "cuda":
            use_attention(picked.attention)
        self.model.has_flex = picked.segments == "flex"
        self.passes.settle(str(before.get("graphs", "")) if before.get("device") == picked.device else "")
        if device.type == "cuda":
            free_memory()  # what the races and the phase before leave
            torch.cuda.reset_peak_memory_stats(device)  # figures are of this phase

    def first_step(self, take: Callable[[], Figures], batch: Batch) -> Figures:
        begun = time.perf_counter()
        figures = self.compiling.first(take, self.phase.kind) if self.compiling.is_on else take()
        figures.read()
        took = time.perf_counter() - begun
        if self.s.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.s.device).total_memory
            if text := memory_warning(torch.cuda.max_memory_reserved(self.s.device), total):
                self.tell("memory_near_limit", text, aloud=True)
        since_start = time.monotonic() - self.s.wishes.started
        text = f"First step {format_duration(since_start)} after the start, {format_duration(took)} of it in the step."
        self.tell("first_step", text, seconds=since_start, step_s=took, is_warm=self.compiling.parts.is_warm)
        self.compiling.keep()
        self.passes.decide(next(batch.pieces(self.micro_batch)))
        return figures

    def gradients(self, batch: Batch, step: int) -> Tensor:
        """Accumulated over micro-batches: the mean over all targets, however the rows are cut."""
        while True:
            news, problem = _GOOD, ""
            total = torch.zeros((), device=self.s.device)
            try:
                # What dropout draws from, again at each try.
                lora.begin_step(self.model, step, first_row=self.s.ranks.rank * self.num_rows)
                pieces = list(batch.pieces(self.micro_batch))
                self.passes.begin(pieces)
                for piece in pieces:
                    total += self.passes.run(piece)
            except torch.OutOfMemoryError as exc:
                news, problem = _OUT_OF_MEMORY, str(exc).splitlines()[0]
            except Exception as exc:
                # Compilers fail with errors of many kinds. If it was not the compiler, the plain step fails as well.
                if not self.compiling.may_fail(exc):
                    raise
                news, problem = _NOT_COMPILED, f"{type(exc).__name__}: {str(exc).strip()[:500]}"
            # Out of the `except`, so that the failed step's tensors are no longer held by the exception.
            # All ranks go on alike, or their gradients would never meet.
            news = self.s.ranks.worst(news, within_s=self.compiling.deadline_s)
            if news == _GOOD:
                self.s.ranks.add_up(self.model, total)
                self.compiling.is_proven = self.compiling.is_on
                return total
            self.passes.forget()
            self.optimizer.zero_grad()
            change = self._shrink if news == _OUT_OF_MEMORY else self.compiling.stop
            change(problem or "It happened on another rank.")

    def update(self, lr_scale: float, is_good: Tensor, step: int) -> None:
        """The optimizer's step. Rows are over by then, so fewer of them at a time would not help."""
        try:
            self.optimizer.step(lr_scale, is_good, num_steps=step)
        except torch.OutOfMemoryError as exc:
            peak = torch.cuda.max_memory_allocated(self.s.device) if self.s.device.type == "cuda" else 0
            raise Hopeless(
                what=f"Out of memory in the optimizer's step (peak {peak / 2**30:.1f} GiB).",
                why=str(exc).splitlines()[0],
                fix=what_else(dataclasses.replace(self.phase, recompute="all"), "take a smaller model"),
            ) from exc

    def _shrink(self, problem: str) -> None:
        """Fewer rows at a time, the same batch. Where a person set their number, or one is too many, nothing helps."""
        peak = torch.cuda.max_memory_allocated(self.s.device) if self.s.device.type == "cuda" else 0
        lower = lower_micro_batch(self.micro_batch, self.num_rows)
        if self.phase.micro_batch or lower >= self.micro_batch:
            raise Hopeless(
                what=f"Out of memory at a micro-batch of {self.micro_batch} rows (peak {peak / 2**30:.1f} GiB).",
                why=problem,
                fix=f"Set micro_batch: {lower} in the phase (the batch stays the same), or 0 to let homing pick."
                if self.micro_batch > 1
                else what_else(self.phase, "lower model.context"),
            )
        if self.s.device.type == "cuda":
            free_memory()
        text = f"Out of memory: micro-batch {self.micro_batch} -> {lower} rows, the batch stays the same."
        self.tell("micro_batch_lowered", text, aloud=True, why=problem)
        self.micro_batch = lower
