"""Rows to the device, read ahead by a thread: source -> host memory (pinned for CUDA) -> the batch of one step.

The thread only fills buffers; the copy to the device is started by the caller, on its own stream, and does not wait.
Pinned memory comes from torch's caching allocator, which gives a buffer out again only when its copy has ended.
"""

from __future__ import annotations

import queue
import threading
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from homing.errors import DataError
from homing.lm.train.batch import Batch

__all__ = ["Feed", "RowSource"]

_AHEAD = 2  # steps read before they are asked for
_STALLED_S = 600.0  # a disk that gives nothing for so long will not


class RowSource(Protocol):
    """Where rows come from. A step is `rows_per_step` consecutive ones; a rank takes its part of them."""

    name: str  # for people

    def host_shape(self) -> tuple[int, ...]:
        """Of the int32 numbers that one step needs on the device."""
        ...

    def read_into(self, first_row: int, host: Tensor) -> int:
        """Fills `host` with the step that begins with this row; returns how many targets the whole step has."""
        ...

    def to_batch(self, device_tensor: Tensor, num_targets: int) -> Batch: ...


class Feed:
    """Yields the batches of consecutive steps, from `first_row` on; the same rows on every machine."""

    def __init__(self, source: RowSource, *, first_row: int, rows_per_step: int, device: torch.device) -> None:
        self._source = source
        self._first_row, self._rows_per_step = first_row, rows_per_step
        self._device = device
        self._ready: queue.Queue[tuple[Tensor, int] | BaseException] = queue.Queue(maxsize=_AHEAD)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="feed", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_closed.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread.join(timeout=_STALLED_S)

    def next(self) -> Batch:
        try:
            ready = self._ready.get(timeout=_STALLED_S)
        except queue.Empty:
            raise DataError(
                what=f"No tokens came from disk for {_STALLED_S:.0f} s.",
                why=f"The reader of {self._source.name} hangs.",
                fix="Look at the disk under data.dir; a network mount may be gone.",
            ) from None
        if isinstance(ready, BaseException):
            raise ready
        host, num_targets = ready
        # 32 bits travel, 64 are what the loss wants: widening on the device halves what crosses the bus.
        return self._source.to_batch(host.to(self._device, non_blocking=True), num_targets)

    def _read_ahead(self) -> None:
        row, shape, is_pinned = self._first_row, self._source.host_shape(), self._device.type == "cuda"
        try:
            while not self._is_closed.is_set():
                host = torch.empty(shape, dtype=torch.int32, pin_memory=is_pinned)
                self._put((host, self._source.read_into(row, host)))
                row += self._rows_per_step
        except BaseException as error:  # carried to the thread that takes
            self._put(error)

    def _put(self, item: tuple[Tensor, int] | BaseException) -> None:
        while not self._is_closed.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return
            except queue.Full:
                continue
