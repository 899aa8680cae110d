"""Defines the batch for one optimizer step, and the interface through which the training loop gets its batches.

Shapes: R rows in a step, T positions.

`Feed` reads rows ahead in a thread: source -> host memory (pinned for CUDA) -> one step's batch on the device. The
thread only fills buffers; the caller starts the copy to the device on its own stream, without blocking. Pinned memory
comes from torch's caching allocator, which reuses a buffer only after its copy has finished.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from homing.errors import DataError
from homing.lm.model import Decoder

__all__ = ["Batch", "Batches", "Feed", "RowSource"]


@dataclass(frozen=True)
class Batch:
    ids_RT: Tensor  # int64
    targets_RT: Tensor  # int64; loss.IGNORED at positions that are excluded from the loss
    num_targets: int  # number of targets that are not IGNORED in the whole step, over all ranks
    segments_RT: Tensor | None = None  # int32: index of the token's conversation within its row, -1 for padding
    weights_RT: Tensor | None = None  # float32: loss weight of each target
    figures: dict[str, float] = field(default_factory=dict)  # extra metrics to log with those of the step
    notices: tuple[tuple[str, str], ...] = ()  # (kind, text) of each event to emit with the step

    @property
    def num_rows(self) -> int:
        return len(self.ids_RT)

    def micro_batches(self, micro_batch: int) -> Iterator[Batch]:
        """Yield micro-batches of at most `micro_batch` rows.

        Every micro-batch keeps the `num_targets` of the whole step, so the micro-batch losses add up to the step's mean
        loss, however the rows are split.
        """
        for start in range(0, self.num_rows, micro_batch):
            rows = slice(start, start + micro_batch)
            yield dataclasses.replace(
                self,
                ids_RT=self.ids_RT[rows],
                targets_RT=self.targets_RT[rows],
                segments_RT=None if self.segments_RT is None else self.segments_RT[rows],
                weights_RT=None if self.weights_RT is None else self.weights_RT[rows],
            )

    def loss(self, model: Decoder, count: Tensor | None = None) -> Tensor:
        """Return the loss of these rows. Pass `count` to use a tensor on the device instead of `num_targets`."""
        return model.loss(
            self.ids_RT, self.targets_RT, segments=self.segments_RT, weights_BT=self.weights_RT,
            num_targets=self.num_targets if count is None else count,
        )  # fmt: skip


class Batches(Protocol):
    """Provides the batches of consecutive steps, which are the same on every machine and after every resume."""

    def __enter__(self) -> Batches: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def next(self) -> Batch: ...


_AHEAD = 2  # number of steps whose rows are read ahead
_STALLED_S = 600.0  # if the disk returns no data for this long, treat the read as hung


class RowSource(Protocol):
    """The interface of a data source that provides training rows.

    Each step consists of `rows_per_step` consecutive rows; each rank reads its share of them.
    """

    name: str  # shown in messages

    def host_shape(self) -> tuple[int, ...]:
        """Return the shape of the int32 tensor that one step transfers to the device."""
        ...

    def read_into(self, first_row: int, host: Tensor) -> int:
        """Read this rank's rows of the step that begins at `first_row` into `host`.

        Returns the number of targets in the whole step, over all ranks.
        """
        ...

    def to_batch(self, device_tensor: Tensor, num_targets: int) -> Batch: ...


class Feed:
    """Prefetches the batches of consecutive steps in a thread, starting at row `first_row`."""

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
                what=f"No data was read from the disk for {_STALLED_S:.0f} s.",
                why=f"A read from {self._source.name} has not returned.",
                fix="Check the disk that contains data.dir; a network mount may have been disconnected.",
            ) from None
        if isinstance(ready, BaseException):
            raise ready
        host, num_targets = ready
        # Copy the ids as 32-bit integers, and widen them on the device to the 64 bits that the loss needs: this halves
        # the amount of data to transfer.
        return self._source.to_batch(host.to(self._device, non_blocking=True), num_targets)

    def _read_ahead(self) -> None:
        row, shape, is_pinned = self._first_row, self._source.host_shape(), self._device.type == "cuda"
        try:
            while not self._is_closed.is_set():
                host = torch.empty(shape, dtype=torch.int32, pin_memory=is_pinned)
                self._put((host, self._source.read_into(row, host)))
                row += self._rows_per_step
        except BaseException as error:  # `next` raises the error again in the consuming thread
            self._put(error)

    def _put(self, item: tuple[Tensor, int] | BaseException) -> None:
        while not self._is_closed.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return
            except queue.Full:
                continue
