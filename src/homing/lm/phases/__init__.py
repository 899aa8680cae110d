"""Defines the kinds of training phases, one per file: which rows each kind trains on, and how it is evaluated.

PHASES    kind of data -> the class that trains on it, imported on first use
METHODS   which weights are trained: all of them, or adapters on top of frozen ones
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from homing.errors import DataError, UsageError
from homing.lm.data.shards.read_shards import file_sha256
from homing.lm.evals.bits_per_byte import Evaluation
from homing.lm.model import Decoder
from homing.lm.train.compute.batch import Batches
from homing.lm.train.distributed.ranks import ALONE, Ranks
from homing.wire import file_names
from homing.wire.run_json import Phase, PhaseData, Run

__all__ = ["METHODS", "PHASES", "PhaseWork", "Remembers", "check_phases", "open_phase"]

PHASES = {
    "text": "homing.lm.phases.pretrain:Pretrain",
    "chat": "homing.lm.phases.chat:Chat",
    "rl": "homing.lm.phases.rl:Reinforce",
}
KINDS = ("pretrain", "mid", "sft", "rl")
METHODS = ("full", "lora", "qlora")


class PhaseWork(Protocol):
    """The training loop's interface to a phase and its opened data."""

    rows_per_step: int  # number of rows of `context` tokens in a step, summed over all ranks
    can_evaluate: bool  # whether the phase has held-out data
    evaluates_together: bool  # whether `evaluate` divides the rows among all ranks; if not, only the first calls it

    def open_batches(
        self, model: Decoder, *, first_row: int, device: torch.device, rank: int = 0, num_ranks: int = 1
    ) -> Batches:
        """Return this rank's part of each step's batch, starting at row `first_row`.

        Resuming needs only this row number, because the data has no other state.
        """
        ...

    def evaluate(self, model: Decoder, notify: Callable[[int, int], None], ranks: Ranks = ALONE) -> Evaluation: ...


@runtime_checkable
class Remembers(Protocol):
    """The interface of phases whose checkpoints must contain more than the number of rows consumed."""

    def keep_start(self, model: Decoder) -> None:
        """Record the phase's initial weights. Also called on resume, before the checkpoint's weights are loaded."""
        ...

    def metadata_files(self) -> dict[str, bytes]:
        """Return name -> contents of the extra files that a checkpoint saved now must contain."""
        ...

    def load_metadata_files(self, folder: Path) -> None: ...


def open_phase(run: Run, phase: Phase, *, data_dir: Path, run_dir: Path) -> PhaseWork:
    """Open a phase's data, from its own data directory if it has one, else from the run's `data_dir`."""
    check_phases([phase])
    reads = "rl" if phase.kind == "rl" else phase.data.kind if phase.data else "text"
    module, name = PHASES[reads].split(":")
    folder = _own_folder(phase.data, run_dir) if phase.data else data_dir
    work: PhaseWork = getattr(importlib.import_module(module), name)(run, phase, folder)
    return work


def _own_folder(data: PhaseData, run_dir: Path) -> Path:
    folder = (run_dir / data.dir).resolve()
    path = folder / file_names.MANIFEST
    found = file_sha256(path) if path.is_file() else "missing"
    if found != data.manifest_sha256:
        raise DataError(
            what=f"The data in {folder} has changed since run.json was written.",
            why=f"sha256 of {file_names.MANIFEST} now: {found}. "
            f"sha256 in run.json: {data.manifest_sha256 or 'none, because no data had been prepared'}.",
            fix="Prepare the data again (homing prep RUN), then start over: homing train RUN --fresh",
        )
    return folder


def check_phases(phases: list[Phase]) -> None:
    """Raise UsageError naming every phase that cannot run. Call this before the first phase incurs any cost."""
    problems = [problem for phase in phases for problem in _problems(phase)]
    if problems or not phases:
        raise UsageError(
            what="This version of homing cannot run these phases." if problems else "The run has no phases.",
            why="\n".join(problems),
            fix="Correct the list under phases: in the run file.",
        )
    kinds = [phase.kind for phase in phases]
    if len(set(kinds)) != len(kinds):
        raise UsageError(
            what="Two phases of the same kind would share a checkpoint folder.",
            why=f"The phases are {', '.join(kinds)}.",
            fix="Merge them into one phase, or move the second to its own run, with init_from set to this run's model.",
        )


def _problems(phase: Phase) -> list[str]:
    name = f"{phase.kind}/{phase.method}"
    if phase.kind not in KINDS or phase.method not in METHODS:
        return [f"{name} is unknown; kinds: {', '.join(KINDS)}; methods: {', '.join(METHODS)}."]
    lacking = [
        *(["conversations"] if phase.kind == "sft" and (phase.data is None or phase.data.kind != "chat") else []),
        *(["settings for its adapters"] if phase.method != "full" and phase.lora is None else []),
        *(["tasks"] if phase.kind == "rl" and phase.rl is None else []),
    ]
    return [f"{name} has no {' and no '.join(lacking)}."] if lacking else []
