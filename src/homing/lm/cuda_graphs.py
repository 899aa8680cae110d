"""Captures a computation as a CUDA graph: run a few times on a side stream -> captured -> launched at once.

Launching a long sequence of short kernels may take the host longer than the GPU takes to run them; a graph is a single
launch. It reads and writes the memory it was captured with, so the caller keeps buffers and fills them. Knows nothing
of what is computed: a training pass (`train.compute.forward_backward`) or a decoding step (`lm.decode_token`).
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

WARM = 2  # warm-up runs before capturing


class Graphs:
    """Captures graphs on one GPU, one at a time; they share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays `compute` without the host; runs it a few times first.

        After a failure call `forget`, once nothing holds the computed tensors any more, including the exception.
        """
        before = torch.cuda.current_stream(self._device)
        stream = side_stream(self._device)
        one = torch.zeros(1, device=self._device)  # allocate now: after a failure the GPU may be full
        try:
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(WARM):
                    compute()
            before.wait_stream(stream)
            # One memory pool for all graphs: what one of them leaves there is read before another one runs.
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                # Restrict only this thread: others read rows into pinned memory, or copy a checkpoint.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    compute()
            except RuntimeError:
                with contextlib.suppress(RuntimeError):  # raise the first failure
                    _capture_nothing(stream, one)
                raise
        finally:
            # torch leaves the stream of a failed capture as the current one.
            torch.cuda.set_stream(before)
        return graph.replay

    def forget(self) -> None:
        """Free the memory pool. Call when no graph is left."""
        self._pool = None  # an unused pool is gone, and its handle must not be used again
        if gc.isenabled():  # cycles are collected automatically, and a server calls this after each answer
            torch.cuda.empty_cache()
        else:
            free_memory()


def _capture_nothing(stream: torch.cuda.Stream, one: torch.Tensor) -> None:
    """Capture an empty graph, to recover from a failed capture.

    torch otherwise keeps its random generator in capture mode and refuses to draw outside of a capture until one
    succeeds.
    """
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        one.zero_()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream used for all captures.

    What libraries set up in their first calls on a stream must not be captured, and is reused. They also keep it: tens
    of megabytes per stream, which would add up with one stream per text.
    """
    return torch.cuda.Stream(device)
