"""Captures a computation as a CUDA graph: warm up on a side stream -> capture -> replay with a single launch.

Launching many short kernels one by one may take the host longer than the GPU takes to run them; replaying a graph takes
a single launch. A graph always reads and writes the memory that was used when it was captured, so the caller keeps the
input buffers and refills them. This module can capture any computation; homing captures training passes
(`train.compute.forward_backward`) and decoding steps (`lm.decoding_step`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from homing.lm.device import free_memory

__all__ = ["WARM", "Graphs"]

WARM = 2  # number of warm-up runs before capturing


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
