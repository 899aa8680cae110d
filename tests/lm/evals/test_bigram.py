"""The bigram baseline: right on a chain with a known entropy, and always finite."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tiny import VOCAB_SIZE, write_byte_tokenizer, write_manifest, write_shards

from homing.errors import DataError
from homing.lm.data.shards.read_shards import open_split
from homing.lm.evals import bits_per_byte
from homing.lm.evals.bits_per_byte import bigram_entropy


def write_data(folder: Path, train: list[list[int]], val: list[list[int]], *, num_shards: int = 1) -> Path:
    write_byte_tokenizer(folder)
    splits = {
        "train": write_shards(folder, "train", train, num_shards=num_shards),
        "val": write_shards(folder, "val", val),
    }
    write_manifest(folder, splits)
    return folder


def chain(length: int, seed: int) -> list[int]:
    """From each of four letters, one follower with probability 3/4 and another with 1/4."""
    random, token, out = np.random.default_rng(seed), 0, []
    for _ in range(length):
        token = (token + (1 if random.random() < 0.75 else 2)) % 4
        out.append(100 + token)
    return out


def test_it_finds_the_entropy_of_a_known_chain(tmp_path: Path) -> None:
    write_data(tmp_path, [chain(60_000, 1)], [chain(30_000, 2)])
    got = bigram_entropy(tmp_path)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert got.nats == pytest.approx(entropy, abs=0.01)
    assert got.bits_per_byte == pytest.approx(entropy / math.log(2), abs=0.015)
    assert got.num_tokens == 29_999


def test_counting_in_chunks_loses_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [chain(n, n) for n in range(5, 60)]
    whole = bigram_entropy(write_data(tmp_path / "a", documents, documents[:9]))
    monkeypatch.setattr(bits_per_byte, "_CHUNK_TOKENS", 7)
    chunks = bigram_entropy(write_data(tmp_path / "b", documents, documents[:9], num_shards=6))
    assert chunks == whole


def test_what_train_never_saw_is_improbable_and_not_impossible(tmp_path: Path) -> None:
    write_data(tmp_path, [chain(500, 1)], [[0, 250, 251, 252]])
    assert math.log(VOCAB_SIZE) - 1 < bigram_entropy(tmp_path).nats < 20


def test_counts_match_a_plain_loop(tmp_path: Path) -> None:
    write_data(tmp_path, [[0, 100, 101, 100, 101, 100, 102]], [[0, 100, 101]])
    manifest = bits_per_byte.read_manifest(tmp_path)
    nats = bits_per_byte.bigram_nats(open_split(tmp_path, manifest, "train"), np.array([0, 100, 101]), VOCAB_SIZE)
    unigram = {token: (count + 1) / (6 + VOCAB_SIZE) for token, count in ((100, 3), (101, 2))}
    tried = [
        [-math.log((1 + k * unigram[100]) / (1 + k)), -math.log((2 + k * unigram[101]) / (3 + k))]
        for k in bits_per_byte._PRIOR_WEIGHTS
    ]
    assert nats.tolist() == pytest.approx(min(tried, key=sum))


def test_a_val_split_of_one_token_cannot_be_measured_on(tmp_path: Path) -> None:
    write_data(tmp_path, [[0, 1]], [[0]])
    with pytest.raises(DataError, match="too small"):
        bigram_entropy(tmp_path)
