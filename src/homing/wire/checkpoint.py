"""manifest.json inside a checkpoint: written last, so a folder without it is no checkpoint.

step-00001200/
├── model.safetensors  optimizer.safetensors  state.json   what resuming needs
├── run.json  tokenizer.json                               what using it needs
└── manifest.json                                          name, size and sha256 of each of the above
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from homing.wire.codec import record

MISSING_REWARD = "missing reward"


def figure_of(phase: str) -> str:
    """What `val_loss` of a phase is called: rl has no loss on text, and keeps there what is missing from a pass."""
    return MISSING_REWARD if phase == "rl" else "held-out loss"


@dataclass(frozen=True)
class FileHash:
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Stage:
    """One phase that the weights went through."""

    phase: str  # base for open weights
    method: str = "full"
    run_id: str = ""
    address: str = ""  # of a base: hf:OWNER/NAME@COMMIT, or its folder
    step: int = 0
    num_tokens: int = 0
    val_loss: Optional[float] = None
    data_sha256: str = ""  # of the manifest of what it learned from
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
    config_sha256: str  # of model, phase and data in run.json: what must match to resume
    seed: int
    files: List[FileHash]
    val_loss: Optional[float] = None
    val_bits_per_byte: Optional[float] = None
    val_exam: str = ""  # on what val_loss was measured, where that is a part drawn: only those of one exam are compared
    code_version: str = ""
    made_at: float = 0.0
    choices: Dict[str, Any] = field(default_factory=dict)  # attention, micro-batch, precision, ...: state, not settings
    lineage: List[Stage] = field(default_factory=list)  # base -> mid -> sft -> rl, this one last
    sha256: str = ""  # of this file with this one value left empty: the list that vouches for all is vouched for too


def told_checkpoint(manifest: CheckpointManifest) -> str:
    """As a person knows it: pretrain step 60 of goethe-20260101-000000-abcd."""
    return f"{manifest.phase} step {manifest.step:,} of {manifest.run_id or manifest.run_name}"


@record("pointer", 1)
@dataclass(frozen=True)
class Pointer:
    """latest.json and best.json in checkpoints/<phase>/: a name, never a link, so that any store can hold it."""

    step: int
    val_loss: Optional[float] = None
