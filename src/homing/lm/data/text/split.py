"""Assigns documents to train or val by hash, so that the same document is always in the same split.

    hash(document) < threshold  ->  val

Hashing is better than holding out the end of a file: the end may not be representative, and identical documents must
never be in both splits. With very many documents, the threshold is the requested fraction of the hash space. With few,
it is adjusted so that the size of val is as close as possible to the fraction, which also keeps both splits from being
empty. If the documents are too long for that, each is cut at paragraph breaks into passages, and each passage is
assigned by its own hash. Adjacent passages in the same split are kept together as one document.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from homing.lm.data.text.documents import MAX_DOCUMENT_BYTES, cut

__all__ = ["HASH_SPACE", "Choice", "Passages", "SmallCorpus", "SplitRule", "choose", "document_hash"]

HASH_SPACE = 2**64
_MAX_EXACT = 200_000
_END_BYTES = 1024
# A val split is close enough if its fraction differs from the requested one by no more than this, and by no more than a
# quarter of the requested fraction.
_NEAR_ENOUGH = 0.005
# Several passages make a more representative val split than one, but very short passages are of little use.
_PASSAGES_WANTED, _MIN_PASSAGE_BYTES = 8, 256


def document_hash(document: bytes) -> int:
    """Return a hash of the length, the beginning and the end of a document.

    Equal documents have equal hashes, and hashing a long document takes no longer than hashing a short one.
    """
    ends = document if len(document) <= 2 * _END_BYTES else document[:_END_BYTES] + document[-_END_BYTES:]
    return int.from_bytes(hashlib.sha256(b"%d " % len(document) + ends).digest()[:8], "big")


@dataclass(frozen=True)
class SplitRule:
    threshold: int  # documents with a hash below this go to val
    passage_bytes: int = 0  # documents are cut into passages of 1 to 2 times this size; 0 keeps them whole

    def parts_of(self, document: bytes) -> Iterator[tuple[bytes, bool]]:
        """Cut a document into passages, join adjacent ones in the same split, and yield (text, is it in val?)."""
        sided = [(part, document_hash(part) < self.threshold) for part in cut(document, self.passage_bytes)]
        for is_val, parts in groupby(sided, key=lambda one: one[1]):
            yield b"".join(part for part, _ in parts), is_val


class SmallCorpus:
    """Collects the hash and size of every document, but discards them once there are more than `max_documents`."""

    def __init__(self, val_fraction: float) -> None:
        # With forty expected val documents, the chance of an empty val split is below 1e-17.
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
    threshold: int  # 0 if nothing can be held out
    miss: float  # difference between the actual and the requested fraction of val

    def is_near(self, val_fraction: float) -> bool:
        return self.miss <= min(_NEAR_ENOUGH, val_fraction / 4)


def choose(val_fraction: float, hashes: array[int], sizes: array[int] | array[float]) -> Choice:
    """Return the threshold that brings val closest to the requested fraction without leaving either split empty."""
    by_hash: dict[int, float] = {}
    for value, size in zip(hashes, sizes, strict=True):
        by_hash[value] = by_hash.get(value, 0) + size
    total, val_size = sum(by_hash.values()), 0.0
    best = Choice(0, val_fraction)
    miss = math.inf
    # Never put the document with the largest hash into val, so that train keeps at least one document.
    for value, above in pairwise(sorted(by_hash)):
        val_size += by_hash[value]
        if abs(val_size / total - val_fraction) < miss:
            miss = abs(val_size / total - val_fraction)
            best = Choice(above, miss)
    return best


class Passages:
    """Collects hashes and sizes of whole documents, and of their passages for each of several passage sizes."""

    def __init__(self, val_fraction: float, num_text_bytes: int) -> None:
        largest = min(int(val_fraction * num_text_bytes / _PASSAGES_WANTED), MAX_DOCUMENT_BYTES // 2)
        sizes = [largest >> times for times in range(8) if largest >> times >= _MIN_PASSAGE_BYTES]
        self._fraction = val_fraction
        self._levels = {size: (array("Q"), array("d")) for size in [0, *(sizes or [_MIN_PASSAGE_BYTES])]}

    @staticmethod
    def can_hold(num_documents: int) -> bool:
        return num_documents <= _MAX_EXACT

    def add(self, document: bytes, num_tokens: int) -> None:
        """Add a document. Its `num_tokens` are divided among its passages in proportion to their bytes."""
        for passage_bytes, (hashes, sizes) in self._levels.items():
            for part in cut(document, passage_bytes) if passage_bytes else (document,):
                hashes.append(document_hash(part))
                sizes.append(num_tokens * len(part) / len(document))

    def best_rule(self) -> SplitRule:
        """Try whole documents, then shorter and shorter passages; return the first rule with an acceptable val split.

        If no rule brings val close enough to the requested fraction, return the rule that comes closest.
        """
        nearest, miss = SplitRule(0), math.inf
        for passage_bytes, (hashes, sizes) in self._levels.items():
            choice = choose(self._fraction, hashes, sizes)
            if choice.threshold and choice.miss < miss:
                nearest, miss = SplitRule(choice.threshold, passage_bytes), choice.miss
                if choice.is_near(self._fraction):
                    break
        return nearest
