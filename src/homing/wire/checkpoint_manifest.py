"""manifest.json inside a checkpoint: written last, so a folder without it is not a checkpoint.

step-00001200/
├── model.safetensors  optimizer.safetensors  state.json   needed to resume
├── run.json  tokenizer.json                               needed to use the weights
└── manifest.json                                          name, size and sha256 of each of the above
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from homing.wire.codec import record

MISSING_REWARD = "missing reward"


def figure_of(phase: str) -> str:
    """Return the meaning of `val_loss` in a phase: rl has no loss on text and stores the missing reward there."""
    return MISSING_REWARD if phase == "rl" else "held-out loss"


@dataclass(frozen=True)
class FileHash:
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Stage:
    """One phase in the history of the weights."""

    phase: str  # "base" for open weights
    method: str = "full"
    run_id: str = ""
    address: str = ""  # of a base: hf:OWNER/NAME@COMMIT, or its folder
    step: int = 0
    num_tokens: int = 0
    val_loss: Optional[float] = None
    data_sha256: str = ""  # of the manifest of its training data
    config_sha256: str = ""


@record("checkpoint", 1)
@dataclass(frozen=True)
class CheckpointManifest:
    run_name: str
    run_id: str
    phase: str
    step: int
    num_tokens: int  # trained on so far in this phase
    is_final: bool
    config_sha256: str  # of model, phase and data in run.json: must match to resume
    seed: int
    files: List[FileHash]
    val_loss: Optional[float] = None
    val_bits_per_byte: Optional[float] = None
    # Identifies the random subset that val_loss was measured on, if any: compare only values from the same subset.
    val_exam: str = ""
    code_version: str = ""
    made_at: float = 0.0
    # Attention, micro-batch, precision, ...: chosen by the trainer, and part of its state.
    choices: Dict[str, Any] = field(default_factory=dict)
    lineage: List[Stage] = field(default_factory=list)  # base -> mid -> sft -> rl, this one last
    sha256: str = ""  # of this file with this field empty, so that the list of hashes is protected too


def reported_checkpoint(manifest: CheckpointManifest) -> str:
    """Describe a checkpoint for messages: pretrain step 60 of goethe-20260101-000000-abcd."""
    return f"{manifest.phase} step {manifest.step:,} of {manifest.run_id or manifest.run_name}"


@record("pointer", 1)
@dataclass(frozen=True)
class Pointer:
    """latest.json and best.json in checkpoints/<phase>/.

    A file that names a step, not a symlink, so that any store can hold it.
    """

    step: int
    val_loss: Optional[float] = None
