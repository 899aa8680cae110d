"""Runs one training step on this machine, and adapts when memory or the compiler fails.

    settle       reuse the checkpoint's choices or make new ones: precision, compilation, attention, micro-batch
    first_step   a step plus measurements: duration, memory, compilation; then decides on CUDA graphs for later steps
    gradients    rows -> micro-batches -> loss and gradients; if out of memory, retry with smaller micro-batches
    update       gradients -> weights
    Figures      the loss and gradient norm of a step, read one step later

Schedules, checkpoints and the end of a run are handled elsewhere. All ranks adapt in the same way.

If enabled, model and optimizer are compiled in the first step. If compilation fails, a warning is printed and training
continues uncompiled (`auto`), or the run fails (`on`). Compiled code is saved for the next attempt.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from homing.lm.device import free_memory
from homing.lm.model import lora
from homing.lm.model.attention_backends import use_attention
from homing.lm.train.build_phase import Built
from homing.lm.train.compute.batch import Batch
from homing.lm.train.compute.compile_cache import CompileCache, Parts
from homing.lm.train.compute.forward_backward import Passes
from homing.lm.train.compute.hardware_choices import (
    lower_micro_batch,
    memory_warning,
    pick_attention,
    pick_choices,
    what_else,
)
from homing.lm.train.distributed.shard_model import begin_backward
from homing.lm.train.metrics import Notify
from homing.lm.train.open_session import Session
from homing.lm.train.stop_requests import FatalError
from homing.units import format_duration
from homing.wire.run_json import Phase

__all__ = ["Compiling", "Engine", "Figures"]


class Figures:
    """The metrics of one step. `loss` and `norm` are valid only after `read` has been called.

    They are copied from the device asynchronously. Reading a number immediately would make the host wait for the
    device, and then the device wait for the host. One step later the number has already arrived on the host, and the
    device already has its next step.
    """

    def __init__(
        self, step: int, loss_and_norm: Tensor, begun_at: float = 0.0, more: dict[str, float] | None = None
    ) -> None:
        self.step = step
        self.more = more or {}  # extra metrics from the phase's data
        self.begun_at = begun_at  # when the host began to queue the step on the device
        self.read_at = 0.0
        self.loss = self.norm = math.nan
        self._host, self._event = loss_and_norm, None
        if loss_and_norm.is_cuda:
            self._host = torch.empty(2, pin_memory=True)
            self._host.copy_(loss_and_norm, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @classmethod
    def none(cls) -> Figures:
        """Return placeholder metrics, to be used before the first step."""
        return cls(0, torch.full((2,), math.nan))

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def read(self) -> None:
        """Block until the GPU has finished this step, then set `loss` and `norm`."""
        if self.read_at:
            return
        if self._event is not None:
            self._event.synchronize()
        self.loss, self.norm = self._host.tolist()
        self.read_at = time.monotonic()


# Outcomes of a step on one rank, from best to worst. All ranks act on the worst of their outcomes.
_GOOD, _OUT_OF_MEMORY, _NOT_COMPILED = range(3)


class Engine:
    """Runs the steps of one phase on one rank."""

    def __init__(self, session: Session, phase: Phase, built: Built, notify: Notify) -> None:
        self.s, self.phase, self.notify = session, phase, notify
        self.model, self.optimizer = built.model, built.optimizer
        self.num_rows = built.work.rows_per_step // session.ranks.count  # number of rows per step on this rank
        self.micro_batch = 0
        self.compiling = Compiling(session, built, notify)
        train = session.run.train
        # Whether to use CUDA graphs is decided by timing them, so it may differ each time a run is started. Therefore
        # deterministic runs use graphs only if the run file says so.
        graphs = "off" if train.is_deterministic and train.graphs == "auto" else train.graphs
        self.passes = Passes(built.model, session.device, graphs, notify, session.ranks.count)
        self._picked: dict[str, Any] = {}

    @property
    def choices(self) -> dict[str, Any]:
        """The choices in use (precision, compilation, attention, micro-batch, graphs), stored in every checkpoint."""
        graphs = {"graphs": self.passes.picked} if self.passes.picked else {}
        return {**self._picked, "micro_batch": self.micro_batch, "is_compiled": self.compiling.is_on, **graphs}

    @property
    def is_first_longer(self) -> bool:
        """True if the first step included one-time work (compilation, graph capture)."""
        return self.compiling.is_on or self.passes.has_tried

    def settle(self, before: dict[str, Any]) -> None:
        """Make the choices for this machine, or reuse those in the checkpoint, and apply them.

        `before` holds the choices saved in the checkpoint; it is empty if there is none.
        """
        train, model, device = self.s.run.train, self.s.run.model, self.s.device
        picked, changed = pick_choices(train, self.phase, model, device, self.num_rows, before)
        picked, notices = pick_attention(train, self.phase, model, device, picked)
        # All ranks use the first rank's choices, because the others may have measured different timings or free memory.
        picked, changed = self.s.ranks.agree((picked, changed))
        for text in notices:
            self.notify("attention_picked", text, notice=True)
        if changed:
            self.notify(
                "choices_changed", f"Changed since the checkpoint was saved: {', '.join(changed)}.", notice=True
            )
        self._picked, self.micro_batch = picked.to_dict(), picked.micro_batch
        self.model.set_precision(picked.precision)
        self.model.set_recompute(self.phase.recompute)
        self.compiling.switch(is_on=picked.is_compiled)
        if device.type == "cuda":
            use_attention(picked.attention)
        self.model.has_flex = picked.segments == "flex"
        self.passes.settle(str(before.get("graphs", "")) if before.get("device") == picked.device else "")
        if device.type == "cuda":
            free_memory()  # free memory left over from the kernel benchmarks and the previous phase
            torch.cuda.reset_peak_memory_stats(device)  # from now on, measure the peak memory of this phase only

    def first_step(self, take: Callable[[], Figures], batch: Batch) -> Figures:
        begun = time.perf_counter()
        figures = self.compiling.first(take, self.phase.kind) if self.compiling.is_on else take()
        figures.read()
        took = time.perf_counter() - begun
        if self.s.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.s.device).total_memory
            if text := memory_warning(torch.cuda.max_memory_reserved(self.s.device), total):
                self.notify("memory_near_limit", text, notice=True)
        since_start = time.monotonic() - self.s.requests.started
        text = (
            f"The first step ended {format_duration(since_start)} after the trainer started;"
            f" the step itself took {format_duration(took)}."
        )
        self.notify("first_step", text, seconds=since_start, step_s=took, is_warm=self.compiling.parts.is_warm)
        self.compiling.keep()
        self.passes.decide(next(batch.micro_batches(self.micro_batch)))
        return figures

    def gradients(self, batch: Batch, step: int) -> Tensor:
        """Accumulate gradients over micro-batches; return the loss, which is the mean over all targets of the step.

        If memory runs out or the compiler fails, the engine adapts and tries the same batch again.
        """
        while True:
            feed, problem = _GOOD, ""
            total = torch.zeros((), device=self.s.device)
            try:
                # Reset the dropout seed, so that every attempt at this step drops the same elements.
                lora.begin_step(self.model, step, first_row=self.s.ranks.rank * self.num_rows)
                micro_batches = list(batch.micro_batches(self.micro_batch))
                self.passes.begin(micro_batches)
                for number, piece in enumerate(micro_batches, start=1):
                    begin_backward(self.model, is_last=number == len(micro_batches))
                    total += self.passes.run(piece)
            except torch.OutOfMemoryError as exc:
                feed, problem = _OUT_OF_MEMORY, str(exc).splitlines()[0]
            except Exception as exc:
                # The compiler may raise any kind of error. If the cause was something else, the uncompiled step will
                # fail too.
                if not self.compiling.may_fail(exc):
                    raise
                feed, problem = _NOT_COMPILED, f"{type(exc).__name__}: {str(exc).strip()[:500]}"
            # Handle the error outside the `except` block, where the exception no longer references the tensors of the
            # failed step. All ranks must adapt in the same way, or their gradient all-reduces would not match.
            if self.model.shards is None:
                feed = self.s.ranks.worst(feed, within_s=self.compiling.deadline_s)
            elif feed != _GOOD:
                raise self._cannot_adapt(feed, problem)
            if feed == _GOOD:
                self.s.ranks.add_up(self.model, total)
                self.compiling.is_proven = self.compiling.is_on
                return total
            self.passes.forget()
            self.optimizer.zero_grad()
            change = self._shrink if feed == _OUT_OF_MEMORY else self.compiling.stop
            change(problem or "The error occurred on another rank.")

    def update(self, lr_scale: float, is_good: Tensor, step: int) -> None:
        """Take the optimizer step.

        If memory runs out here, a smaller micro-batch would not help, because activations have already been freed.
        """
        try:
            self.optimizer.step(lr_scale, is_good, num_steps=step)
        except torch.OutOfMemoryError as exc:
            peak = torch.cuda.max_memory_allocated(self.s.device) if self.s.device.type == "cuda" else 0
            raise FatalError(
                what=f"Out of memory in the optimizer step (peak {peak / 2**30:.1f} GiB).",
                why=str(exc).splitlines()[0],
                fix=what_else(dataclasses.replace(self.phase, recompute="all"), "train a smaller model"),
            ) from exc

    def _cannot_adapt(self, feed: int, problem: str) -> FatalError:
        """Return the error of a rank that failed in the middle of a step whose weights all ranks gather together.

        The others wait for it in a collective, so they cannot agree to try again. They end because this rank does.
        """
        if feed == _NOT_COMPILED:
            return _not_compiled(problem)
        return FatalError(
            what=f"Out of memory at a micro-batch of {self.micro_batch} rows.",
            why=problem,
            fix=f"Set micro_batch: {lower_micro_batch(self.micro_batch, self.num_rows)} in the phase (same batch size)."
            if self.micro_batch > 1
            else what_else(self.phase, "lower model.context"),
        )

    def _shrink(self, problem: str) -> None:
        """Use a smaller micro-batch with the same batch size.

        Raises FatalError if the run file sets the micro-batch, or if the micro-batch is already one row.
        """
        peak = torch.cuda.max_memory_allocated(self.s.device) if self.s.device.type == "cuda" else 0
        lower = lower_micro_batch(self.micro_batch, self.num_rows)
        if self.phase.micro_batch or lower >= self.micro_batch:
            raise FatalError(
                what=f"Out of memory at a micro-batch of {self.micro_batch} rows (peak {peak / 2**30:.1f} GiB).",
                why=problem,
                fix=f"Set micro_batch: {lower} in the phase (same batch size), or 0 to let homing choose."
                if self.micro_batch > 1
                else what_else(self.phase, "lower model.context"),
            )
        if self.s.device.type == "cuda":
            free_memory()
        text = f"Out of memory: micro-batch lowered from {self.micro_batch} to {lower} rows (same batch size)."
        self.notify("micro_batch_lowered", text, notice=True, why=problem)
        self.micro_batch = lower


_COMPILE_S = 1800.0


class Compiling:
    def __init__(self, session: Session, built: Built, notify: Notify) -> None:
        self.s, self.notify = session, notify
        self.model, self.optimizer = built.model, built.optimizer
        self.is_on = False
        self.is_proven = False  # whether a compiled step has succeeded
        self.parts = Parts()  # how many graphs of the first step were compiled, and how many were found in the cache
        self._cache = CompileCache(session.run_dir, session.run.model, session.device, notify)

    def switch(self, *, is_on: bool) -> None:
        self.is_on, self.is_proven = is_on, False
        self.model.compile_blocks(is_on=is_on)
        # Compile the optimizer step only for CUDA: on a CPU it was no faster, and compiling it took a minute.
        self.optimizer.compile_steps(is_on=is_on and self.s.device.type == "cuda")

    def first(self, take: Callable[[], Figures], phase: str) -> Figures:
        """Take the first step, in which the model is compiled.

        Compiling may take minutes, so its progress is reported; otherwise it would look as if training had stalled.
        """
        begun, before = time.perf_counter(), Parts.so_far()
        self._cache.load()
        self.notify("compile_started", "Compiling the model; the first step takes a while.", notice=True)
        with self.s.journal.still("compiling", "compiling", phase=phase):
            self._rehearse()
            figures = take()
            figures.read()
        if self.is_on:
            took, self.parts = time.perf_counter() - begun, Parts.so_far() - before
            text = f"Compiled in {format_duration(took)}. {self.parts.sentence}".rstrip()
            self.notify(
                "compile_finished", text, notice=True, seconds=took, is_warm=self.parts.is_warm,
                num_kept=self.parts.num_kept, num_new=self.parts.num_new,
            )  # fmt: skip
        return figures

    def _rehearse(self) -> None:
        """Compile the optimizer step, separately from the model.

        If this fails on one rank, all ranks continue without compilation.
        """
        problem = ""
        try:
            self.optimizer.rehearse()
        except Exception as exc:  # the compiler may raise any kind of error
            problem = f"The optimizer step: {type(exc).__name__}: {str(exc).strip()[:500]}"
        if self.s.ranks.worst(int(bool(problem)), within_s=self.deadline_s):
            self.stop(problem or "The error occurred on another rank.")

    @property
    def deadline_s(self) -> float:
        """How many seconds ranks wait for each other: a long time while compiling, else 0 (the group's timeout)."""
        return _COMPILE_S if self.is_on and not self.is_proven else 0.0

    def may_fail(self, error: Exception) -> bool:
        """Return whether this error may come from the compiler.

        Until the first compiled step has succeeded, any error may come from it; later, only the recompile-limit
        error can.
        """
        return self.is_on and (not self.is_proven or type(error).__name__ == "FailOnRecompileLimitHit")

    def stop(self, problem: str) -> None:
        """Fall back to uncompiled training, or raise FatalError if the run file says `compile: on`.

        A run that requires compilation must not silently train more slowly without it.
        """
        if self.s.run.train.compile == "on":
            raise _not_compiled(problem)
        text = f"warning: torch.compile failed; training continues without it and is slower. {problem}"
        self.notify("compile_failed", text, notice=True)
        self.switch(is_on=False)

    def keep(self) -> None:
        if self.is_on and self.s.ranks.is_first:
            self._cache.save(self.parts)


def _not_compiled(problem: str) -> FatalError:
    return FatalError(
        what="torch.compile failed on this model.",
        why=problem,
        fix="Set train.compile: off (slower, same results), or auto to continue uncompiled when it fails."
        " With train.parallel: zero2, zero3 or hsdp, auto cannot continue either.",
    )
