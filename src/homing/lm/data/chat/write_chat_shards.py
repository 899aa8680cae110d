"""Writes examples to shards of three files: ids, index, mask.

Hashed as they grow, closed after a whole conversation.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from homing.lm.data.chat.render import Example
from homing.wire.file_names import index_name, mask_name, shard_name
from homing.wire.shard_manifest import Shard, Split

__all__ = ["ConversationWriter"]


class _File:
    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115, closed by close
        self._hash = hashlib.sha256()

    def write(self, values: NDArray[Any]) -> None:
        data = values.tobytes()
        self._hash.update(data)
        self._file.write(data)

    def close(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()


class ConversationWriter:
    def __init__(self, folder: Path, split: str, *, dtype: str, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._files: tuple[_File, _File, _File] | None = None
        self._shards: list[Shard] = []
        self._starts: list[int] = [0]
        self._num_text_bytes = 0
        self.num_conversations = self.num_targets = 0

    def append(self, example: Example, num_text_bytes: int) -> None:
        tokens, index, mask = self._files = self._files or self._open()
        tokens.write(example.ids.astype(self._dtype))
        index.write(np.array(self._starts[-1:], dtype="<u8"))
        mask.write(example.mask.astype(np.uint8))
        self._starts.append(self._starts[-1] + len(example.ids))
        self._num_text_bytes += num_text_bytes
        self.num_conversations += 1
        self.num_targets += int(example.mask.sum())
        if self._starts[-1] >= self._shard_tokens:
            self._close()

    def finish(self) -> Split:
        if self._files is not None:
            self._close()
        return Split(
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            num_documents=self.num_conversations,
            num_text_bytes=self._num_text_bytes,
            shards=self._shards,
        )

    def abandon(self) -> None:
        for file in self._files or ():
            file.close()
        self._files = None

    def _names(self) -> tuple[str, str, str]:
        number = len(self._shards)
        return shard_name(self._split, number), index_name(self._split, number), mask_name(self._split, number)

    def _open(self) -> tuple[_File, _File, _File]:
        first, second, third = (_File(self._folder / name) for name in self._names())
        return first, second, third

    def _close(self) -> None:
        assert self._files is not None
        tokens, index, mask = self._files
        num_tokens = self._starts[-1]
        index.write(np.array([num_tokens], dtype="<u8"))
        name, index_file, mask_file = self._names()
        self._shards.append(
            Shard(
                name=name,
                index_name=index_file,
                num_tokens=num_tokens,
                num_documents=len(self._starts) - 1,
                num_bytes=num_tokens * self._dtype.itemsize,
                sha256=tokens.close(),
                index_sha256=index.close(),
                mask_name=mask_file,
                mask_sha256=mask.close(),
            )
        )
        self._files, self._starts = None, [0]
