"""Whose run it is: names of runs are known to the whole home, while run files, data and models belong to a folder.

    launch, train -> $HOMING_HOME/runs/ID/project.json -> is the run of this name the one that this folder means?

A run is of this folder if it was begun here, or if the data it learned from lies here at the same place, by the hash
of its manifest: a folder that was moved or copied stays its own. A run without the note (an older one, one of another
home) counts as of here. Reads the disk; whoever begins a run writes the note.
"""

from __future__ import annotations

import glob
import hashlib
import json
import shlex
from pathlib import Path

from homing.config.paths import home, run_files, typed_name
from homing.errors import HomingError, UsageError
from homing.wire import codec, names
from homing.wire.run import Run

__all__ = [
    "PROJECT_NOTE",
    "begun_elsewhere",
    "file_called",
    "is_still_theirs",
    "launch_again",
    "name_in",
    "name_meant",
    "project_note",
    "refuse_shared",
    "shares_with",
    "told_of_run",
]

PROJECT_NOTE = "project.json"


def project_note(folder: str) -> bytes:
    return json.dumps({"schema": "homing.project/1", "folder": folder}).encode()


def begun_elsewhere(run_id: str) -> Path | None:
    """The folder that the run was begun in, where that is another one than this."""
    run_dir = home() / "runs" / run_id
    folder = _folder_in(run_dir / PROJECT_NOTE)
    if folder is None or folder == Path.cwd() or _has_its_data(run_dir / names.RUN, folder):
        return None
    return folder


def is_still_theirs(run_id: str) -> bool:
    """Begun in another folder that is still there: where this one is its copy, what was begun here comes first."""
    folder = _folder_in(home() / "runs" / run_id / PROJECT_NOTE)
    return folder is not None and folder != Path.cwd() and folder.is_dir()


def _folder_in(note: Path) -> Path | None:
    try:
        return Path(json.loads(note.read_bytes())["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_its_data(record: Path, folder: Path) -> bool:
    """Whether all that it learned from, and that lay in its folder, lies in this one."""
    try:
        run = codec.loads(Run, record.read_bytes())
    except (OSError, codec.WireError):
        return False
    used = {run.data.dir: run.data.manifest_sha256}
    used |= {phase.data.dir: phase.data.manifest_sha256 for phase in run.phases if phase.data is not None}
    inside = {Path(at): sha256 for at, sha256 in used.items() if sha256 and Path(at).is_relative_to(folder)}
    here = [_sha256(at.relative_to(folder) / names.MANIFEST) == sha256 for at, sha256 in inside.items()]
    return bool(here) and all(here)


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def name_in(file: Path) -> str:
    """The run's own name, which the file may give; one that cannot be read is taken by its own."""
    from homing.config.source import read_source  # a library for YAML, which most verbs do without

    try:
        named = read_source(file).data.get("name")
    except HomingError:
        return file.stem
    return named if isinstance(named, str) and named else file.stem


def name_meant(file: Path) -> str:
    """The name of the run that this file describes; refused where it is the name of another file's run."""
    name = name_in(file)
    refuse_shared(file, name)
    return name


def refuse_shared(file: Path, name: str) -> None:
    """A copy that kept the name of the first would be taken for it, and write over what is its."""
    if (other := shares_with(file, name)) is not None:
        raise UsageError(
            what=f"{file} and {other} are both the run {name}.",
            why="Data, runs and models are found by the run's name, so each file needs its own.",
            fix=f"Write into {file}: name: {file.stem}",
        )


def shares_with(file: Path, name: str) -> Path | None:
    """Another file in ./runs that describes a run of this name. Only of files of this folder: a record is repeated."""
    folder = Path.cwd()
    if name == file.stem or file.absolute().parent not in (folder, folder / "runs"):
        return None
    return file_called(name, besides=file)


def file_called(name: str, *, besides: Path | None = None) -> Path | None:
    """The file in ./runs that describes the run of this name; the one that is called so, where several do."""
    found = run_files()
    first = [found[name]] if name in found else []
    files = [file for file in (*first, *found.values()) if besides is None or file.absolute() != besides.absolute()]
    return next((file for file in files if name_in(file) == name), None)


def launch_again(name: str) -> str:
    """The command that begins another run of this name, by its file, which may be called otherwise (`--name NAME`)."""
    called, begun = file_called(name), _newest_begun(name)
    if called is not None or begun is None:
        return f"homing launch {typed_name(called) if called is not None else name}"
    return f"homing launch {typed_name(_file_of(begun))} --name {name}"


def told_of_run(name: str) -> tuple[str, str] | None:
    """To whoever types the name of a run where its file is meant: where that is, and what to do."""
    begun = _newest_begun(name)
    if begun is None:
        return None
    folder, file = begun_elsewhere(begun.parent.name), _file_of(begun)
    if folder is not None and folder.is_dir():
        return f"It was begun in {folder}, where its file lay.", f"cd {shlex.quote(str(folder))}   and type it there"
    if file == _copy_of(begun):
        why, which = f"Its file is not here any more, or was changed since; its copy: {file}", "copy"
    else:
        why, which = f"It was begun from {file}, under --name or before that was renamed.", "file"
    return why, f"Name its {which} in the place of {name}: {typed_name(file)}"


def _file_of(record: Path) -> Path:
    """The run file of this folder that a run was begun from, known by its text; the run's own copy where that was
    changed since."""
    sha256 = codec.loads(Run, record.read_bytes()).run_file_sha256
    same = [file for file in run_files().values() if _sha256(file) == sha256]
    return same[0] if same else _copy_of(record)


def _copy_of(record: Path) -> Path:
    return record.with_name(names.RUN_FILE)


def _newest_begun(name: str) -> Path | None:
    """Its record. Ids are NAME-TIME-LETTERS, so the last by name is the newest."""
    for record in sorted((home() / "runs").glob(f"{glob.escape(name)}-*/{names.RUN}"), reverse=True):
        try:
            if codec.loads(Run, record.read_bytes()).name == name:
                return record
        except (OSError, codec.WireError):
            continue
    return None
