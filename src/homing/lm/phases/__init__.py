"""What differs between phases: which rows they learn from and how they are judged. One file each.

PHASES    (kind, method) -> the class, imported on first use
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from homing.errors import UsageError
from homing.lm.evals.bits_per_byte import Evaluation
from homing.lm.model import Decoder
from homing.lm.shards.pack import PackedStream
from homing.wire.run import Phase, Run

__all__ = ["PHASES", "PhaseWork", "check_phases", "open_phase"]

PHASES = {("pretrain", "full"): "homing.lm.phases.pretrain:Pretrain"}


class PhaseWork(Protocol):
    """One phase with its data open. The loop asks nothing else of it."""

    stream: PackedStream
    rows_per_step: int
    can_evaluate: bool  # there is held-out text

    def evaluate(self, model: Decoder, tell: Callable[[int, int], None]) -> Evaluation: ...


def open_phase(run: Run, phase: Phase, data_dir: Path) -> PhaseWork:
    check_phases([phase])
    module, name = PHASES[phase.kind, phase.method].split(":")
    work: PhaseWork = getattr(importlib.import_module(module), name)(run, phase, data_dir)
    return work


def check_phases(phases: list[Phase]) -> None:
    """Refuses a chain before its first phase has cost anything, naming every phase that cannot run."""
    unknown = [f"{phase.kind}/{phase.method}" for phase in phases if (phase.kind, phase.method) not in PHASES]
    if unknown or not phases:
        raise UsageError(
            what=f"This trainer cannot run {', '.join(unknown)}." if unknown else "The run has no phases.",
            why=f"It knows {', '.join('/'.join(known) for known in PHASES)}.",
            fix="Change phases: in the run file.",
        )
    kinds = [phase.kind for phase in phases]
    if len(set(kinds)) != len(kinds):
        raise UsageError(
            what="Two phases of one kind would share the folder of their checkpoints.",
            why=f"phases are {', '.join(kinds)}.",
            fix="Make them one phase with more steps.",
        )
