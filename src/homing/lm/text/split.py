"""Train or val, by the hash of the document: the same document lands on the same side, wherever it stands.

    hash(document) < threshold  ->  val

The tail of a file is no fair sample of it, and equal documents never fall on both sides. With very many documents the
threshold is the fraction itself. With few it is moved to where the val bytes come nearest to the fraction, which
also keeps both sides from being empty.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from itertools import pairwise

__all__ = ["HASH_SPACE", "SmallCorpus", "choose_threshold", "document_hash"]

HASH_SPACE = 2**64
_MAX_EXACT = 200_000
_END_BYTES = 1024


def document_hash(document: bytes) -> int:
    """Of its length and both its ends: equal documents have equal hashes, and a long one costs no more than a short."""
    ends = document if len(document) <= 2 * _END_BYTES else document[:_END_BYTES] + document[-_END_BYTES:]
    return int.from_bytes(hashlib.sha256(b"%d " % len(document) + ends).digest()[:8], "big")


class SmallCorpus:
    """Hash and size of each document while they are few; beyond that nothing is kept."""

    def __init__(self, val_fraction: float) -> None:
        # With forty val documents expected, an empty val side has a chance below 1e-17.
        wanted = math.ceil(40 / val_fraction) if val_fraction else 0
        self.max_documents = min(max(4096, wanted), _MAX_EXACT) if val_fraction else 0
        self.hashes = array("Q")
        self.sizes = array("Q")
        self.is_small = bool(val_fraction)

    def add(self, document: bytes) -> None:
        if not self.is_small:
            return
        self.hashes.append(document_hash(document))
        self.sizes.append(len(document))
        if len(self.hashes) > self.max_documents:
            self.is_small = False
            self.hashes, self.sizes = array("Q"), array("Q")


def choose_threshold(val_fraction: float, corpus: SmallCorpus) -> int:
    if not val_fraction:
        return 0
    if not corpus.is_small:
        return int(val_fraction * HASH_SPACE)
    by_hash: dict[int, int] = {}
    for value, size in zip(corpus.hashes, corpus.sizes, strict=True):
        by_hash[value] = by_hash.get(value, 0) + size
    ordered = sorted(by_hash)
    wanted, val_bytes = val_fraction * sum(by_hash.values()), 0
    best, best_miss = 0, math.inf
    # Never the last one: train keeps at least one document.
    for value, above in pairwise(ordered):
        val_bytes += by_hash[value]
        if abs(val_bytes - wanted) < best_miss:
            best, best_miss = above, abs(val_bytes - wanted)
    return best
