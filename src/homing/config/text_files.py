"""The files that a run file names: are they there, and how large are they?

    paths, globs, folders -> what is wrong with each, in words        -> bytes, as far as they can be seen unopened

Knows nothing of what is in them; `homing prep` reads them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from homing.config.source import KeyPath, dotted
from homing.config.trace import Trace

__all__ = ["fault_of", "is_in_store", "is_utf8", "num_text_bytes", "warn_of_missing"]

# What text usually shrinks by. Parquet is packed inside: on books 1.6 to one by snappy, 2.3 by zstd, the usual two.
_PACKED = {".gz": 3, ".xz": 3, ".zst": 3, ".parquet": 2}


def warn_of_missing(trace: Trace, path: KeyPath, named: Sequence[str]) -> None:
    """Before anything is planned on it: a launch would be refused for it, after the person has chosen a machine."""
    for each in named:
        fault = "" if is_in_store(each) else fault_of(each)
        if fault:
            setting = trace.source.setting(path)
            where = setting if setting is not None else f"{trace.source.file}, line {trace.source.line(path)}"
            trace.warn(f"{dotted(path)}: {fault} ({where}).")


def is_in_store(path: str) -> bool:
    """Whether it is the address of a file in a store, which `homing prep` brings."""
    return path.startswith(("s3:", "hf:", "modal:", "file:"))


def fault_of(named: str) -> str:
    """Why nothing can be learned from this path, glob or folder; "" where something can."""
    if not is_utf8(named):
        return f"the name {named!a} is not UTF-8"
    path = os.path.expanduser(named)
    if not os.path.exists(path) and not glob.glob(path, recursive=True):
        return f"{'no file matches' if glob.has_magic(path) else 'there is no file or folder'} {named!r}"
    return "" if num_text_bytes([named]) else f"{named!r} is empty"


def is_utf8(name: str) -> bool:
    """Bytes of a name that are no UTF-8 come as lone surrogates, which no run file can hold."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def num_text_bytes(patterns: Sequence[str]) -> int:
    """Size of the text as far as it can be seen without opening it; packed files count several times over."""
    total = 0
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        for name in [path] if os.path.exists(path) else glob.glob(path, recursive=True):
            files = [inner for inner in Path(name).rglob("*")] if os.path.isdir(name) else [Path(name)]
            total += sum(file.stat().st_size * _PACKED.get(file.suffix, 1) for file in files if file.is_file())
    return total
