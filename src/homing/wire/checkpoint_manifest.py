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
    """Return what `val_loss` is called in a phase: "missing reward" in an rl phase, "held-out loss" otherwise."""
    return MISSING_REWARD if phase == "rl" else "held-out loss"


@dataclass(frozen=True)
class FileHash:
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Stage:
    """One phase in the history of the weights."""

    phase: str  # name of the phase, or "base" for open weights
    method: str = "full"
    run_id: str = ""
    address: str = ""  # address of open weights: hf:OWNER/NAME@COMMIT, or a folder; "" for a trained phase
    step: int = 0
    num_tokens: int = 0
    val_loss: Optional[float] = None
    data_sha256: str = ""  # sha256 of the training data's manifest
    config_sha256: str = ""


@record("checkpoint", 1)
@dataclass(frozen=True)
class CheckpointManifest:
    run_name: str
    run_id: str
    phase: str
    step: int
    num_tokens: int  # number of tokens on which this phase has trained
    is_final: bool
    config_sha256: str  # sha256 of model, phase and data in run.json; must match for the run to resume
    seed: int
    files: List[FileHash]
    val_loss: Optional[float] = None
    val_bits_per_byte: Optional[float] = None
    # Identifies the random subset on which val_loss was measured, if any. Only values from the same subset can be
    # compared.
    val_exam: str = ""
    code_version: str = ""
    made_at: float = 0.0
    # Settings such as attention, micro-batch and precision, which the trainer chose and which are part of its state.
    choices: Dict[str, Any] = field(default_factory=dict)
    # all phases that produced the weights, in order, such as base -> mid -> sft -> rl; the last one is this phase
    lineage: List[Stage] = field(default_factory=list)
    sha256: str = ""  # sha256 of this manifest with this field empty, so that the list of hashes is protected too


def reported_checkpoint(manifest: CheckpointManifest) -> str:
    """Return a description of a checkpoint for messages: pretrain step 60 of goethe-20260101-000000-abcd."""
    return f"{manifest.phase} step {manifest.step:,} of {manifest.run_id or manifest.run_name}"


@record("pointer", 1)
@dataclass(frozen=True)
class Pointer:
    """The content of latest.json and best.json in checkpoints/<phase>/.

    Each file names a step. They are not symlinks, because not every store supports symlinks.
    """

    step: int
    val_loss: Optional[float] = None
