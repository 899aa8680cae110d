"""Local paths: the homing home folder, the presets, the run files in ./runs, and the models in ./models.

Only reads the disk: a verb that needs a folder creates it.
"""

from __future__ import annotations

import os
import re
import shlex
from importlib.resources import files
from pathlib import Path

from homing.errors import UsageError
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest

__all__ = [
    "MODELS",
    "RUN_SUFFIXES",
    "home",
    "manifest_in",
    "newest_run",
    "preset_dir",
    "preset_of",
    "run_files",
    "shown",
    "typed_name",
]

RUN_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
_RUNS = Path("runs")


def home() -> Path:
    """Return $HOMING_HOME or ~/.homing. Does not create it."""
    named = os.environ.get("HOMING_HOME")
    return Path(named).expanduser() if named else Path.home() / ".homing"


def run_files() -> dict[str, Path]:
    """Map run names to the files in ./runs, sorted by name.

    If two files share a name, the order of RUN_SUFFIXES decides.
    """
    found: dict[str, Path] = {}
    if _RUNS.is_dir():
        for suffix in RUN_SUFFIXES:
            for path in sorted(_RUNS.glob(f"*{suffix}")):
                found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def preset_dir() -> Path:
    """Return the folder of the presets, which is always on disk: pip never leaves packages zipped."""
    return Path(str(files("homing.presets")))


def preset_of(text: str) -> Path | None:
    """Return the preset that a run file was created from, as named in its first line; None if there is none."""
    named = re.match(r"# ([a-z0-9-]+): ", text)
    path = preset_dir() / f"{named[1]}.yaml" if named else None
    return path if path is not None and path.is_file() else None


def newest_run() -> str:
    """Return the name of the most recently modified run file, which verbs use if RUN is omitted."""
    found = run_files()
    if not found:
        raise UsageError(
            what="No run given, and there is no run file in ./runs.",
            why="Without a name, homing uses the newest file in ./runs.",
            fix="homing new first --from tiny",
        )
    return max(found, key=lambda name: (found[name].stat().st_mtime_ns, name))


def shown(path: Path) -> str:
    """Return the path as a user would type it: relative if it is below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def typed_name(file: Path) -> str:
    """Return how a user refers to this run file: by its name in ./runs, else by its path.

    The `name` inside the file may differ and would not be found, so every verb that prints a next command uses this.
    """
    return file.stem if run_files().get(file.stem) == file else shlex.quote(str(file))


MODELS = Path("models")


def manifest_in(folder: Path) -> CheckpointManifest | None:
    """Return the manifest, or None if it cannot be read or the weights do not come from a homing run."""
    try:
        return codec.loads(CheckpointManifest, (folder / file_names.MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
