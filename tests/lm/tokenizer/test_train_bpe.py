"""Merges against an independent reference, written as slowly and plainly as possible."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import regex

from homing.lm.tokenizer.train_bpe import learn_merges, replay_merges
from homing.lm.tokenizer.write_files import pattern_named

TEXT = (
    """The cat sat on the mat. The cat's hat is flat; that's that!
Der Kater saß auf der Matte, 12345 Mäuse lachten.  naïve café
    def f(x):\n        return x + 1\n\n"""
    * 3
)


def reference_merges(documents: list[str], num_merges: int, split: str) -> list[tuple[bytes, bytes]]:
    """Count all pairs again for every merge; most frequent first, lowest ids among equals."""
    words: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        words.update(tuple(word.encode()) for word in regex.findall(pattern_named(split), document))
    tokens = {number: bytes([number]) for number in range(256)}
    merges = []
    while len(merges) < num_merges:
        pairs: Counter[tuple[int, int]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        new = len(tokens)
        tokens[new] = tokens[best[0]] + tokens[best[1]]
        merges.append((tokens[best[0]], tokens[best[1]]))
        merged: Counter[tuple[int, ...]] = Counter()
        for word, count in words.items():
            merged[_merge(word, best, new)] += count
        words = merged
    return merges


def _merge(word: tuple[int, ...], pair: tuple[int, int], new: int) -> tuple[int, ...]:
    out: list[int] = []
    at = 0
    while at < len(word):
        if word[at : at + 2] == pair:
            out.append(new)
            at += 2
        else:
            out.append(word[at])
            at += 1
    return tuple(out)


@pytest.mark.parametrize("split", ["gpt4", "gpt2"])
def test_merges_equal_the_reference(split: str) -> None:
    documents = TEXT.split("\n")
    learned = learn_merges([d.encode() for d in documents], num_merges=120, split=split)
    assert learned == reference_merges(documents, 120, split)


def test_little_text_gives_fewer_merges_than_asked_for() -> None:
    assert learn_merges([b"abab abab"], num_merges=50, split="gpt4") == reference_merges(["abab abab"], 50, "gpt4")


def test_no_merges_still_reads_the_text() -> None:
    documents = iter([b"a", b"b"])
    assert learn_merges(documents, num_merges=0, split="gpt4") == []
    assert next(documents, None) is None


def test_a_token_made_twice_is_kept_once() -> None:
    tokens = [b"ab", b"bc", b"abc", b"abc", b"", b"xyz", b"abcd"]
    assert replay_merges(tokens, 10) == [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"abc", b"d")]


def test_runs_of_white_space_do_not_end_the_trainer() -> None:
    documents = [b" " * 900_000 + b"x", b"\n" * 300_000 + b"\t" * 300_000 + b"y"]
    assert learn_merges(documents, num_merges=10, split="gpt4")
