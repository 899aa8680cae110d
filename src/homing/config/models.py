"""Models at home: the folder that `homing fetch` brings them to, and the paper that lies beside the weights."""

from __future__ import annotations

from pathlib import Path

from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest

__all__ = ["MODELS", "manifest_in"]

MODELS = Path("models")


def manifest_in(folder: Path) -> CheckpointManifest | None:
    """None of weights that no run of ours made, and where it cannot be read."""
    try:
        return codec.loads(CheckpointManifest, (folder / names.MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
