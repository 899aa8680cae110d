"""What differs between phases: which rows they learn from and how they are judged. One file each.

PHASES    kind of data -> the class, imported on first use
METHODS   which weights learn: all of them, or adapters beside frozen ones
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from homing.errors import DataError, UsageError
from homing.lm.evals.bits_per_byte import Evaluation
from homing.lm.model import Decoder
from homing.lm.shards.read import file_sha256
from homing.lm.train.batch import Batches
from homing.wire import names
from homing.wire.run import Phase, PhaseData, Run

__all__ = ["METHODS", "PHASES", "PhaseWork", "Remembers", "check_phases", "open_phase"]

PHASES = {
    "text": "homing.lm.phases.pretrain:Pretrain",
    "chat": "homing.lm.phases.chat:Chat",
    "rl": "homing.lm.phases.rl:Reinforce",
}
KINDS = ("pretrain", "mid", "sft", "rl")
METHODS = ("full", "lora", "qlora")


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


@runtime_checkable
class Remembers(Protocol):
    """A phase whose state is more than the rows consumed."""

    def keep_start(self, model: Decoder) -> None:
        """Called with the weights that the phase begins with, also when it is then resumed from later ones."""
        ...

    def papers(self) -> dict[str, bytes]:
        """What a checkpoint made now needs beside weights and optimizer, by the name of its file."""
        ...

    def load_papers(self, folder: Path) -> None: ...


def open_phase(run: Run, phase: Phase, *, data_dir: Path, run_dir: Path) -> PhaseWork:
    """`data_dir` is the run's own; a phase may have its data elsewhere."""
    check_phases([phase])
    reads = "rl" if phase.kind == "rl" else phase.data.kind if phase.data else "text"
    module, name = PHASES[reads].split(":")
    folder = _own_folder(phase.data, run_dir) if phase.data else data_dir
    work: PhaseWork = getattr(importlib.import_module(module), name)(run, phase, folder)
    return work


def _own_folder(data: PhaseData, run_dir: Path) -> Path:
    folder = (run_dir / data.dir).resolve()
    path = folder / names.MANIFEST
    found = file_sha256(path) if path.is_file() else "not there"
    if found != data.manifest_sha256:
        raise DataError(
            what=f"The data in {folder} is not what the run was resolved with.",
            why=f"{names.MANIFEST}: {found}, run.json says {data.manifest_sha256 or 'that nothing is prepared'}.",
            fix="homing prep RUN, and resolve the run again: homing train RUN --fresh",
        )
    return folder


def check_phases(phases: list[Phase]) -> None:
    """Refuses a chain before its first phase has cost anything, naming every phase that cannot run."""
    problems = [problem for phase in phases for problem in _problems(phase)]
    if problems or not phases:
        raise UsageError(
            what="This trainer cannot run these phases." if problems else "The run has no phases.",
            why="\n".join(problems),
            fix="Change phases: in the run file.",
        )
    kinds = [phase.kind for phase in phases]
    if len(set(kinds)) != len(kinds):
        raise UsageError(
            what="Two phases of one kind would share the folder of their checkpoints.",
            why=f"phases are {', '.join(kinds)}.",
            fix="Make them one phase, or put the second into a run of its own, with init_from: this one's model.",
        )


def _problems(phase: Phase) -> list[str]:
    name = f"{phase.kind}/{phase.method}"
    if phase.kind not in KINDS or phase.method not in METHODS:
        return [f"{name} is not known: there are {', '.join(KINDS)}, by {', '.join(METHODS)}."]
    lacking = [
        *(["conversations"] if phase.kind == "sft" and (phase.data is None or phase.data.kind != "chat") else []),
        *(["settings for its adapters"] if phase.method != "full" and phase.lora is None else []),
        *(["tasks"] if phase.kind == "rl" and phase.rl is None else []),
    ]
    return [f"{name} lacks {' and '.join(lacking)}."] if lacking else []
