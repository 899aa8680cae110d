"""Where things lie on the person's machine: the home of homing, and run files by name.

    NAME -> ./runs/NAME.yaml (or .yml, .toml, .json)        PATH -> itself

Reads the disk, writes nothing: a verb that needs a folder creates it.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from importlib.resources import files
from pathlib import Path

from homing.errors import UsageError

__all__ = ["RUN_SUFFIXES", "find_run_file", "home", "newest_run", "preset_dir", "preset_of", "run_files", "shown",
           "typed_name"]  # fmt: skip

RUN_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
_RUNS = Path("runs")


def home() -> Path:
    """$HOMING_HOME or ~/.homing. Not created here."""
    named = os.environ.get("HOMING_HOME")
    return Path(named).expanduser() if named else Path.home() / ".homing"


def run_files() -> dict[str, Path]:
    """Run name -> file in ./runs, sorted by name. The suffixes' order decides between two files of one name."""
    found: dict[str, Path] = {}
    if _RUNS.is_dir():
        for suffix in RUN_SUFFIXES:
            for path in sorted(_RUNS.glob(f"*{suffix}")):
                found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def preset_dir() -> Path:
    """Presets are files on disk wherever homing is installed: pip never leaves packages zipped."""
    return Path(str(files("homing.presets")))


def preset_of(text: str) -> Path | None:
    """The preset that a run file was written from, which its first line tells; None where it was not."""
    named = re.match(r"# ([a-z0-9-]+): ", text)
    path = preset_dir() / f"{named[1]}.yaml" if named else None
    return path if path is not None and path.is_file() else None


def newest_run() -> str:
    """The name of the run file changed last: what a verb takes when RUN is left out."""
    found = run_files()
    if not found:
        raise UsageError(
            what="No run was named, and there is no run file in ./runs.",
            why="Without a name a verb takes the newest file in ./runs.",
            fix="homing new first --from tiny",
        )
    return max(found, key=lambda name: (found[name].stat().st_mtime_ns, name))


def find_run_file(name_or_path: str) -> Path:
    """The file that a person means; a missing one is answered with the nearest names there are."""
    looks_like_path = os.sep in name_or_path or name_or_path.endswith(RUN_SUFFIXES)
    try:
        path = _existing(name_or_path, looks_like_path)
    except (OSError, ValueError) as exc:  # a name too long for the disk, or with a null byte in it
        raise UsageError(
            what=f"{name_or_path[:80]!r} cannot be the name of a run.", why=str(exc), fix=_fix(name_or_path)
        ) from exc
    if path is not None:
        return path
    if not name_or_path:
        raise UsageError(what="The name of the run is empty.", fix=_fix(name_or_path))
    if looks_like_path:
        raise UsageError(
            what=f"There is no file {name_or_path}.",
            why=f"Looked in {Path(name_or_path).expanduser().parent.absolute()}.",
            fix=_fix(Path(name_or_path).stem),
        )
    from homing.config.projects import told_of_run  # which stands on this module

    if (told := told_of_run(name_or_path)) is not None:
        why, fix = told
        raise UsageError(what=f"There is no run file called {name_or_path!r} here, only a run.", why=why, fix=fix)
    raise UsageError(
        what=f"There is no run called {name_or_path!r} here.",
        why=f"Looked for runs/{name_or_path}.yaml, .yml, .toml and .json in {Path.cwd()}.",
        fix=_fix(name_or_path),
    )


def shown(path: Path) -> str:
    """As a person would type it here: relative where it lies below the folder they are in."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def typed_name(file: Path) -> str:
    """What a person types to mean this run file: its name in ./runs, else its path. The name inside the file may be
    another one, and finds nothing; so every verb that names the next command names the run by this."""
    return file.stem if run_files().get(file.stem) == file else shlex.quote(str(file))


def _existing(name_or_path: str, looks_like_path: bool) -> Path | None:
    path = Path(name_or_path).expanduser()
    if looks_like_path:
        if path.is_dir():
            raise UsageError(
                what=f"{name_or_path} is a directory, not a run file.",
                why="A run file is one .yaml, .toml or .json file.",
                fix=_fix(path.name),
            )
        return path if path.exists() else None
    if name_or_path in (found := run_files()):
        return found[name_or_path]
    if name_or_path and path.is_dir():
        raise UsageError(
            what=f"{name_or_path!r} is a directory, and there is no runs/{name_or_path}.yaml.",
            why="A run file is one .yaml, .toml or .json file.",
            fix=_fix(name_or_path),
        )
    if name_or_path and path.exists():
        raise UsageError(
            what=f"{name_or_path!r} is a file, but not one that can be read as a run file.",
            why="The ending tells the language: .yaml, .yml, .toml or .json.",
            fix=f"mv {name_or_path} {name_or_path}.yaml",
        )
    return None


def _fix(wanted: str) -> str:
    found = run_files()
    near = difflib.get_close_matches(wanted, found, n=3, cutoff=0.5)
    beside = [f"{wanted}{suffix}" for suffix in RUN_SUFFIXES if wanted and _is_file(f"{wanted}{suffix}")]
    if beside:
        return f"There is ./{beside[0]}: name it with its ending, {shlex.quote(beside[0])}, or move it into ./runs."
    if near:
        return f"Did you mean {' or '.join(near)}? Runs here: {', '.join(list(found)[:10])}."
    if found:
        return f"Runs here: {', '.join(list(found)[:10])}. A new one: homing new NAME --from tiny"
    return "There is no run file in ./runs yet: homing new NAME --from tiny"


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # as long, or with as odd a byte, as no disk holds
        return False
