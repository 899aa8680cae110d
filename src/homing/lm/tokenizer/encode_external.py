"""Encodes documents with a third-party tokenizer, using `tokenizers` itself, where gigatoken does not know the split.

A document is encoded whole, never in parts, so that the split pattern or normalizer sees everything it would join.
Documents are bounded in size (text/documents), and a batch holds a few of them, so memory is bounded too: an encoding
takes far more memory than its ids, and is freed before the next batch. `tokenizers` uses all cores for a batch.

An order of magnitude slower than gigatoken, so prep reports when it is used. Like gigatoken, it never produces special
ids.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from homing.lm.tokenizer.encode import AWKWARD, Proof
from homing.lm.tokenizer.tokenizer import load_tokenizer

__all__ = ["TheirEncoder"]

# Text encoded at once, per core: enough to keep all cores busy, and a small part of the memory.
_BATCH_BYTES_PER_CORE, _MOST_CORES = 512 << 10, 16


class TheirEncoder:
    def __init__(self, path: str | os.PathLike[str], end_id: int | None = None) -> None:
        """Load the tokenizer. `end_id`, if any, is appended to each document."""
        self._tokenizer = load_tokenizer(path)
        self._end = np.array([] if end_id is None else [end_id], dtype=np.uint32)
        self._batch_bytes = _BATCH_BYTES_PER_CORE * min(os.cpu_count() or 1, _MOST_CORES)

    def encode(self, documents: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Return all ids concatenated, and the offset of each document, then the end. Thread-safe."""
        rows = [part for row in self._rows(documents) for part in (row, self._end)]
        sizes = [len(text) + len(end) for text, end in zip(rows[::2], rows[1::2], strict=True)]
        ids = np.concatenate(rows) if rows else np.empty(0, dtype=np.uint32)
        return ids, np.cumsum([0, *sizes], dtype=np.int64)

    def prove(self, documents: Sequence[bytes]) -> Proof:
        """Verify that each text gets the same ids in a batch as alone; like `Encoder.prove`."""
        texts = [text.encode() for text in AWKWARD] + list(documents)
        rows = [row.tolist() for row in self._rows(texts)]
        return Proof("a batch of tokenizers", lambda: self._tokenizer, texts, rows)

    def _rows(self, documents: Sequence[bytes]) -> Iterator[npt.NDArray[np.uint32]]:
        for batch in _batches(documents, self._batch_bytes):
            for ids in self._tokenizer.encode_many([document.decode() for document in batch]):
                yield np.array(ids, dtype=np.uint32)


def _batches(documents: Sequence[bytes], size: int) -> Iterator[list[bytes]]:
    batch, num_bytes = list[bytes](), 0
    for document in documents:
        batch.append(document)
        num_bytes += len(document)
        if num_bytes >= size:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
