"""A computation as one CUDA graph: run a few times on a stream of its own -> captured -> launched at once.

A long row of short kernels may take the host longer to launch than the card to run; a graph is one launch. It reads and
writes the memory it was captured with, so whoever captures keeps buffers and fills them. It does not know what is
computed: a pass of training (`train.passes`), or a token of every row (`lm.decode`).
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

WARM = 2  # times that a computation really runs before it is captured


class Graphs:
    """Of one card, one after the other: they share a pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """`compute`, to be called again without the host. It runs a few times before, really. After a failure call
        `forget`, when nothing of what was computed is held any more, by the exception neither."""
        before = torch.cuda.current_stream(self._device)
        stream = side_stream(self._device)
        one = torch.zeros(1, device=self._device)  # now: after a failure the card may be full
        try:
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(WARM):
                    compute()
            before.wait_stream(stream)
            # One pool of memory for all graphs: what one of them leaves there is read before another one runs.
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                # Only what this thread does is policed: others read rows into pinned memory, or copy a checkpoint.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    compute()
            except RuntimeError:
                with contextlib.suppress(RuntimeError):  # what failed first is what is raised
                    _capture_nothing(stream, one)
                raise
        finally:
            # torch leaves the stream of a capture that failed as the current one.
            torch.cuda.set_stream(before)
        return graph.replay

    def forget(self) -> None:
        """Called when no graph is left."""
        self._pool = None  # a pool that nobody uses is gone, and its name must not be used again
        if gc.isenabled():  # cycles go by themselves, and a server forgets after each answer
            torch.cuda.empty_cache()
        else:
            free_memory()


def _capture_nothing(stream: torch.cuda.Stream, one: torch.Tensor) -> None:
    """After a capture that failed torch goes on counting random numbers as if it were capturing, and refuses to draw
    any outside, until a capture ends well."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        one.zero_()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all that is ever captured: what libraries set up for a stream in their first calls is not captured, and
    used again. They also keep it: tens of megabytes for each stream, were there one for each text."""
    return torch.cuda.Stream(device)
