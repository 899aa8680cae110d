"""Train or val, by the hash of the document: the same document is on the same side, wherever it stands.

    hash(document) < threshold  ->  val

The tail of a file is no fair sample of it, and equal documents never fall on both sides. With very many documents the
threshold is the fraction itself. With few it is moved to where the val share comes nearest to the fraction, which
also keeps both sides from being empty. Where whole documents are too long for that, each is cut at paragraph breaks
into passages, and each passage has its own hash; neighbours on the same side stay one document.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from homing.lm.text.documents import MAX_DOCUMENT_BYTES, cut

__all__ = ["HASH_SPACE", "Choice", "Passages", "SmallCorpus", "SplitRule", "choose", "document_hash"]

HASH_SPACE = 2**64
_MAX_EXACT = 200_000
_END_BYTES = 1024
# A val share this near to the fraction is near enough; of a small fraction, a quarter of it.
_NEAR_ENOUGH = 0.005
# Several passages make a fairer val side than one; below the smallest size there is little left to evaluate in each.
_PASSAGES_WANTED, _MIN_PASSAGE_BYTES = 8, 256


def document_hash(document: bytes) -> int:
    """Of its length and both its ends: equal documents have equal hashes, and a long one costs no more than a short."""
    ends = document if len(document) <= 2 * _END_BYTES else document[:_END_BYTES] + document[-_END_BYTES:]
    return int.from_bytes(hashlib.sha256(b"%d " % len(document) + ends).digest()[:8], "big")


@dataclass(frozen=True)
class SplitRule:
    threshold: int  # what has a smaller hash goes to val
    passage_bytes: int = 0  # documents are cut into passages of this to twice this size; 0: documents stay whole

    def parts_of(self, document: bytes) -> Iterator[tuple[bytes, bool]]:
        """The parts of a document that is cut into passages, and whether each goes to val."""
        sided = [(part, document_hash(part) < self.threshold) for part in cut(document, self.passage_bytes)]
        for is_val, parts in groupby(sided, key=lambda one: one[1]):
            yield b"".join(part for part, _ in parts), is_val


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


@dataclass(frozen=True)
class Choice:
    threshold: int  # 0: nothing can be held out
    miss: float  # how far the val share is from the fraction

    def is_near(self, val_fraction: float) -> bool:
        return self.miss <= min(_NEAR_ENOUGH, val_fraction / 4)


def choose(val_fraction: float, hashes: array[int], sizes: array[int] | array[float]) -> Choice:
    """The threshold with which the val share comes nearest to the fraction, and neither side is empty."""
    by_hash: dict[int, float] = {}
    for value, size in zip(hashes, sizes, strict=True):
        by_hash[value] = by_hash.get(value, 0) + size
    total, val_size = sum(by_hash.values()), 0.0
    best = Choice(0, val_fraction)
    miss = math.inf
    # Never the last one: train keeps at least one document.
    for value, above in pairwise(sorted(by_hash)):
        val_size += by_hash[value]
        if abs(val_size / total - val_fraction) < miss:
            miss = abs(val_size / total - val_fraction)
            best = Choice(above, miss)
    return best


class Passages:
    """Hashes and sizes of the passages of all documents, for several sizes of passages at once, and whole."""

    def __init__(self, val_fraction: float, num_text_bytes: int) -> None:
        largest = min(int(val_fraction * num_text_bytes / _PASSAGES_WANTED), MAX_DOCUMENT_BYTES // 2)
        sizes = [largest >> times for times in range(8) if largest >> times >= _MIN_PASSAGE_BYTES]
        self._fraction = val_fraction
        self._levels = {size: (array("Q"), array("d")) for size in [0, *(sizes or [_MIN_PASSAGE_BYTES])]}

    @staticmethod
    def can_hold(num_documents: int) -> bool:
        return num_documents <= _MAX_EXACT

    def add(self, document: bytes, num_tokens: int) -> None:
        """`num_tokens` of the document are shared out among its passages by their bytes."""
        for passage_bytes, (hashes, sizes) in self._levels.items():
            for part in cut(document, passage_bytes) if passage_bytes else (document,):
                hashes.append(document_hash(part))
                sizes.append(num_tokens * len(part) / len(document))

    def best_rule(self) -> SplitRule:
        """The one with the longest passages that is near enough, whole documents first; else the nearest."""
        nearest, miss = SplitRule(0), math.inf
        for passage_bytes, (hashes, sizes) in self._levels.items():
            choice = choose(self._fraction, hashes, sizes)
            if choice.threshold and choice.miss < miss:
                nearest, miss = SplitRule(choice.threshold, passage_bytes), choice.miss
                if choice.is_near(self._fraction):
                    break
        return nearest
