"""Train or val by the hash of a document."""

from __future__ import annotations

import pytest

from homing.lm.data.text.split import SmallCorpus, choose, document_hash


def choose_threshold(fraction: float, corpus: SmallCorpus) -> int:
    return choose(fraction, corpus.hashes, corpus.sizes).threshold


def corpus_of(documents: list[bytes], fraction: float) -> SmallCorpus:
    corpus = SmallCorpus(fraction)
    for document in documents:
        corpus.add(document)
    return corpus


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.2, 0.5])
def test_few_documents_come_near_the_fraction_and_leave_no_side_empty(fraction: float) -> None:
    documents = [f"document {n} ".encode() * 100 for n in range(130)]
    threshold = choose_threshold(fraction, corpus_of(documents, fraction))
    val = [document for document in documents if document_hash(document) < threshold]
    assert 1 <= len(val) < len(documents)
    assert abs(len(val) / len(documents) - fraction) <= 1 / len(documents)


def test_two_documents_give_one_to_each_side_and_one_gives_none_to_val() -> None:
    two = [b"a", b"b"]
    threshold = choose_threshold(0.01, corpus_of(two, 0.01))
    assert sorted(document_hash(d) < threshold for d in two) == [False, True]
    assert choose_threshold(0.5, corpus_of([b"a"], 0.5)) == 0
    assert choose_threshold(0.5, corpus_of([b"a", b"a"], 0.5)) == 0


def test_the_order_of_documents_does_not_matter() -> None:
    documents = [str(n).encode() for n in range(500)]
    forward = choose_threshold(0.1, corpus_of(documents, 0.1))
    assert forward == choose_threshold(0.1, corpus_of(documents[::-1], 0.1))


def test_many_documents_are_not_remembered() -> None:
    corpus = corpus_of([str(n).encode() for n in range(5000)], 0.05)
    assert not corpus.is_small
    assert len(corpus.hashes) == 0
