"""Local models: the folder that `homing fetch` writes to, and the manifest next to the weights."""

from __future__ import annotations

from pathlib import Path

from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest

__all__ = ["MODELS", "manifest_in"]

MODELS = Path("models")


def manifest_in(folder: Path) -> CheckpointManifest | None:
    """Return the manifest, or None if it cannot be read or the weights do not come from a homing run."""
    try:
        return codec.loads(CheckpointManifest, (folder / file_names.MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
