"""Documents to ids with somebody else's tokenizer: `tokenizers` itself, where the fast encoder does not know the split.

A document is encoded whole, never in parts: what its split would join, or its normalizer, stays together. Documents are
bounded in size (text/documents), and a batch holds a few of them, so memory is bounded too: an encoding takes far
more room than its ids, and is gone before the next batch. `tokenizers` spreads a batch over all cores by itself.

Slower than gigatoken by an order of magnitude, so prep says when it is used. Like it, never gives a special id.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from homing.lm.tokenizer.encode import AWKWARD, Proof
from homing.lm.tokenizer.load import load_tokenizer

__all__ = ["TheirEncoder"]

# Text that is encoded at once, for each core: enough that none waits for the others, and a small part of the memory.
_BATCH_BYTES_PER_CORE, _MOST_CORES = 512 << 10, 16


class TheirEncoder:
    def __init__(self, path: str | os.PathLike[str], end_id: int | None = None) -> None:
        """`end_id` stands after each document, where there is one."""
        self._tokenizer = load_tokenizer(path)
        self._end = np.array([] if end_id is None else [end_id], dtype=np.uint32)
        self._batch_bytes = _BATCH_BYTES_PER_CORE * min(os.cpu_count() or 1, _MOST_CORES)

    def encode(self, documents: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """All ids end to end, and where each document begins, with the end of the last one added. From any thread."""
        rows = [part for row in self._rows(documents) for part in (row, self._end)]
        sizes = [len(text) + len(end) for text, end in zip(rows[::2], rows[1::2], strict=True)]
        ids = np.concatenate(rows) if rows else np.empty(0, dtype=np.uint32)
        return ids, np.cumsum([0, *sizes], dtype=np.int64)

    def prove(self, documents: Sequence[bytes]) -> Proof:
        """That a batch gives each text the ids that it has alone; as `Encoder.prove`."""
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
