"""What differs between phases: which rows they learn from and how they are judged. One file each.

PHASES    kind -> the class, imported on first use
METHODS   which weights learn: all of them, or adapters beside frozen ones
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from homing.errors import UsageError
from homing.lm.evals.bits_per_byte import Evaluation
from homing.lm.model import Decoder
from homing.lm.train.batch import Batches
from homing.wire.run import Phase, Run

__all__ = ["METHODS", "PHASES", "PhaseWork", "check_phases", "open_phase"]

PHASES = {"pretrain": "homing.lm.phases.pretrain:Pretrain"}
METHODS = ("full",)


class PhaseWork(Protocol):
    """One phase with its data open. The loop asks nothing else of it."""

    rows_per_step: int  # of `context` tokens, on all ranks together
    can_evaluate: bool  # there is something held out

    def open_batches(
        self, model: Decoder, *, first_row: int, device: torch.device, rank: int = 0, num_ranks: int = 1
    ) -> Batches:
        """From `first_row` on, which is all that there is to know of the data's state; a rank's part of each step."""
        ...

    def evaluate(self, model: Decoder, tell: Callable[[int, int], None]) -> Evaluation: ...


def open_phase(run: Run, phase: Phase, data_dir: Path) -> PhaseWork:
    check_phases([phase])
    module, name = PHASES[phase.kind].split(":")
    work: PhaseWork = getattr(importlib.import_module(module), name)(run, phase, data_dir)
    return work


def check_phases(phases: list[Phase]) -> None:
    """Refuses a chain before its first phase has cost anything, naming every phase that cannot run."""
    unknown = [
        f"{phase.kind}/{phase.method}" for phase in phases if phase.kind not in PHASES or phase.method not in METHODS
    ]
    if unknown or not phases:
        raise UsageError(
            what=f"This trainer cannot run {', '.join(unknown)}." if unknown else "The run has no phases.",
            why=f"It knows {', '.join(PHASES)}, by {', '.join(METHODS)}.",
            fix="Change phases: in the run file.",
        )
    kinds = [phase.kind for phase in phases]
    if len(set(kinds)) != len(kinds):
        raise UsageError(
            what="Two phases of one kind would share the folder of their checkpoints.",
            why=f"phases are {', '.join(kinds)}.",
            fix="Make them one phase with more steps.",
        )
