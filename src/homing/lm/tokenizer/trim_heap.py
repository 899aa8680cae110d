"""Keeps the C heap close to the memory in use; otherwise a long `homing prep` would hold far more than it needs.

Most of the extra memory was freed but not returned, because of two behaviors of glibc, both measured:

large blocks   After a large block is freed, glibc allocates blocks of that size from the heap, not from the system.
               gigatoken requests huge pages for its tables, and those parts of the heap keep them: a few bytes
               allocated there later keep 2 MB in use. `keep_large_blocks_out` makes large blocks always come from the
               system.
thread heaps   A chunk of text is read by one thread, encoded by a second and freed by a third. Each thread has its own
               heap, which stays as large as it was at its peak. `release_free_memory` returns the free part.

Other C libraries have neither this behavior nor these calls, so with them this module does nothing.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

__all__ = ["keep_large_blocks_out", "release_free_memory"]

# Blocks of at least this size come from the system, not from the heap. gigatoken's tables exceed this size once they
# have grown. The blocks allocated for each chunk of text do not: the heap allocates them faster than the system.
_LARGE_BYTES = 4_000_000
# mallopt's parameters, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_large_blocks_out() -> None:
    """Make this process allocate large blocks directly from the operating system from now on."""
    glibc = _glibc()
    if glibc is not None:
        glibc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        glibc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def release_free_memory() -> None:
    """Return free heap memory to the operating system. This takes milliseconds and does not block other threads."""
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
