"""Keeps prep's unfinished work and its state in a hidden folder inside the target folder.

    data/NAME/.prep/state.json     the completed stages, and the settings and inputs they used
    data/NAME/.prep/*              shards and tokenizer while prep writes them; no other code reads them here

Work with different settings, different inputs or a different version is discarded, never continued. The lock is on the
target folder itself, so it leaves no file behind and is released when the process ends.

At the end the result is published: the old manifest is removed first, and the new one is written last. In between there
is no manifest, and readers reject shards without a manifest. So if prep is killed in between, its result counts as
unfinished, and the next prep run moves the remaining files. `prep.json` records the size and modification time of each
input, so that unchanged inputs need not be read again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.data.prep.prep_settings import Inputs, file_sha256
from homing.lm.tokenizer.write_files import EXTRAS, METADATA_FILES
from homing.wire.codec import WireError, dumps, loads
from homing.wire.file_names import MANIFEST, TOKENIZER
from homing.wire.shard_manifest import DataManifest

__all__ = ["STATE", "Work", "find_finished", "open_work", "publish", "sync_folder", "tokenizer_files", "write_whole"]

WORK_FOLDER = ".prep"
STATE = "state.json"
_FORMAT = 2  # version of state.json's format; any other version is discarded


class Work:
    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target / WORK_FOLDER
        self.state: dict[str, Any] = {}

    def begin(self, fingerprint: dict[str, Any], *, is_forced: bool) -> bool:
        """Continue unfinished work if its settings and inputs are the same, else discard it and start from scratch.

        Returns whether there is any work to continue.
        """
        wanted = hashlib.sha256(json.dumps([_FORMAT, fingerprint], sort_keys=True).encode()).hexdigest()
        found = self._read()
        if found.get("fingerprint") == wanted and not is_forced:
            self.state = found
            return "scan" in found or "mark" in found
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.state = {"fingerprint": wanted}
        self.save()
        return False

    def save(self, **values: Any) -> None:
        self.state.update(values)
        write_whole(self.folder / STATE, json.dumps(self.state).encode())

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / STATE).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


@contextmanager
def open_work(target: Path) -> Iterator[Work]:
    """Create and lock the target folder. On exit, remove it if this call created it and it is still empty."""
    was_there = target.exists()
    with _as_data_error(target):
        target.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_RDONLY)
        try:
            _lock(descriptor, target)
            yield Work(target)
        finally:
            os.close(descriptor)
            if not was_there:
                with suppress(OSError):
                    target.rmdir()


def _lock(descriptor: int, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise DataError(
            what=f"Another homing prep is running in {target}.",
            why="Two prep runs in the same folder would overwrite each other's files.",
            fix="Wait until it has finished, or choose another folder: --out DIR",
        ) from exc


@contextmanager
def _as_data_error(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(target, exc.strerror or "") from exc
        named = Path(os.fsdecode(exc.filename)).absolute() if exc.filename else target
        # An error on the target folder, or on a path inside or above it, means that prep cannot write. Any other path
        # is an input file.
        if not named.is_relative_to(target.absolute()) and not target.absolute().is_relative_to(named):
            raise DataError(
                what=f"{os.fsdecode(exc.filename)} cannot be read.",
                why=f"{exc.strerror or exc}. It existed when prep started.",
                fix="Restore it or remove it from the list, then run the same command again.",
            ) from exc
        raise DataError(
            what=f"Cannot write to {target}.",
            why=f"{exc.strerror or exc}: {exc.filename or target}",
            fix="Fix its permissions, or choose another folder: --out DIR",
        ) from exc


def disk_full(target: Path, why: str) -> DataError:
    return DataError(
        what=f"The disk that holds {target} is full.",
        why=why,
        fix="Free disk space and run the same command again to resume, or choose another disk: --out DIR",
    )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: write and sync a temporary file, rename it, sync the rename."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


PREP = "prep.json"
_SHARD = re.compile(r"(train|val)-\d{5,}\.(bin|idx)")


def publish(work: Work, manifest: DataManifest, inputs: Inputs) -> None:
    names = [*tokenizer_files(manifest), *_shard_files(manifest)]
    work.save(manifest=dumps(manifest))
    (work.target / MANIFEST).unlink(missing_ok=True)
    sync_folder(work.target)
    for path in work.target.iterdir():
        if path.name not in names and (_SHARD.fullmatch(path.name) or path.name in _others_extras(manifest)):
            path.unlink()
    for name in names:
        # If the file is absent, an earlier prep run moved it and was then killed: nothing else removes files from this
        # folder.
        if (work.folder / name).exists():
            os.replace(work.folder / name, work.target / name)
    sync_folder(work.target)
    if not _is_whole(work.target, manifest):
        work.discard()
        raise DataError(
            what=f"Shards disappeared from {work.target} before prep finished.",
            why="Another program deleted or changed files there while prep was running, or after it was killed.",
            fix="Run the same command again; it starts from the beginning.",
        )
    _remember(work.target, inputs)
    write_whole(work.target / MANIFEST, dumps(manifest, indent=2).encode() + b"\n")
    work.discard()


def find_finished(target: Path, settings: dict[str, Any], inputs: Inputs) -> DataManifest | None:
    """Return the manifest if prep has already finished in this folder with the same settings and text, else None."""
    try:
        manifest = loads(DataManifest, (target / MANIFEST).read_bytes())
    except (OSError, WireError):
        return None
    # Convert to JSON and back, so that both sides of the comparison have JSON's types.
    if manifest.settings != json.loads(json.dumps(settings)) or not _is_whole(target, manifest):
        return None
    if _stamps(target) == json.loads(json.dumps(inputs.stamps)):
        return manifest
    # The modification times differ, so compare the content. If the sizes differ too, there is no need to read it.
    if [(s.path, s.num_bytes) for s in inputs.sources] != [(s.path, s.num_bytes) for s in manifest.source]:
        return None
    if any(file_sha256(source.path) != source.sha256 for source in manifest.source):
        return None
    _remember(target, inputs)
    return manifest


def _is_whole(target: Path, manifest: DataManifest) -> bool:
    width = 2 if manifest.dtype == "uint16" else 4
    for split in manifest.splits.values():
        for shard in split.shards:
            sizes = {shard.name: shard.num_tokens * width, shard.index_name: (shard.num_documents + 1) * 8}
            for name, size in sizes.items():
                path = target / name
                if not path.is_file() or path.stat().st_size != size:
                    return False
    tokenizer = target / TOKENIZER
    if not all((target / name).is_file() for name in tokenizer_files(manifest)):
        return False
    return file_sha256(tokenizer) == manifest.tokenizer_sha256


def tokenizer_files(manifest: DataManifest) -> list[str]:
    """Return the names of tokenizer.json and its accompanying files, for our own or a third-party tokenizer."""
    return [TOKENIZER, *manifest.settings.get("metadata", EXTRAS)]


def _others_extras(manifest: DataManifest) -> tuple[str, ...]:
    """Return the names of an old tokenizer's files that could be mistaken for files of a new third-party tokenizer."""
    return (*EXTRAS, *METADATA_FILES) if "metadata" in manifest.settings else ()


def _shard_files(manifest: DataManifest) -> list[str]:
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return [name for shard in shards for name in (shard.name, shard.index_name)]


def _remember(target: Path, inputs: Inputs) -> None:
    write_whole(target / PREP, json.dumps({"stamps": inputs.stamps}).encode())


def _stamps(target: Path) -> Any:
    try:
        return json.loads((target / PREP).read_bytes()).get("stamps")
    except (OSError, ValueError, AttributeError):
        return None
