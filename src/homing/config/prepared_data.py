"""Describes the output of `homing prep` in the data directory: counts, hashes, vocabulary, missing and changed files.

This module reads manifest.json and, on request, the contents of the shards. It does not know how they were made.

plan, verify, launch and train compare the text with the shards each time, so `changed_files` is cheap: it compares
names, sizes and modification times, and hashes a file only if its modification time changed and its size did not. Text
that is completely missing does not count as changed, because users may move the text away once the shards exist.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.find_source_files import Source
from homing.tokenizer_json import read_tokenizer_bytes
from homing.wire import file_names
from homing.wire.codec import WireError, loads
from homing.wire.shard_manifest import DataManifest, SourceFile

__all__ = [
    "FilesNow",
    "Prepared",
    "changed_files",
    "changed_settings",
    "files_now",
    "missing_files",
    "read_prepared",
    "sha256_of",
    "tokenizer_specials",
    "tokenizer_vocab_size",
    "unlisted_files",
]

_SHARD_ENDINGS = (".bin", ".idx", ".mask")


@dataclass(frozen=True)
class Prepared:
    dir: Path
    manifest: DataManifest
    manifest_sha256: str

    @property
    def num_train_tokens(self) -> int:
        return self._count("train")

    @property
    def num_val_tokens(self) -> int:
        return self._count("val")

    def _count(self, split: str) -> int:
        return self.manifest.splits[split].num_tokens if split in self.manifest.splits else 0


def read_prepared(data_dir: Path) -> Prepared | None:
    """Read the manifest; return None if nothing is prepared. Raise DataError if the manifest cannot be used."""
    path = data_dir / file_names.MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise DataError(
            what=f"Cannot read {path}.", why=f"{exc.strerror or exc}.", fix="Prepare the data again: homing prep RUN"
        ) from exc
    try:
        manifest = loads(DataManifest, raw)
    except (WireError, UnicodeDecodeError) as exc:
        raise DataError(
            what=f"{path} is not a valid manifest.",
            why=str(exc),
            fix=f"Delete {path} and prepare the data again: homing prep RUN",
        ) from exc
    return Prepared(data_dir, manifest, hashlib.sha256(raw).hexdigest())


def tokenizer_vocab_size(path: Path) -> int:
    """Return the vocabulary size of a tokenizer.json, including added tokens."""
    return _read_tokenizer(path)[0]


def tokenizer_specials(path: Path) -> list[str]:
    """Return the added tokens of a tokenizer.json."""
    return _read_tokenizer(path)[1]


def _read_tokenizer(path: Path) -> tuple[int, list[str]]:
    try:
        document = json.loads(read_tokenizer_bytes(path))
        ids, added = list(document["model"]["vocab"].values()), document.get("added_tokens", [])
        ids += [token["id"] for token in added]
        return int(max(ids)) + 1, [str(token["content"]) for token in added]
    except FileNotFoundError as exc:
        raise DataError(
            what=f"No tokenizer found at {path}.",
            why="tokenizer.file is set to this path.",
            fix="Set tokenizer.file to a tokenizer.json, or delete the key to train one.",
        ) from exc
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DataError(
            what=f"{path} is not a supported tokenizer.",
            why=f"{type(exc).__name__}: {exc}",
            fix="Set tokenizer.file to a tokenizer.json with a BPE model, or delete the key to train one.",
        ) from exc


def missing_files(prepared: Prepared, *, is_hashing: bool = False) -> list[str]:
    """Return a sentence for each file that is missing, empty or of the wrong size.

    With `is_hashing`, also compare each file's content with its recorded hash. The tokenizer is always compared.
    """
    problems = []
    wanted: list[tuple[str, int | None, str]] = []
    if not prepared.manifest.template_sha256:  # conversations use the run's tokenizer
        wanted.append((file_names.TOKENIZER, None, prepared.manifest.tokenizer_sha256))
    for split in prepared.manifest.splits.values():
        for shard in split.shards:
            wanted += shard.files()
    for name, num_bytes, digest in wanted:
        # Always hash the tokenizer: it is small, and a different one with the same name would change every token.
        if problem := _problem(
            prepared.dir / name, num_bytes, digest if is_hashing or name == file_names.TOKENIZER else ""
        ):
            problems.append(problem)
    return problems


def unlisted_files(prepared: Prepared) -> list[str]:
    """Return the shard files that are never read, because the manifest does not list them."""
    shards = [shard for split in prepared.manifest.splits.values() for shard in split.shards]
    listed = {name for shard in shards for name, _, _ in shard.files()}
    return sorted({path.name for path in prepared.dir.iterdir() if path.suffix in _SHARD_ENDINGS} - listed)


def _problem(path: Path, num_bytes: int | None, digest: str) -> str:
    if not path.is_file():
        return f"{path} is missing."
    found = path.stat().st_size
    if found == 0:
        return f"{path} is empty."
    if num_bytes is not None and found != num_bytes:
        return f"{path} has {found:,} bytes; the manifest says {num_bytes:,}."
    if digest and sha256_of(path) != digest:
        return f"{path} has changed: its sha256 differs from the manifest."
    return ""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_NAMED = 3  # maximum number of files named in a message


@dataclass(frozen=True)
class FilesNow:
    """The files that the run file names, as they are on disk now."""

    files: dict[str, Source]  # keys are real paths, in the order in which prep reads the files
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
    """Describe the first difference between the sources and the files on disk; return "" if there is none.

    `stamps` holds each source's path, size and modification time, recorded when the shards were written.
    """
    then = {os.path.realpath(source.path): source for source in sources if not _is_brought(source.path)}
    if added := [source.path for path, source in now.files.items() if path not in then]:
        return f"the shards do not contain {_listed(added)}, which the run file names"
    if missing := [s.path for path, s in then.items() if path not in now.files and not _is_of(s.path, now.gone)]:
        return f"the shards contain {_listed(missing)}, which the run file no longer names"
    if list(now.files) != [path for path in then if path in now.files]:
        return "the shards contain the same files in a different order"
    seen = {stamp[0]: stamp for stamp in stamps}
    for path, source in now.files.items():
        old = then[path]
        if source.num_bytes != old.num_bytes:
            return f"{source.path} has {source.num_bytes:,} bytes now and had {old.num_bytes:,} then"
        if seen.get(old.path, [None])[-1] != source.mtime_ns and sha256_of(Path(source.path)) != old.sha256:
            return f"the text of {source.path} has changed since"
    return ""


def changed_settings(settings: dict[str, Any], wanted: dict[str, Any], keys: dict[str, str]) -> str:
    """Describe the first setting that differs from `wanted`; return "" if none does.

    `keys` maps a setting's name to its run file key.
    """
    for name, key in keys.items():
        if name in settings and settings[name] != wanted[name]:
            return f"{key} is {wanted[name]} now and was {settings[name]} then"
    return ""


def _is_brought(path: str) -> bool:
    """Return True if prep fetched the file from a store, into a folder that prep created in the data folder."""
    return any(part.startswith(("from-store-", "held-out-")) for part in Path(path).parts)


def _is_of(path: str, patterns: list[str]) -> bool:
    return any(path == p or path.startswith(p.rstrip("/") + "/") or fnmatchcase(path, p) for p in patterns)


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more
