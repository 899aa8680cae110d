"""Rows of plain text: every token is a target, and documents follow each other without a mask between them.

    R T + 1 consecutive tokens  ->  ids [0, RT), targets [1, RT]

Each rank takes consecutive rows of the step, so that all ranks together see the same tokens as a single one would.
"""

from __future__ import annotations

from torch import Tensor

from homing.lm.data.shards.pack_text import PackedStream, check_ids
from homing.lm.train.compute.batch import Batch

__all__ = ["TextRows"]


class TextRows:
    """The rows of one rank: its share of the `rows_per_step` rows of a step."""

    def __init__(
        self, stream: PackedStream, *, rows_per_step: int, context: int, vocab_size: int, rank: int, num_ranks: int
    ) -> None:
        self.name = f"split {stream.split.name!r}"
        self._stream, self._vocab_size = stream, vocab_size
        self._rows = rows_per_step // num_ranks
        self._context, self._rank = context, rank
        self._num_targets = rows_per_step * context

    def host_shape(self) -> tuple[int, ...]:
        return (self._rows * self._context + 1,)

    def read_into(self, first_row: int, host: Tensor) -> int:
        ids = host.numpy()
        self._stream.read_into((first_row + self._rank * self._rows) * self._context, ids)
        check_ids(ids, self._vocab_size, self._stream.split.name)
        return self._num_targets

    def to_batch(self, device_tensor: Tensor, num_targets: int) -> Batch:
        tokens, shape = device_tensor.long(), (self._rows, self._context)
        return Batch(tokens[:-1].view(shape), tokens[1:].view(shape), num_targets)
