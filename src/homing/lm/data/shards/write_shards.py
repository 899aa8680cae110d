"""Writes token shards: `train-00000.bin` and its index, hashed while they are written.

    append(ids, starts) -> append tokens to the open shard, with <|endoftext|> before each document;
                           when a shard reaches `shard_tokens`, it is closed after the current document
    mark()              -> sync all bytes to disk, and return the state to resume from
    finish()            -> close the last shard

The result depends only on the documents, not on the batches in which they are appended. So a writer that is killed and
resumes from a mark produces the same bytes as one that was never killed. It discards anything written after the mark.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from homing.errors import DataError
from homing.wire.file_names import index_name, shard_name
from homing.wire.shard_manifest import Shard, Split

__all__ = ["ShardWriter", "dtype_for"]


def dtype_for(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@dataclass
class _State:
    shards: list[dict[str, Any]] = field(default_factory=list)  # closed shards
    num_tokens: int = 0  # number of tokens in the open shard
    num_documents: int = 0
    num_text_bytes: int = 0  # number of text bytes in the split, over all shards


class _Growing:
    """An append-only file with a running sha256."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        if num_bytes and (not path.is_file() or path.stat().st_size < num_bytes):
            raise DataError(
                what=f"The unfinished work in {path.parent} is damaged.",
                why=f"{path.name} is missing or shorter than the {num_bytes:,} bytes that prep wrote to it.",
                fix="Start over: homing prep RUN --force",
            )
        self._file: IO[bytes] = open(path, "r+b" if num_bytes else "w+b", buffering=0)  # noqa: SIM115, closed by us
        self._hash = hashlib.sha256()
        left = num_bytes
        while left:
            block = self._file.read(min(left, 1 << 20))
            assert block, f"{path} became shorter while it was read"
            self._hash.update(block)
            left -= len(block)
        self._file.truncate(num_bytes)
        self._file.seek(num_bytes)

    def write(self, values: npt.NDArray[Any]) -> None:
        data = memoryview(np.ascontiguousarray(values).data).cast("B") if values.size else memoryview(b"")
        self._hash.update(data)
        while data:  # an unbuffered write may write only part of the data
            data = data[self._file.write(data) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> str:
        self.sync()
        self._file.close()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        self._file.close()


class ShardWriter:
    def __init__(
        self, folder: Path, split: str, *, dtype: str, end_of_text_id: int, shard_tokens: int, state: Any = None
    ) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._end_of_text_id = end_of_text_id
        self._state = _State(**state) if state else _State()
        self._tokens: _Growing | None = None
        self._index: _Growing | None = None
        if self._state.num_documents:
            self._open()

    @property
    def num_tokens(self) -> int:
        return self._state.num_tokens + sum(int(shard["num_tokens"]) for shard in self._state.shards)

    def append(self, ids: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64], num_text_bytes: int) -> None:
        """Append documents. `starts` contains the offset of each document in `ids`, followed by the length of `ids`."""
        num_documents = len(starts) - 1
        self._state.num_text_bytes += num_text_bytes
        tokens, begins = self._with_ends(ids, starts)
        first = 0
        while first < num_documents:
            last = self._last_that_fits(begins, first)
            self._write(tokens[begins[first] : begins[last]], begins[first:last] - begins[first])
            first = last

    def mark(self) -> dict[str, Any]:
        for file in (self._tokens, self._index):
            if file is not None:
                file.sync()
        return asdict(self._state)

    def finish(self) -> Split:
        if self._state.num_documents:
            self._close()
        shards = [Shard(**shard) for shard in self._state.shards]
        return Split(
            num_tokens=sum(shard.num_tokens for shard in shards),
            num_documents=sum(shard.num_documents for shard in shards),
            num_text_bytes=self._state.num_text_bytes,
            shards=shards,
        )

    def abandon(self) -> None:
        for file in (self._tokens, self._index):
            if file is not None:
                file.abandon()

    def _with_ends(self, ids: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Return tokens with <|endoftext|> before each document, and the documents' offsets, ending with the length."""
        begins = starts + np.arange(len(starts))
        tokens = np.full(begins[-1], self._end_of_text_id, dtype=self._dtype)
        is_text = np.ones(len(tokens), dtype=bool)
        is_text[begins[:-1]] = False
        tokens[is_text] = ids
        return tokens, begins

    def _last_that_fits(self, begins: npt.NDArray[np.int64], first: int) -> int:
        """Return the index of the first document that no longer goes into the open shard."""
        room = self._shard_tokens - self._state.num_tokens
        reached = int(np.searchsorted(begins, begins[first] + room, side="left"))
        return min(max(reached, first + 1), len(begins) - 1)

    def _write(self, tokens: npt.NDArray[Any], begins: npt.NDArray[np.int64]) -> None:
        if self._tokens is None:
            self._open()
        assert self._tokens is not None
        assert self._index is not None
        self._tokens.write(tokens)
        self._index.write((begins + self._state.num_tokens).astype("<u8"))
        self._state.num_tokens += len(tokens)
        self._state.num_documents += len(begins)
        if self._state.num_tokens >= self._shard_tokens:
            self._close()

    def _open(self) -> None:
        number = len(self._state.shards)
        num_token_bytes = self._state.num_tokens * self._dtype.itemsize
        self._tokens = _Growing(self._folder / shard_name(self._split, number), num_token_bytes)
        self._index = _Growing(self._folder / index_name(self._split, number), self._state.num_documents * 8)

    def _close(self) -> None:
        assert self._tokens is not None
        assert self._index is not None
        number = len(self._state.shards)
        self._index.write(np.array([self._state.num_tokens], dtype="<u8"))
        shard = Shard(
            name=shard_name(self._split, number),
            index_name=index_name(self._split, number),
            num_tokens=self._state.num_tokens,
            num_documents=self._state.num_documents,
            num_bytes=self._state.num_tokens * self._dtype.itemsize,
            sha256=self._tokens.close(),
            index_sha256=self._index.close(),
        )
        self._tokens = self._index = None
        self._state.shards.append(asdict(shard))
        self._state.num_tokens = self._state.num_documents = 0
