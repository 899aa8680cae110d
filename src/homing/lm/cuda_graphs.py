"""Captures a computation as a CUDA graph: warm up on a side stream -> capture -> replay with a single launch.

Launching many short kernels one by one may take the host longer than the GPU takes to run them; replaying a graph takes
a single launch. A graph always reads and writes the memory that was used when it was captured, so the caller keeps the
input buffers and refills them. This module can capture any computation; homing captures training passes
(`train.compute.forward_backward`) and decoding steps (`lm.decoding_step`).

    Graphs         captures graphs that share a memory pool
    RecentGraphs   keeps the graphs that were used last, up to a number and an amount of memory
"""

from __future__ import annotations

import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from homing.lm.device import free_memory

__all__ = ["MOST_BYTES", "MOST_GRAPHS", "WARM", "Graphs", "RecentGraphs"]

WARM = 2  # number of warm-up runs before capturing
# What decoding steps of one model may keep. A graph of a few hundred kernels takes some megabytes of the driver's
# memory; all graphs share the memory of their intermediate results.
MOST_GRAPHS = 32
MOST_BYTES = 1 << 30


class Graphs:
    """Captures graphs on one GPU, one at a time. All graphs share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Run `compute` a few times to warm up, capture it, and return a function that replays the graph.

        After a failure, wait until nothing (not even the exception) references the computed tensors, then call
        `forget`.
        """
        before = torch.cuda.current_stream(self._device)
        stream = side_stream(self._device)
        one = torch.zeros(1, device=self._device)  # allocate this now, because the GPU may be full if the capture fails
        try:
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(WARM):
                    compute()
            before.wait_stream(stream)
            # All graphs can share a memory pool, because the output of each graph is read before the next graph runs.
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                # Forbid unsafe CUDA calls in this thread only, because other threads may be reading rows into pinned
                # memory or copying a checkpoint.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    compute()
            except RuntimeError:
                with contextlib.suppress(RuntimeError):  # suppress a second error, so that the first one is raised
                    _capture_nothing(stream, one)
                raise
        finally:
            # After a failed capture, torch leaves the capture stream as the current stream.
            torch.cuda.set_stream(before)
        return graph.replay

    def forget(self) -> None:
        """Free the memory pool. Call this only when no captured graph is in use any more."""
        self._pool = None  # torch frees an unused pool, so its handle must not be used again
        if gc.isenabled():  # skip the garbage collection, because a server calls this after every response
            torch.cuda.empty_cache()
        else:
            free_memory()


@dataclass
class _Kept:
    replay: Callable[[], None]
    made: Any
    num_bytes: int


class RecentGraphs:
    """Keeps captured graphs by key. If there are too many, the one that was not used for longest is freed first.

    At most `most_graphs` graphs are kept, with at most `most_bytes` of GPU memory. The memory of a graph is how much
    less was free after its capture, so it includes what the driver allocates. A single graph may exceed `most_bytes`,
    because a step needs one.
    """

    def __init__(self, device: torch.device, *, most_graphs: int = MOST_GRAPHS, most_bytes: int = MOST_BYTES) -> None:
        self._device, self._captures = device, Graphs(device)
        self._most_graphs, self._most_bytes = most_graphs, most_bytes
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._kept.values())

    def replay(self, key: Hashable) -> Any:
        """Run the graph with this key and return its result, in buffers that the next replay may overwrite."""
        self._kept.move_to_end(key)
        kept = self._kept[key]
        kept.replay()
        return kept.made

    def capture(self, key: Hashable, compute: Callable[[], Any]) -> None:
        """Capture a graph whose result is what `compute` returns. Raises RuntimeError if it cannot be captured."""
        while len(self._kept) >= self._most_graphs:  # none of them is running: its result was read
            self._kept.popitem(last=False)
        made: list[Any] = []  # holds the result of the last call, the one that is captured

        def computed() -> None:
            made[:] = [compute()]

        before = free_on(self._device)
        try:
            replay = self._captures.capture(computed)
        except RuntimeError:
            made.clear()
            raise
        self._kept[key] = _Kept(replay, made[0], max(0, before - free_on(self._device)))
        while self.num_bytes > self._most_bytes and len(self._kept) > 1:
            self._kept.popitem(last=False)

    def discard(self, is_gone: Callable[[Any], bool] = lambda key: True) -> None:
        """Free the graphs whose key meets the condition; once none is left, also the memory that they shared."""
        had_any = bool(self._kept)
        for key in [key for key in self._kept if is_gone(key)]:
            del self._kept[key]
        if had_any and not self._kept:
            self._captures.forget()

    def forget_failed(self) -> None:
        """Free everything after a failed capture, when nothing references its tensors any more."""
        self._kept.clear()
        self._captures.forget()


def free_on(device: torch.device) -> int:
    """Return how many bytes are free on the GPU, for torch and for the driver."""
    return torch.cuda.mem_get_info(device)[0]


def _capture_nothing(stream: torch.cuda.Stream, one: torch.Tensor) -> None:
    """Capture an empty graph, to recover from a failed capture.

    Without this, torch's random generator stays in capture mode and cannot be used outside a capture until another
    capture succeeds.
    """
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        one.zero_()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream used for all captures.

    When libraries are first called on a stream, they allocate workspaces, and these allocations must not be captured.
    Libraries never free the workspaces, which take tens of megabytes per stream, so using a new stream for each
    generated text would fill the memory.
    """
    return torch.cuda.Stream(device)
