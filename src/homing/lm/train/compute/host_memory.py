"""Measures free host memory, which is needed for copies of GPU state and for offloaded optimizer state.

Inside a container, the cgroup's limit applies, because the figures for the whole machine are too high.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["free_bytes"]

_MEMINFO = Path("/proc/meminfo")
# files with the memory limit and the memory usage of a container, for cgroups v2 and v1
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_bytes() -> int | None:
    """Return how many bytes of host memory are free, or None if that cannot be determined."""
    found = [_of_machine(), *(_of_container(limit, used) for limit, used in _CGROUPS)]
    return min((free for free in found if free is not None), default=None)


def _of_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _of_container(limit: Path, used: Path) -> int | None:
    """Return the memory left under the cgroup limit.

    The cgroup's usage includes the file page cache, which the kernel can reclaim; memory.stat contains its size.
    """
    try:
        most = int(limit.read_text(encoding="ascii"))  # `max` (no limit) raises ValueError
        given_up = [line.split()[1] for line in (used.parent / "memory.stat").read_text(encoding="ascii").splitlines()
                    if line.split()[0] in ("inactive_file", "total_inactive_file")]  # fmt: skip
        return most - int(used.read_text(encoding="ascii")) + max((int(number) for number in given_up), default=0)
    except (OSError, ValueError, IndexError):
        return None
