"""Packing: rows tile one endless stream that is a pure function of (seed, epoch)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_manifest, write_shards

from homing.lm.data.shards.pack_text import PackedStream, permutation
from homing.lm.data.shards.read_shards import open_split

DOCUMENTS = st.lists(st.lists(st.integers(0, 60000), max_size=9), min_size=1, max_size=12).filter(any)


def stream_of(documents: list[list[int]], *, num_shards: int = 1, seed: int = 3, dtype: str = "uint16") -> PackedStream:
    with tempfile.TemporaryDirectory() as folder:
        split = write_shards(Path(folder), "train", documents, num_shards=num_shards, dtype=dtype)
        manifest = write_manifest(Path(folder), {"train": split}, dtype=dtype)
        return PackedStream(open_split(Path(folder), manifest, "train"), seed=seed)


def naive_stream(documents: list[list[int]], seed: int, num_epochs: int) -> list[int]:
    out: list[int] = []
    for epoch in range(num_epochs):
        for number in permutation(len(documents), seed, epoch):
            out += documents[number]
    return out


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(DOCUMENTS, st.integers(1, 5), st.integers(0, 2**63), st.data())
def test_any_stretch_equals_the_naive_concatenation(
    documents: list[list[int]], num_shards: int, seed: int, data: st.DataObject
) -> None:
    stream = stream_of(documents, num_shards=num_shards, seed=seed)
    whole = naive_stream(documents, seed, 4)
    start = data.draw(st.integers(0, len(whole) - 1))
    count = data.draw(st.integers(0, len(whole) - start))
    assert stream.read(start, count).tolist() == whole[start : start + count]


@settings(deadline=None, max_examples=80)
@given(DOCUMENTS, st.integers(1, 7), st.integers(1, 6))
def test_rows_tile_the_stream_and_targets_are_the_inputs_one_later(
    documents: list[list[int]], context: int, num_rows: int
) -> None:
    stream = stream_of(documents, num_shards=2)
    whole = naive_stream(documents, 3, 2 + (num_rows * context + 1) // stream.epoch_tokens)
    for row in range(num_rows):
        stretch = stream.rows(row, 1, context)
        assert stretch[:-1].tolist() == whole[row * context : (row + 1) * context]
        assert stretch[1:].tolist() == whole[row * context + 1 : (row + 1) * context + 1]


def test_a_batch_is_the_same_whatever_the_micro_batch() -> None:
    stream = stream_of([[n, n + 1, n + 2] for n in range(40)], num_shards=3)
    whole = stream.rows(5, 8, 4)
    for micro in (1, 2, 3, 8):
        chunks = [stream.rows(5 + at, min(micro, 8 - at), 4)[:-1] for at in range(0, 8, micro)]
        assert np.concatenate(chunks).tolist() == whole[:-1].tolist()


def test_each_epoch_holds_every_token_once_in_an_order_of_its_own() -> None:
    documents = [[n] * (1 + n % 3) for n in range(50)]
    stream = stream_of(documents, num_shards=4)
    epochs = [stream.read(number * stream.epoch_tokens, stream.epoch_tokens).tolist() for number in range(3)]
    assert all(sorted(epoch) == sorted(token for document in documents for token in document) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_reading_far_ahead_and_back_again_gives_the_same_tokens() -> None:
    stream = stream_of([[n, n, n] for n in range(30)], num_shards=2)
    early = stream.read(7, 50).tolist()
    stream.read(1000 * stream.epoch_tokens - 5, 20)
    assert stream.read(7, 50).tolist() == early
    assert len(stream._epochs) <= 2


def test_ids_past_sixteen_bits_survive() -> None:
    stream = stream_of([[70000, 1, 2**31 - 1]], dtype="uint32")
    assert sorted(stream.read(0, 3).tolist()) == [1, 70000, 2**31 - 1]


def test_the_permutation_is_the_one_written_down() -> None:
    """Another numpy, another machine: the same order, or a resumed run would see other batches."""
    assert permutation(8, 7, 0).tolist() == PINNED_0
    assert permutation(8, 7, 1).tolist() == PINNED_1


PINNED_0 = [4, 1, 6, 3, 2, 7, 5, 0]
PINNED_1 = [3, 1, 6, 2, 5, 4, 0, 7]


def test_a_split_without_tokens_is_our_own_mistake_to_pack(tmp_path: Path) -> None:
    stream = stream_of([[1]])
    empty = type(stream.split)("train", [], np.zeros(1, np.int64), np.zeros(1, np.int64))
    with pytest.raises(AssertionError):
        PackedStream(empty, seed=0)
