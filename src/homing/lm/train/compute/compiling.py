"""Compilation of the model and optimizer: enabled by choice, done in the first step, abandoned if it fails.

switch    enable or disable; nothing is compiled until the first call
first     first step of a phase: load the cache, compile the rest, and report that compilation is in progress
stop      the compiler failed: with `auto` continue without it and warn; with `on` fail the run
keep      save what was compiled for the next attempt
"""

from __future__ import annotations

import time
from collections.abc import Callable

from homing.lm.train.build_phase import Built
from homing.lm.train.compute.compile_cache import CompileCache, Parts
from homing.lm.train.compute.step_figures import Figures
from homing.lm.train.metrics import Notify
from homing.lm.train.session import Session
from homing.lm.train.stop_requests import FatalError
from homing.units import format_duration

__all__ = ["Compiling"]

_COMPILE_S = 1800.0


class Compiling:
    def __init__(self, session: Session, built: Built, notify: Notify) -> None:
        self.s, self.notify = session, notify
        self.model, self.optimizer = built.model, built.optimizer
        self.is_on = False
        self.is_proven = False  # True once a step has succeeded with it
        self.parts = Parts()  # of the first step
        self._cache = CompileCache(session.run_dir, session.run.model, session.device, notify)

    def switch(self, *, is_on: bool) -> None:
        self.is_on, self.is_proven = is_on, False
        self.model.compile_blocks(is_on=is_on)
        # On a CPU a compiled optimizer step was no faster, and took a minute to compile.
        self.optimizer.compile_steps(is_on=is_on and self.s.device.type == "cuda")

    def first(self, take: Callable[[], Figures], phase: str) -> Figures:
        """Take the first step.

        It may compile for minutes, which is reported so that silence is not taken for a stall.
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
        """Compile the optimizer's step, separately from the model's.

        If that fails on one rank, all ranks continue without compilation.
        """
        problem = ""
        try:
            self.optimizer.rehearse()
        except Exception as exc:  # compilers raise many kinds of errors
            problem = f"The optimizer step: {type(exc).__name__}: {str(exc).strip()[:500]}"
        if self.s.ranks.worst(int(bool(problem)), within_s=self.deadline_s):
            self.stop(problem or "It happened on another rank.")

    @property
    def deadline_s(self) -> float:
        """Seconds the ranks wait for each other; long while each compiles at its own pace. 0: the usual timeout."""
        return _COMPILE_S if self.is_on and not self.is_proven else 0.0

    def may_fail(self, error: Exception) -> bool:
        """Return whether this error may come from the compiler.

        Before the first compiled step has succeeded that is any error; later, only the compiler's recompile limit.
        """
        return self.is_on and (not self.is_proven or type(error).__name__ == "FailOnRecompileLimitHit")

    def stop(self, problem: str) -> None:
        """Fall back to uncompiled training, or raise if the run file says `compile: on`.

        A run that asked for compilation must not silently run slower.
        """
        if self.s.run.train.compile == "on":
            raise FatalError(
                what="torch.compile failed on this model.",
                why=problem,
                fix="Set train.compile: off (slower, same results), or auto to fall back when it fails.",
            )
        text = f"warning: torch.compile failed; training continues without it, slower. {problem}"
        self.notify("compile_failed", text, notice=True)
        self.switch(is_on=False)

    def keep(self) -> None:
        if self.is_on and self.s.ranks.is_first:
            self._cache.save(self.parts)
