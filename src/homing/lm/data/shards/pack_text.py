"""Packs documents into rows of an endless token stream with random access.

    epoch 0                         epoch 1
    doc 7 | doc 2 | doc 9 | ...     doc 4 | doc 7 | doc 1 | ...      a new order for each (seed, epoch)
    ├─ row 0 ─┼─ row 1 ─┼─ row 2 ─┼─ row 3 ─┼─ ...                   row r: inputs  [rT, rT+T)
      ├─ row 0 ─┼─ row 1 ─┼─ ...                                            targets [rT+1, rT+T+1)

Rows tile the stream: nothing is cropped, padded or lost, not even between epochs. A batch is a range of consecutive
rows, so it is one contiguous range of the stream, regardless of the micro-batch size. The only state to save is one
integer, the number of rows consumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from homing.errors import DataError
from homing.lm.data.shards.read_shards import TokenSplit

__all__ = ["PackedStream", "check_ids", "permutation"]

# Number of epochs to keep in memory: two, because a read at the end of an epoch continues in the next one.
_EPOCHS_KEPT = 2


@dataclass(frozen=True)
class _Epoch:
    order: NDArray[np.int64]  # indices of the documents, in the order of the epoch
    starts: NDArray[np.int64]  # offset of each document in the epoch; the last entry is the total length


class PackedStream:
    """An endless stream of tokens with random access: reading takes equally long at any `start` position."""

    def __init__(self, split: TokenSplit, *, seed: int) -> None:
        assert split.num_tokens > 0, "an empty split has no stream"
        self.split = split
        self.seed = seed
        self.epoch_tokens = split.num_tokens
        self._lengths = np.diff(split.document_starts)
        self._epochs: dict[int, _Epoch] = {}

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        out = np.empty(count, dtype=np.int32)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: NDArray[np.int32]) -> None:
        filled = 0
        while filled < len(out):
            number, offset = divmod(start + filled, self.epoch_tokens)
            count = min(len(out) - filled, self.epoch_tokens - offset)
            self._read_epoch(self._epoch(number), offset, out[filled : filled + count])
            filled += count

    def rows(self, first_row: int, num_rows: int, context: int) -> NDArray[np.int32]:
        """Return consecutive rows as one array: T tokens per row, and one more token for the last row's last target."""
        return self.read(first_row * context, num_rows * context + 1)

    def _read_epoch(self, epoch: _Epoch, start: int, out: NDArray[np.int32]) -> None:
        first = int(np.searchsorted(epoch.starts, start, side="right")) - 1
        last = int(np.searchsorted(epoch.starts, start + len(out), side="left"))
        documents = epoch.order[first:last]
        # From here on, positions are token offsets in the whole split. The read may start or end inside a document.
        begins = self.split.document_starts[documents]
        ends = begins + self._lengths[documents]
        begins[0] += start - epoch.starts[first]
        ends[-1] -= epoch.starts[last] - (start + len(out))
        # Exclude both outer boundaries, so that an empty document at the very end still maps to the last shard.
        numbers = np.searchsorted(self.split.shard_starts[1:-1], begins, side="right")
        bases = self.split.shard_starts[numbers]
        shards, filled = self.split.shards, 0
        for number, begin, end in zip(
            numbers.tolist(), (begins - bases).tolist(), (ends - bases).tolist(), strict=True
        ):
            out[filled : filled + end - begin] = shards[number][begin:end]
            filled += end - begin

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            order = permutation(self.split.num_documents, self.seed, number)
            starts = np.zeros(len(order) + 1, dtype=np.int64)
            np.cumsum(self._lengths[order], out=starts[1:])
            self._epochs[number] = _Epoch(order, starts)
            if len(self._epochs) > _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
        return self._epochs[number]


def check_ids(ids: NDArray[np.int32], vocab_size: int, split: str) -> None:
    """Raise DataError if an id is outside the vocabulary.

    A file of the right size may still be damaged or belong to another tokenizer, and the GPU's error for such an id
    names neither the shard nor the id.
    """
    largest = int(ids.view(np.uint32).max())
    if largest >= vocab_size:
        raise DataError(
            what=f"The {split} shards contain token id {largest:,}, but the vocabulary ends at {vocab_size - 1:,}.",
            why="The shards are damaged or belong to another tokenizer. `homing verify RUN --hash` detects damage.",
            fix="Prepare them again: homing prep RUN --force",
        )


def permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation that depends only on the arguments, not on the version of numpy.

    numpy guarantees that the raw output of a bit generator never changes, but not that of `Generator.permutation`. So
    this sorts raw 64-bit keys instead. The sort is stable, so even equal keys have a defined order.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    keys = np.asarray(np.random.Philox(key=key).random_raw(count), dtype=np.uint64)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
