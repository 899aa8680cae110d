"""The C heap kept near what is in use: without this, a long prep holds far more memory than it uses.

Two habits of glibc, both measured; of the memory that a long text took beyond a short one, most was free:

large blocks   Once one was freed, blocks of its size come from the heap instead of the system. gigatoken asks for huge
               pages under its tables, and the places in the heap where one has been stay huge: a few bytes that are
               put there later hold two MB. `keep_large_blocks_out` has large blocks always come from the system.
a heap each    A piece of text is read by one thread, encoded by a second and freed by a third, and each of their heaps
               keeps what was free in it at its fullest. `release_free_memory` gives that back.

Other C libraries have neither the habits nor the calls; there, nothing is done.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

__all__ = ["keep_large_blocks_out", "release_free_memory"]

# Above what comes and goes with each piece of text, which is faster from the heap; below a table that has grown.
_LARGE_BYTES = 4_000_000
# Names of mallopt's settings in malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_large_blocks_out() -> None:
    """For the whole process, from now on."""
    glibc = _glibc()
    if glibc is not None:
        glibc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        glibc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def release_free_memory() -> None:
    """Takes some milliseconds, during which other threads run."""
    glibc = _glibc()
    if glibc is not None:
        glibc.malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None
