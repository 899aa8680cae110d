"""Local paths: $HOMING_HOME, the presets, the run file for a name, and the project folder that a run belongs to.

    NAME -> ./runs/NAME.yaml (or .yml, .toml, .json)        PATH -> itself        models are in ./models
    NAME@RUN -> one of the runs with this name, given by its id or the end of its id

All project folders share the run names in $HOMING_HOME, while run files, data and models belong to one folder.

    launch, train -> $HOMING_HOME/runs/ID/project.json -> does this folder own the run with this name?

A run belongs to this folder if it was started here, or if its training data is here at the same relative path with the
same manifest hash, so a moved or copied folder keeps its runs. A run without project.json (an older run, or one from
another computer) counts as belonging here. This module only reads: a verb that needs a folder creates it, and the code
that starts a run writes project.json.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from homing.errors import HomingError, UsageError
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.run_json import Run

__all__ = [
    "MODELS",
    "PROJECT_NOTE",
    "RUN_SUFFIXES",
    "begun_elsewhere",
    "belongs_to_other_folder",
    "file_called",
    "find_run_file",
    "home",
    "launch_again",
    "manifest_in",
    "name_in",
    "name_meant",
    "newest_run",
    "pick_run",
    "preset_dir",
    "preset_of",
    "project_note",
    "refuse_shared",
    "run_files",
    "shares_with",
    "shown",
    "split_run",
    "typed_name",
]

RUN_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
PROJECT_NOTE = "project.json"
MODELS = Path("models")
_RUNS = Path("runs")
_MOST_SHOWN = 5  # maximum number of runs listed in an error message


def home() -> Path:
    """Return $HOMING_HOME, or ~/.homing if it is not set. Do not create the folder."""
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
    """Return the presets folder. It is a real folder on disk, because pip always unzips packages."""
    return Path(str(files("homing.presets")))


def preset_of(text: str) -> Path | None:
    """Return the preset that a run file was created from, as named in its first line, or None."""
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
            fix="Create one: homing new first --from tiny",
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

    Verbs use this in the commands that they suggest. The `name` key in the file may be different, and a verb cannot
    find the file by that key.
    """
    return file.stem if run_files().get(file.stem) == file else shlex.quote(str(file))


def manifest_in(folder: Path) -> CheckpointManifest | None:
    """Return the checkpoint manifest in `folder`; None if it cannot be read, or if homing did not train the weights."""
    try:
        return codec.loads(CheckpointManifest, (folder / file_names.MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None


# --- find the run file for a name ---


def find_run_file(name_or_path: str) -> Path:
    """Return the run file that a name or a path refers to; if there is none, the error suggests similar names."""
    looks_like_path = os.sep in name_or_path or name_or_path.endswith(RUN_SUFFIXES)
    try:
        path = _existing(name_or_path, looks_like_path)
    except (OSError, ValueError) as exc:  # the name is too long for the file system, or contains a null byte
        raise UsageError(
            what=f"Invalid run name: {name_or_path[:80]!r}.", why=str(exc), fix=_fix(name_or_path)
        ) from exc
    if path is not None:
        return path
    if not name_or_path:
        raise UsageError(what="The run name is empty.", fix=_fix(name_or_path))
    if looks_like_path:
        raise UsageError(
            what=f"File not found: {name_or_path}.",
            why=f"Looked in {Path(name_or_path).expanduser().parent.absolute()}.",
            fix=_fix(Path(name_or_path).stem),
        )
    name, wanted = split_run(name_or_path)
    if wanted and name in run_files():
        raise UsageError(
            what=f"{name_or_path} selects one run of {name}, but this command needs a run file.",
            why=f"NAME@RUN selects a trained model. The run file is {run_files()[name]}.",
            fix=f"Use {name}",
        )
    if (found_run := _run_without_file(name_or_path)) is not None:
        why, fix = found_run
        raise UsageError(what=f"The run {name_or_path!r} has no run file in this folder.", why=why, fix=fix)
    raise UsageError(
        what=f"No run called {name_or_path!r} found.",
        why=f"Looked for runs/{name_or_path}.yaml, .yml, .toml and .json in {Path.cwd()}.",
        fix=_fix(name_or_path),
    )


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
            what=f"{name_or_path!r} is a file, but not a run file.",
            why="The name of a run file ends in .yaml, .yml, .toml or .json.",
            fix=f"Rename it: mv {name_or_path} {name_or_path}.yaml",
        )
    return None


def _fix(wanted: str) -> str:
    found = run_files()
    near = difflib.get_close_matches(wanted, found, n=3, cutoff=0.5)
    nearby = [f"{wanted}{suffix}" for suffix in RUN_SUFFIXES if wanted and _is_file(f"{wanted}{suffix}")]
    if nearby:
        return f"Found ./{nearby[0]}: use its full name, {shlex.quote(nearby[0])}, or move it to ./runs."
    if near:
        return f"Did you mean {' or '.join(near)}? Runs here: {', '.join(list(found)[:10])}."
    if found:
        return f"Runs here: {', '.join(list(found)[:10])}. Create one: homing new NAME --from tiny"
    return "No run file in ./runs yet. Create one: homing new NAME --from tiny"


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # the name is too long for the file system, or contains a null byte
        return False


# --- one run of a name: goethe@goethe-20260301-080000-0a1b, goethe@20260301-080000-0a1b and goethe@0a1b ---


def split_run(typed: str) -> tuple[str, str]:
    """Split NAME@RUN into NAME and RUN; RUN is "" for a plain name. A path or an address is a plain name."""
    name, _, run = typed.partition("@")
    return (name, run) if name and "/" not in typed and ":" not in typed else (typed, "")


def pick_run(name: str, run: str, ids: Sequence[str], *, fix: str) -> str:
    """Return the id in `ids` (newest first) that NAME@RUN refers to. Raise UsageError unless exactly one matches."""
    found = [each for each in ids if each == run] or [each for each in ids if each.endswith(run)]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(ids[:_MOST_SHOWN]) + (", ..." if len(ids) > _MOST_SHOWN else "")
    if found:
        raise UsageError(
            what=f"{name}@{run} matches several runs of {name}.",
            why=f"Matching runs: {', '.join(found[:_MOST_SHOWN])}.",
            fix=f"Use a full id: {name}@{found[0]}",
        )
    raise UsageError(
        what=f"{name} has no local run {run}.",
        why=f"Its local runs, newest first: {shown or 'none'}.",
        fix=f"Use an existing run: {name}@{ids[0]}   {fix}" if ids else fix,
    )


# --- the folder that a run belongs to ---


def project_note(folder: str) -> bytes:
    return json.dumps({"schema": "homing.project/1", "folder": folder}).encode()


def begun_elsewhere(run_id: str) -> Path | None:
    """Return the folder in which the run was started, or None if the run belongs to the current folder."""
    run_dir = home() / "runs" / run_id
    folder = _folder_in(run_dir / PROJECT_NOTE)
    if folder is None or folder == Path.cwd() or _has_its_data(run_dir / file_names.RUN, folder):
        return None
    return folder


def belongs_to_other_folder(run_id: str) -> bool:
    """Return True if the run was started in a different folder that still exists.

    The current folder may be a copy of that folder, with the same data. Callers then prefer runs started here.
    """
    folder = _folder_in(home() / "runs" / run_id / PROJECT_NOTE)
    return folder is not None and folder != Path.cwd() and folder.is_dir()


def _folder_in(note: Path) -> Path | None:
    try:
        return Path(json.loads(note.read_bytes())["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_its_data(record: Path, folder: Path) -> bool:
    """Return True if the current folder also has all the training data that the run used from its original folder."""
    try:
        run = codec.loads(Run, record.read_bytes())
    except (OSError, codec.WireError):
        return False
    used = {run.data.dir: run.data.manifest_sha256}
    used |= {phase.data.dir: phase.data.manifest_sha256 for phase in run.phases if phase.data is not None}
    inside = {Path(at): sha256 for at, sha256 in used.items() if sha256 and Path(at).is_relative_to(folder)}
    here = [_sha256(at.relative_to(folder) / file_names.MANIFEST) == sha256 for at, sha256 in inside.items()]
    return bool(here) and all(here)


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


# --- the name that a run file gives its run ---


def name_in(file: Path) -> str:
    """Return the run name set in the file, or the file name without its suffix if none is set or readable."""
    from homing.config.parse.source import read_source  # imports a YAML library that most verbs do not need

    try:
        named = read_source(file).data.get("name")
    except HomingError:
        return file.stem
    return named if isinstance(named, str) and named else file.stem


def name_meant(file: Path) -> str:
    """Return the name of the run that this file describes. Raise UsageError if another run file sets the same name."""
    name = name_in(file)
    refuse_shared(file, name)
    return name


def refuse_shared(file: Path, name: str) -> None:
    """Raise UsageError if another run file sets the same name, because the runs would overwrite each other's data."""
    if (other := shares_with(file, name)) is not None:
        raise UsageError(
            what=f"{file} and {other} both describe the run {name}.",
            why="homing finds data, runs and models by run name, so each run file needs its own name.",
            fix=f"Add to {file}: name: {file.stem}",
        )


def shares_with(file: Path, name: str) -> Path | None:
    """Return another run file in ./runs with the same run name, or None.

    Files outside this project folder, such as a run's record in $HOMING_HOME, are not checked.
    """
    folder = Path.cwd()
    if name == file.stem or file.absolute().parent not in (folder, folder / "runs"):
        return None
    return file_called(name, besides=file)


def file_called(name: str, *, besides: Path | None = None) -> Path | None:
    """Return the file in ./runs that describes this run. If there are several, prefer the one named after the run."""
    found = run_files()
    first = [found[name]] if name in found else []
    files = [file for file in (*first, *found.values()) if besides is None or file.absolute() != besides.absolute()]
    return next((file for file in files if name_in(file) == name), None)


def launch_again(name: str) -> str:
    """Return the command that starts a new run with this name, with `--name` if the run file has a different name."""
    called, begun = file_called(name), _newest_begun(name)
    if called is not None or begun is None:
        return f"homing launch {typed_name(called) if called is not None else name}"
    return f"homing launch {typed_name(_file_of(begun))} --name {name}"


def _run_without_file(name: str) -> tuple[str, str] | None:
    """Return the error's `why` and `fix` for a run without a run file in this folder; None if there is no such run."""
    begun = _newest_begun(name)
    if begun is None:
        return None
    folder, file = begun_elsewhere(begun.parent.name), _file_of(begun)
    if folder is not None and folder.is_dir():
        return (
            f"It was started in {folder}, and its run file is there.",
            f"cd {shlex.quote(str(folder))}   and run the command there",
        )
    if file == _copy_of(begun):
        why, which = f"Its run file was deleted or has changed. homing kept a copy: {file}", "copy"
    else:
        why, which = f"It was started from {file}, with --name or before the file was renamed.", "file"
    return why, f"Use its {which} instead of {name}: {typed_name(file)}"


def _file_of(record: Path) -> Path:
    """Return the run's file in ./runs if it is unchanged since the run started, else the copy stored with the run."""
    sha256 = codec.loads(Run, record.read_bytes()).run_file_sha256
    same = [file for file in run_files().values() if _sha256(file) == sha256]
    return same[0] if same else _copy_of(record)


def _copy_of(record: Path) -> Path:
    return record.with_name(file_names.RUN_FILE)


def _newest_begun(name: str) -> Path | None:
    """Return run.json of the newest run with this name. Ids are NAME-TIME-LETTERS, so the newest id sorts last."""
    for record in sorted((home() / "runs").glob(f"{glob.escape(name)}-*/{file_names.RUN}"), reverse=True):
        try:
            if codec.loads(Run, record.read_bytes()).name == name:
                return record
        except (OSError, codec.WireError):
            continue
    return None
