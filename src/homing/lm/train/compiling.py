"""The model and the optimizer compiled, or not: switched on, built by the first step, done without where it fails.

switch    as the choices say; nothing is built before it is called
first     the first step of a phase here: what was kept is loaded, the rest built, and that it goes on is said
stop      the compiler failed: `auto` goes on without, aloud; `on` was asked for by name, and the run ends
keep      what was built, for the next attempt
"""

from __future__ import annotations

import time
from collections.abc import Callable

from homing.lm.train.build import Built
from homing.lm.train.compile_cache import CompileCache, Parts
from homing.lm.train.control import Hopeless
from homing.lm.train.figures import Figures
from homing.lm.train.metrics import Tell
from homing.lm.train.session import Session
from homing.units import format_duration

__all__ = ["Compiling"]

_COMPILE_S = 1800.0


class Compiling:
    def __init__(self, session: Session, built: Built, tell: Tell) -> None:
        self.s, self.tell = session, tell
        self.model, self.optimizer = built.model, built.optimizer
        self.is_on = False
        self.is_proven = False  # until the first step has shown that it can
        self.parts = Parts()  # that the first step took
        self._cache = CompileCache(session.run_dir, session.run.model, session.device, tell)

    def switch(self, *, is_on: bool) -> None:
        self.is_on, self.is_proven = is_on, False
        self.model.compile_blocks(is_on=is_on)
        # On a CPU a compiled step of the optimizer was no faster, and took a minute to build.
        self.optimizer.compile_steps(is_on=is_on and self.s.device.type == "cuda")

    def first(self, take: Callable[[], Figures], phase: str) -> Figures:
        """As any other, but it may take minutes: that is said, so that silence is not taken for a stall."""
        begun, before = time.perf_counter(), Parts.so_far()
        self._cache.load()
        self.tell("compile_started", "Compiling the model; the first step takes a while.", aloud=True)
        with self.s.journal.still("compiling", "compiling", phase=phase):
            self._rehearse()
            figures = take()
            figures.read()
        if self.is_on:
            took, self.parts = time.perf_counter() - begun, Parts.so_far() - before
            text = f"Compiled in {format_duration(took)}. {self.parts.sentence}".rstrip()
            self.tell(
                "compile_finished", text, aloud=True, seconds=took, is_warm=self.parts.is_warm,
                num_kept=self.parts.num_kept, num_new=self.parts.num_new,
            )  # fmt: skip
        return figures

    def _rehearse(self) -> None:
        """The optimizer's steps are compiled apart from the model's, and may fail apart from them. If they fail on one
        rank, all go on without."""
        problem = ""
        try:
            self.optimizer.rehearse()
        except Exception as exc:  # compilers fail with errors of many kinds
            problem = f"The optimizer's step: {type(exc).__name__}: {str(exc).strip()[:500]}"
        if self.s.ranks.worst(int(bool(problem)), within_s=self.deadline_s):
            self.stop(problem or "It happened on another rank.")

    @property
    def deadline_s(self) -> float:
        """How long the ranks wait for each other: longer while they compile, each at its own pace, than any other step
        takes. 0: as long as for everything."""
        return _COMPILE_S if self.is_on and not self.is_proven else 0.0

    def may_fail(self, error: Exception) -> bool:
        """Whether this may be the compiler's failure: any error before the first step has shown that it works, later
        only its limit on the number of shapes."""
        return self.is_on and (not self.is_proven or type(error).__name__ == "FailOnRecompileLimitHit")

    def stop(self, problem: str) -> None:
        """A slow run must not pass for one that was asked for by name."""
        if self.s.run.train.compile == "on":
            raise Hopeless(
                what="torch.compile failed on this model here.",
                why=problem,
                fix="Set train.compile: off (slower, the same numbers), or auto to fall back when it fails.",
            )
        text = f"warning: torch.compile failed; training goes on without it, slower. {problem}"
        self.tell("compile_failed", text, aloud=True)
        self.switch(is_on=False)

    def keep(self) -> None:
        if self.is_on and self.s.ranks.is_first:
            self._cache.save(self.parts)
