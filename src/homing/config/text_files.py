"""Checks the files named in the run file: whether they exist, and how large they are.

  paths, globs, folders -> the problem with each, if any -> bytes, estimated without opening the files

Does not read the contents; `homing prep` does.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from homing.config.parse.source import KeyPath, dotted
from homing.config.resolve.origins import Trace

__all__ = ["fault_of", "is_in_store", "is_utf8", "num_text_bytes", "warn_of_missing"]

# Typical compression ratios of text. Parquet is compressed internally: for books by 1.6 with snappy and 2.3 with zstd,
# the two usual codecs.
_PACKED = {".gz": 3, ".xz": 3, ".zst": 3, ".parquet": 2}


def warn_of_missing(trace: Trace, path: KeyPath, named: Sequence[str]) -> None:
    """Warn about missing files early: otherwise the launch would fail after the user has chosen an instance."""
    for each in named:
        fault = "" if is_in_store(each) else fault_of(each)
        if fault:
            setting = trace.source.setting(path)
            where = setting if setting is not None else f"{trace.source.file}, line {trace.source.line(path)}"
            trace.warn(f"{dotted(path)}: {fault} ({where}).")


def is_in_store(path: str) -> bool:
    """Return whether this is the address of a file in a store, which `homing prep` fetches."""
    return path.startswith(("s3:", "hf:", "modal:", "file:"))


def fault_of(named: str) -> str:
    """Return why this path, glob or folder gives no text; "" if it does."""
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
    """Estimate the size of the text without opening the files; compressed files count several times."""
    total = 0
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        for name in [path] if os.path.exists(path) else glob.glob(path, recursive=True):
            files = [inner for inner in Path(name).rglob("*")] if os.path.isdir(name) else [Path(name)]
            total += sum(file.stat().st_size * _PACKED.get(file.suffix, 1) for file in files if file.is_file())
    return total
