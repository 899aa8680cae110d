"""Packs whole conversations into rows. No conversation is cut, and none can attend to another.

    epoch e:  each source repeated by its weight  ->  permuted by (seed, e)  ->  longest first into the fullest row
              with room (best fit)  ->  rows permuted by (seed, e)

    row:      | conversation 7      | conversation 2   | 9   |·|         segments 0 0 0 ... 1 1 1 ... 2 2 -1
              ids: all but the last token of each;  targets: all but the first, IGNORED where masked

The rows are a pure function of (shards, seed, epoch), so the only state to save is one integer, the number of rows
consumed. The number of rows in an epoch depends only on the lengths of the conversations, so every epoch has the same
number, unless a source has a fractional weight. This module runs in the trainer, so it needs only numpy and no chat
template.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from homing.errors import DataError, IntegrityError
from homing.lm.data.shards.pack_text import permutation
from homing.lm.data.shards.read_shards import TokenSplit, file_sha256, map_file, open_split
from homing.wire.shard_manifest import DataManifest

__all__ = ["IGNORED", "ConversationSplit", "Mixture", "PackedConversations", "mixture_of", "open_conversations"]

IGNORED = -100  # target value of masked positions; the loss function ignores this value
PADDING = -1  # segment number of padding, which belongs to no conversation
_EPOCHS_KEPT = 2
# Combined with the seed when rows are permuted, so that their order is independent of the order of conversations.
_ROW_KEY = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True)
class ConversationSplit:
    tokens: TokenSplit
    masks: list[NDArray[np.uint8]]  # one mask per shard, with one byte per token

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.tokens.document_starts)

    def read(self, number: int) -> tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.uint8]]:
        """Return the ids and the loss mask of one conversation."""
        start, end = self.tokens.document_starts[number : number + 2].tolist()
        shard = int(np.searchsorted(self.tokens.shard_starts[1:-1], start, side="right"))
        base = int(self.tokens.shard_starts[shard])
        return self.tokens.shards[shard][start - base : end - base], self.masks[shard][start - base : end - base]


@dataclass(frozen=True)
class Mixture:
    """How often each source's conversations occur in an epoch.

    Each source is one consecutive range of conversations, in shard order.
    """

    counts: list[int]
    copies: list[float]


def mixture_of(manifest: DataManifest, split: str) -> Mixture:
    """Return the mixture that prep recorded; for validation, one in which every conversation occurs once."""
    sources = manifest.settings["sources"]
    is_train = split == "train"
    return Mixture([int(s["num"][split]) for s in sources], [float(s["copies"]) if is_train else 1.0 for s in sources])


def open_conversations(
    data_dir: Path, manifest: DataManifest, name: str, *, checks_hashes: bool = False
) -> ConversationSplit:
    tokens = open_split(data_dir, manifest, name, checks_hashes=checks_hashes)
    masks, problems = [], []
    for shard in manifest.splits[name].shards:
        path = data_dir / shard.mask_name
        if not shard.mask_name or not path.is_file() or path.stat().st_size != shard.num_tokens:
            problems.append(f"{path}: missing, or its size is not {shard.num_tokens:,} bytes")
        elif checks_hashes and file_sha256(path) != shard.mask_sha256:
            raise IntegrityError(
                f"{path} is damaged.",
                why="Its sha256 does not match the manifest.",
                fix="Prepare the data again: homing prep RUN --force",
            )
        else:
            masks.append(map_file(path, np.dtype(np.uint8)))
    if problems:
        raise DataError(
            what=f"Cannot use the conversations in {data_dir}.",
            why="\n".join(problems),
            fix="Prepare them again: homing prep RUN --force"
            " (If this is a rented instance, the data transfer was incomplete.)",
        )
    return ConversationSplit(tokens, masks)


@dataclass(frozen=True)
class _Epoch:
    members: NDArray[np.int64]  # indices of the conversations, row by row
    row_starts: NDArray[np.int64]  # index in `members` at which each row begins; the last entry is len(members)


class PackedConversations:
    """Provides random access to rows of `context` positions."""

    def __init__(self, split: ConversationSplit, mixture: Mixture, *, context: int, seed: int) -> None:
        assert sum(mixture.counts) == split.tokens.num_documents, "every conversation must belong to exactly one source"
        self.split, self.context, self.seed = split, context, seed
        self._mixture = mixture
        # The last token of a conversation is never an input, so it takes up no position.
        self._sizes = np.maximum(split.lengths - 1, 0)
        self._is_steady = all(float(copies).is_integer() for copies in mixture.copies)
        self._epochs: dict[int, _Epoch] = {}
        self._num_rows: dict[int, int] = {}
        _check_sizes(self._sizes, context)

    def num_rows(self, epoch: int = 0) -> int:
        """Return the number of rows in one epoch."""
        known = 0 if self._is_steady else epoch
        if known not in self._num_rows:
            self._num_rows[known] = len(self._epoch(known).row_starts) - 1
        return self._num_rows[known]

    def locate(self, row: int) -> tuple[int, int]:
        """Return the row's epoch and its index within that epoch."""
        if self._is_steady:
            return divmod(row, self.num_rows())
        epoch = 0
        while row >= self.num_rows(epoch):
            row -= self.num_rows(epoch)
            epoch += 1
        return epoch, row

    def read_into(
        self,
        first_row: int,
        ids_RT: NDArray[np.integer[Any]],
        targets_RT: NDArray[np.integer[Any]],
        segments_RT: NDArray[np.integer[Any]],
    ) -> int:
        """Fill consecutive rows; return the number of unmasked targets."""
        ids_RT.fill(0)
        targets_RT.fill(IGNORED)
        segments_RT.fill(PADDING)
        return sum(
            self._read_row(first_row + number, ids_RT[number], targets_RT[number], segments_RT[number])
            for number in range(len(ids_RT))
        )

    def conversations_in(self, row: int) -> list[int]:
        number, row = self.locate(row)
        epoch = self._epoch(number)
        return [int(i) for i in epoch.members[epoch.row_starts[row] : epoch.row_starts[row + 1]]]

    def _read_row(self, row: int, ids: Any, targets: Any, segments: Any) -> int:
        at = num_targets = 0
        for segment, number in enumerate(self.conversations_in(row)):
            tokens, mask = self.split.read(number)
            end, is_learned = at + len(tokens) - 1, mask[1:] != 0
            ids[at:end] = tokens[:-1]
            targets[at:end][is_learned] = tokens[1:][is_learned]
            segments[at:end] = segment
            at, num_targets = end, num_targets + int(is_learned.sum())
        return num_targets

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            self._epochs[number] = self._pack(number)
            if len(self._epochs) > _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
        return self._epochs[number]

    def _pack(self, number: int) -> _Epoch:
        items = _chosen(self._mixture, self.seed, number)
        items = items[permutation(len(items), self.seed, number)]
        # The sort is stable: conversations of equal length keep their permuted order, so rows differ from epoch to
        # epoch.
        items = items[np.argsort(-self._sizes[items], kind="stable")]
        rows = _best_fit(self._sizes[items].tolist(), self.context)
        num_rows = int(rows.max()) + 1 if len(rows) else 0
        places = np.empty(num_rows, dtype=np.int64)
        places[permutation(num_rows, self.seed ^ _ROW_KEY, number)] = np.arange(num_rows)
        rows = places[rows]
        by_row = np.argsort(rows, kind="stable")
        starts = np.searchsorted(rows[by_row], np.arange(num_rows + 1), side="left")
        return _Epoch(items[by_row], starts.astype(np.int64))


def _chosen(mixture: Mixture, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the conversations of one epoch, with each source repeated as often as the mixture requires.

    If the number of copies is fractional, part of the source is repeated once more. Each epoch repeats the next part,
    in a fixed order, so that over time all conversations of the source occur equally often.
    """
    chosen, first = [], 0
    for place, (count, copies) in enumerate(zip(mixture.counts, mixture.copies, strict=True)):
        here = np.arange(first, first + count, dtype=np.int64)
        whole, part = int(copies), copies - int(copies)
        chosen += [here] * whole
        if part:
            order = here[permutation(count, seed ^ (place + 1), 0)]
            begin, end = round(epoch * part * count), round((epoch + 1) * part * count)
            chosen.append(order[np.arange(begin, end) % count] if count else here)
        first += count
    return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)


def _best_fit(sizes: list[int], capacity: int) -> NDArray[np.int64]:
    """Return the row of each item: the fullest row that has enough room, or a new row if there is none.

    Rows are grouped by remaining room. An integer used as a bit set records which amounts of room exist, so that the
    smallest sufficient amount is found without a search.
    """
    rows = np.empty(len(sizes), dtype=np.int64)
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms, num_rows = 0, 0
    for number, size in enumerate(sizes):
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row, num_rows = capacity, num_rows, num_rows + 1
        rows[number] = row
        by_room[room - size].append(row)
        rooms |= 1 << (room - size)
    return rows


def _check_sizes(sizes: NDArray[np.int64], context: int) -> None:
    if len(sizes) and int(sizes.max()) > context:
        raise DataError(
            what=f"A conversation of {int(sizes.max()) + 1:,} tokens exceeds the context of {context:,}.",
            why="The data was prepared for a longer context than this run has.",
            fix="Prepare the data again, for this context: homing prep RUN",
        )
