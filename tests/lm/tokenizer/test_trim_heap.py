"""The heap gives back what is free, and where the C library has no such call nothing happens."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from homing.lm.tokenizer import trim_heap

# Small blocks with one in a hundred kept: free memory that no heap gives back by itself.
HOLES = """
from homing.lm.tokenizer.trim_heap import keep_large_blocks_out, release_free_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
keep_large_blocks_out()
blocks = [bytes(8000) for _ in range(10_000)]
kept = blocks[::100]
del blocks
before = resident()
release_free_memory()
print(before - resident())
"""


@pytest.mark.skipif(trim_heap._glibc() is None, reason="not glibc")
def test_free_memory_between_used_blocks_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert int(done.stdout) > 40_000_000


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    trim_heap._glibc.cache_clear()
    try:
        trim_heap.keep_large_blocks_out()
        trim_heap.release_free_memory()
    finally:
        trim_heap._glibc.cache_clear()
