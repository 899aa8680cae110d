"""Rows to the device, read ahead by a thread: stream -> host memory (pinned for CUDA) -> ids and targets of one step.

The thread only fills buffers; the copy to the device is started by the caller, on its own stream, and does not wait.
Pinned memory comes from torch's caching allocator, which gives a buffer out again only when its copy has ended.
"""

from __future__ import annotations

import queue
import threading
from types import TracebackType

import torch
from torch import Tensor

from homing.errors import DataError
from homing.lm.shards.pack import PackedStream, check_ids

__all__ = ["Feed"]

_AHEAD = 2  # steps read before they are asked for
_STALLED_S = 600.0  # a disk that gives nothing for so long will not


class Feed:
    """Yields (ids_RT, targets_RT) of consecutive steps, from `first_row` on; the same rows on every machine."""

    def __init__(
        self,
        stream: PackedStream,
        *,
        first_row: int,
        rows_per_step: int,
        context: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._stream = stream
        self._vocab_size = vocab_size
        self._first_row = first_row
        self._shape = (rows_per_step, context)
        self._device = device
        self._ready: queue.Queue[Tensor | BaseException] = queue.Queue(maxsize=_AHEAD)
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

    def next(self) -> tuple[Tensor, Tensor]:
        try:
            host = self._ready.get(timeout=_STALLED_S)
        except queue.Empty:
            raise DataError(
                what=f"No tokens came from disk for {_STALLED_S:.0f} s.",
                why=f"The reader of split {self._stream.split.name!r} hangs.",
                fix="Look at the disk under data.dir; a network mount may be gone.",
            ) from None
        if isinstance(host, BaseException):
            raise host
        # 32 bits travel, 64 are what the loss wants: widening on the device halves what crosses the bus.
        tokens = host.to(self._device, non_blocking=True).long()
        return tokens[:-1].view(self._shape), tokens[1:].view(self._shape)

    def _read_ahead(self) -> None:
        rows, context = self._shape
        row = self._first_row
        try:
            while not self._is_closed.is_set():
                host = torch.empty(rows * context + 1, dtype=torch.int32, pin_memory=self._device.type == "cuda")
                self._stream.read_into(row * context, host.numpy())
                check_ids(host.numpy(), self._vocab_size, self._stream.split.name)
                self._put(host)
                row += rows
        except BaseException as error:
            self._put(error)

    def _put(self, item: Tensor | BaseException) -> None:
        while not self._is_closed.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return
            except queue.Full:
                continue
