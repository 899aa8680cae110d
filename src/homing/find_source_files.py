"""Expands the paths, globs and folders given by the user into a list of source files.

The order is fixed (patterns as given, names sorted within each), because it determines the order of the tokens.
A folder yields the files with a text extension; a path or a glob yields every file that it matches.

`fault_of` checks whether a path contains text, and `num_text_bytes` estimates how much. Neither opens a file.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from homing.errors import DataError, MissingExtra

__all__ = [
    "PACKINGS",
    "PARQUET_ENDING",
    "TEXT_ENDINGS",
    "Found",
    "Source",
    "fault_of",
    "find_chat_files",
    "find_sources",
    "is_in_store",
    "is_utf8",
    "may_exceed",
    "need_reader",
    "num_text_bytes",
]

PACKINGS = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}
JSONL_ENDINGS = (".jsonl", ".ndjson")
PARQUET_ENDING = ".parquet"
# Typical compression ratios of text. Parquet is compressed internally: the two usual codecs, snappy and zstd,
# make books 1.6 and 2.3 times smaller.
_PACKED = {".gz": 3, ".xz": 3, ".zst": 3, ".parquet": 2}
_MOST_PACKED = 10  # text rarely compresses better than this
_MAX_SHOWN = 5  # maximum number of names shown in an error
CHAT_ENDINGS = (*JSONL_ENDINGS, ".json", PARQUET_ENDING)
TEXT_ENDINGS = (".txt", ".text", ".md", ".markdown", ".rst", ".org", ".adoc", ".tex", *JSONL_ENDINGS, PARQUET_ENDING)


@dataclass(frozen=True)
class Source:
    path: str  # the path as the user wrote it
    num_bytes: int  # size on disk, compressed
    mtime_ns: int
    form: str  # plain, jsonl or parquet
    packing: str  # "", gzip, xz or zstd

    @property
    def num_text_bytes(self) -> int:
        """Estimate the size of the text, which is larger than a compressed file."""
        return self.num_bytes * _PACKED.get(Path(self.path.lower()).suffix, 1)

    @property
    def stamp(self) -> list[object]:
        """Return the path, size and modification time, which show whether the file has changed without reading it."""
        return [self.path, self.num_bytes, self.mtime_ns]


@dataclass
class Found:
    sources: list[Source]
    warnings: list[str] = field(default_factory=list)


def find_sources(patterns: Sequence[str], *, key: str, otherwise: str = "") -> Found:
    """Return every file that matches one of `patterns`, without duplicates.

    Raise DataError if a file is missing, empty or unreadable. In the error, `key` names the setting, and `otherwise`
    says how to choose a different file; its default is `--KEY PATH`.
    """
    found = Found([])
    seen: set[str] = set()
    for pattern in patterns:
        for path in _expand(pattern, key, otherwise or f"--{key} PATH", found.warnings):
            real = os.path.realpath(path)
            if real not in seen:
                seen.add(real)
                found.sources.append(_source(path, key))
    _refuse_empty([source.path for source in found.sources if source.num_bytes == 0], key)
    return found


def find_chat_files(patterns: Sequence[str], key: str = "chat", otherwise: str = "") -> tuple[list[Source], list[str]]:
    """Return conversation files and warnings; raises DataError.

    A folder yields its .jsonl, .ndjson and .json files, compressed or not, and its .parquet files.
    """
    named: list[str] = []
    for pattern in patterns:
        folder = os.path.expanduser(pattern)
        named += _chat_in_folder(folder, key) if os.path.isdir(folder) else [pattern]
    found = find_sources(named, key=key, otherwise=otherwise)
    return found.sources, found.warnings


def _chat_in_folder(folder: str, key: str) -> list[str]:
    taken = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        taken += [os.path.join(parent, name) for name in sorted(names) if _is_chat(name)]
    if not taken:
        raise DataError(
            what=f"{key}: the folder {folder} has no conversations.",
            why=f"homing reads files ending in {' '.join(CHAT_ENDINGS)}, compressed ({' '.join(PACKINGS)}) or not.",
            fix=f"To use other files, give a pattern: '{folder}/*.txt'",
        )
    return taken


def _is_chat(name: str) -> bool:
    return not name.startswith(".") and _unpacked_name(name).endswith(CHAT_ENDINGS)


def _expand(pattern: str, key: str, otherwise: str, warnings: list[str]) -> list[str]:
    named = os.path.expanduser(pattern)
    if os.path.isdir(named):
        return _folder(named, key, warnings)
    if os.path.exists(named):
        return [named]
    if glob.has_magic(named):
        hits: list[str] = []
        for hit in sorted(glob.glob(named, recursive=True)):
            if os.path.isdir(hit) and named.endswith("**"):
                continue  # skip the folder, because the pattern also matches each file in it
            hits += _folder(hit, key, warnings) if os.path.isdir(hit) else [hit]
        if hits:
            return hits
        raise DataError(
            what=f"{key}: no file matches {pattern!r}.",
            why=f"Looked in {os.getcwd()}.",
            fix=f"Fix the pattern, or give the path of a file: {otherwise}",
        )
    raise DataError(
        what=f"{key}: {pattern} does not exist.",
        why=f"Looked in {os.getcwd()}.{_neighbours(named)}",
        fix=f"Fix the path, or give another one: {otherwise}",
    )


def _folder(folder: str, key: str, warnings: list[str]) -> list[str]:
    taken: list[str] = []
    left_out: dict[str, int] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.startswith("."):
                continue
            if _unpacked_name(name).endswith(TEXT_ENDINGS):
                taken.append(os.path.join(parent, name))
            else:
                ending = os.path.splitext(name)[1] or "no ending"
                left_out[ending] = left_out.get(ending, 0) + 1
    if not taken:
        raise DataError(
            what=f"{key}: the folder {folder} has no text files.",
            why=f"homing reads files ending in {' '.join(TEXT_ENDINGS)}, compressed ({' '.join(PACKINGS)}) or not.",
            fix=f"To use other files, give a pattern: --{key} '{folder}/*.html'",
        )
    if left_out:
        kinds = ", ".join(f"{count} {ending}" for ending, count in sorted(left_out.items()))
        warnings.append(f"Some files in the folder {folder} were skipped: {kinds}. To include them, give a pattern.")
    return taken


def _refuse_empty(paths: list[str], key: str) -> None:
    """Raise one DataError that names all empty files, so that the user can fix them all at once."""
    if len(paths) == 1:
        raise DataError(f"{key}: {paths[0]} is empty.", why="It has 0 bytes.", fix="Add text to it, or leave it out.")
    if paths:
        more = f" and {len(paths) - _MAX_SHOWN:,} more" if len(paths) > _MAX_SHOWN else ""
        raise DataError(
            what=f"{key}: {len(paths):,} files are empty.",
            why=f"{', '.join(paths[:_MAX_SHOWN])}{more} have 0 bytes.",
            fix="Add text to them, or leave them out.",
        )


def _source(path: str, key: str) -> Source:
    try:
        path.encode()
    except UnicodeEncodeError as exc:  # fail now, because prep could not write this name to the manifest at the end
        raise DataError(
            what=f"{key}: the name {path!a} is not UTF-8.",
            why="It uses another encoding, such as Latin-1, and cannot be stored in a run file or manifest.",
            fix="Rename the file, or leave it out.",
        ) from exc
    try:
        stat = os.stat(path)
        with open(path, "rb"):
            pass
    except OSError as exc:
        if os.path.islink(path) and not os.path.exists(path):
            raise DataError(
                what=f"{key}: {path} is a broken link.",
                why=f"It points to {os.readlink(path)}, which does not exist.",
                fix="Fix the link, or delete it.",
            ) from exc
        raise DataError(
            f"{key}: {path} cannot be read.", why=exc.strerror or str(exc), fix="Check its permissions."
        ) from exc
    if not os.path.isfile(path):
        raise DataError(
            f"{key}: {path} is not a regular file.",
            why="homing prep must read it twice.",
            fix="Save it to a file first.",
        )
    name, form = os.path.basename(path).lower(), _form(path)
    packing = PACKINGS.get(os.path.splitext(name)[1], "")
    if form == "parquet":
        need_reader(path)
        if packing:
            raise DataError(
                what=f"{key}: {path} cannot be read in compressed form.",
                why="Parquet files are compressed internally, and homing must read the end of the file first.",
                fix="Decompress it, and use the resulting file.",
            )
    return Source(
        path=path,
        num_bytes=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        form=form,
        packing=packing,
    )


def need_reader(path: str) -> None:
    """Raise MissingExtra for a Parquet file if pyarrow is missing, before anything is read or fetched."""
    if _form(path) == "parquet" and find_spec("pyarrow") is None:
        missing = MissingExtra("prep", "parquet", "pyarrow")
        missing.what = f"{path} needs the extra `parquet`."
        raise missing


def _form(path: str) -> str:
    name = _unpacked_name(os.path.basename(path))
    return "parquet" if name.endswith(PARQUET_ENDING) else "jsonl" if name.endswith(JSONL_ENDINGS) else "plain"


def _unpacked_name(name: str) -> str:
    name = name.lower()
    stem, ending = os.path.splitext(name)
    return stem if ending in PACKINGS else name


def _neighbours(path: str) -> str:
    """Return a hint with the three most similar names in the same folder, or ""."""
    import difflib

    folder = Path(path).parent
    names: Iterable[str] = sorted(os.listdir(folder)) if folder.is_dir() else []
    close = difflib.get_close_matches(os.path.basename(path), list(names), n=3, cutoff=0.6)
    return f" Similar names: {', '.join(str(folder / name) for name in close)}." if close else ""


class _Sized(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


def may_exceed(take_bytes: int, files: Iterable[_Sized]) -> bool:
    """Return whether the files may contain more text than `take_bytes`; False if `take_bytes` is 0, which means all.

    The size of compressed text is unknown before it is read, so this assumes the most that it is likely to be.
    """
    is_packed = {True: _MOST_PACKED, False: 1}
    most = sum(each.num_bytes * is_packed[Path(each.path.lower()).suffix in _PACKED] for each in files)
    return 0 < take_bytes < most


# --- without opening the files --------------------------------------------------------------------------------------


def is_in_store(path: str) -> bool:
    """Return True if this is the address of a file in a store. `homing prep` fetches such files."""
    return path.startswith(("s3:", "hf:", "modal:", "file:"))


def fault_of(named: str) -> str:
    """Return the reason why no text can be read from this path, glob or folder, or "" if there is text."""
    if not is_utf8(named):
        return f"the name {named!a} is not UTF-8"
    path = os.path.expanduser(named)
    if not os.path.exists(path) and not glob.glob(path, recursive=True):
        return f"{'no file matches' if glob.has_magic(path) else 'no file or folder'} {named!r}"
    return "" if num_text_bytes([named]) else f"{named!r} is empty"


def is_utf8(name: str) -> bool:
    """Return whether the name is valid UTF-8.

    Other bytes appear as lone surrogates, which a run file cannot contain.
    """
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def num_text_bytes(patterns: Sequence[str]) -> int:
    """Estimate the size of the text without opening the files; a compressed file counts as several times its size."""
    total = 0
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        for name in [path] if os.path.exists(path) else glob.glob(path, recursive=True):
            files = [inner for inner in Path(name).rglob("*")] if os.path.isdir(name) else [Path(name)]
            total += sum(file.stat().st_size * _PACKED.get(file.suffix, 1) for file in files if file.is_file())
    return total
