"""Check whether the files named in the run file are still the ones that the shards were made from.

manifest + file stamps + files the run file names now -> the first difference as a sentence, or ""

plan, verify, launch and train run this check each time, so it is cheap: it compares names, sizes and modification
times, and hashes a file only if its modification time changed and its size did not. Text that is completely gone is not
a difference: once the shards exist, the user may move the text away.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.text_sources import Source
from homing.wire.shard_manifest import SourceFile

__all__ = ["FilesNow", "changed_files", "changed_settings", "files_now"]

_NAMED = 3  # files named in a message


@dataclass(frozen=True)
class FilesNow:
    """The files that the run file names, as they are on disk now."""

    files: dict[str, Source]  # by real path, in the order in which prep reads them
    gone: list[str]  # paths, globs and folders that no longer match any file


def files_now(named: Iterable[str], find: Callable[[list[str]], list[Source]]) -> FilesNow:
    """List the files that the run file names. `find` resolves paths, globs and folders the way prep does."""
    now = FilesNow({}, [])
    for pattern in named:
        try:
            found = find([pattern])
        except DataError:  # prep reports the problem
            now.gone.append(os.path.expanduser(pattern))
            continue
        for source in found:
            now.files.setdefault(os.path.realpath(source.path), source)
    return now


def changed_files(sources: Sequence[SourceFile], stamps: Any, now: FilesNow) -> str:
    """Return the first difference, or "" if there is none.

    `stamps` holds the path, size and modification time of each source when the shards were made.
    """
    then = {os.path.realpath(source.path): source for source in sources if not _is_brought(source.path)}
    if added := [source.path for path, source in now.files.items() if path not in then]:
        return f"they do not hold {_listed(added)}, which the run file names"
    if missing := [s.path for path, s in then.items() if path not in now.files and not _is_of(s.path, now.gone)]:
        return f"they hold {_listed(missing)}, which the run file does not name now"
    if list(now.files) != [path for path in then if path in now.files]:
        return "they hold the same files in another order"
    seen = {stamp[0]: stamp for stamp in stamps}
    for path, source in now.files.items():
        old = then[path]
        if source.num_bytes != old.num_bytes:
            return f"{source.path} has {source.num_bytes:,} bytes now and had {old.num_bytes:,} then"
        if seen.get(old.path, [None])[-1] != source.mtime_ns and _sha256(source.path) != old.sha256:
            return f"the text of {source.path} has changed since"
    return ""


def changed_settings(settings: dict[str, Any], wanted: dict[str, Any], keys: dict[str, str]) -> str:
    """Return the first setting that differs, or "" if there is none.

    `keys` maps a setting's name to its run file key.
    """
    for name, key in keys.items():
        if name in settings and settings[name] != wanted[name]:
            return f"{key} is {wanted[name]} now and was {settings[name]} then"
    return ""


def _is_brought(path: str) -> bool:
    """Return whether prep fetched the file from a store, into a folder it made below the data folder."""
    return any(part.startswith(("from-store-", "held-out-")) for part in Path(path).parts)


def _is_of(path: str, patterns: list[str]) -> bool:
    return any(path == p or path.startswith(p.rstrip("/") + "/") or fnmatchcase(path, p) for p in patterns)


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
