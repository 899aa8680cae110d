"""Shards: what wire/shard_manifest.py says, whatever the batches, and the same bytes after a kill."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from homing.lm.data.shards.write_shards import ShardWriter, dtype_for
from homing.wire.shard_manifest import Split

DOCUMENTS = [list(range(1, 1 + n % 7)) for n in range(1, 60)]


def write(folder: Path, sizes: list[int], shard_tokens: int, dtype: str = "uint16") -> Split:
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, "train", dtype=dtype, end_of_text_id=0, shard_tokens=shard_tokens)
    at = 0
    for size in sizes:
        append(writer, DOCUMENTS[at : at + size])
        at += size
    append(writer, DOCUMENTS[at:])
    return writer.finish()


def append(writer: ShardWriter, documents: list[list[int]]) -> None:
    ids = np.array([token for document in documents for token in document], dtype=np.uint32)
    starts = np.cumsum([0, *map(len, documents)])
    writer.append(ids, starts, num_text_bytes=3 * len(documents))


def read(folder: Path, split: Split, dtype: str = "uint16") -> list[list[int]]:
    out = []
    for shard in split.shards:
        tokens = np.fromfile(folder / shard.name, dtype=np.dtype(dtype).newbyteorder("<"))
        index = np.fromfile(folder / shard.index_name, dtype="<u8")
        assert len(tokens) == shard.num_tokens == index[-1]
        assert len(index) == shard.num_documents + 1
        assert hashlib.sha256((folder / shard.name).read_bytes()).hexdigest() == shard.sha256
        assert hashlib.sha256((folder / shard.index_name).read_bytes()).hexdigest() == shard.index_sha256
        out += [tokens[a:b].tolist() for a, b in pairwise(index)]
    return out


@pytest.mark.parametrize("shard_tokens", [1, 10, 37, 10_000])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_documents_come_back_with_end_of_text_before_each(tmp_path: Path, shard_tokens: int, dtype: str) -> None:
    split = write(tmp_path, [20], shard_tokens, dtype)
    assert read(tmp_path, split, dtype) == [[0, *document] for document in DOCUMENTS]
    assert split.num_tokens == sum(len(d) + 1 for d in DOCUMENTS)
    assert split.num_text_bytes == 3 * len(DOCUMENTS)
    assert all(shard.num_tokens >= shard_tokens for shard in split.shards[:-1])


def test_shards_do_not_depend_on_the_batches(tmp_path: Path) -> None:
    splits = [write(tmp_path / str(n), sizes, 37) for n, sizes in enumerate([[], [1, 1, 1], [30], [7] * 8])]
    assert all(split == splits[0] for split in splits)


@pytest.mark.parametrize("shard_tokens", [10, 37, 10_000])
@pytest.mark.parametrize("marked_at", [0, 1, 13, 40])
def test_a_writer_goes_on_from_a_mark_with_the_same_bytes(tmp_path: Path, shard_tokens: int, marked_at: int) -> None:
    whole = write(tmp_path / "whole", [], shard_tokens)
    folder = tmp_path / "killed"
    folder.mkdir()

    def writer(state: object) -> ShardWriter:
        return ShardWriter(folder, "train", dtype="uint16", end_of_text_id=0, shard_tokens=shard_tokens, state=state)

    first = writer(None)
    append(first, DOCUMENTS[:marked_at])
    mark = first.mark()
    append(first, DOCUMENTS[marked_at : marked_at + 15])  # written, then lost with the process
    first.abandon()
    second = writer(mark)
    append(second, DOCUMENTS[marked_at:])
    assert second.finish() == whole
    for shard in whole.shards:
        assert (folder / shard.name).read_bytes() == (tmp_path / "whole" / shard.name).read_bytes()


def test_nothing_gives_no_shard(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "val", dtype="uint16", end_of_text_id=0, shard_tokens=10)
    assert writer.finish() == Split(0, 0, 0, [])
    assert list(tmp_path.iterdir()) == []


def test_the_vocabulary_chooses_the_width() -> None:
    assert [dtype_for(size) for size in (300, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]
