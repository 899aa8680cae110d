"""Rows of conversations: whole, apart, nearly full, the same every time, and any of them at once."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from homing.errors import DataError, IntegrityError
from homing.lm.data.shards.pack_chats import IGNORED, Mixture, PackedConversations, open_conversations
from homing.lm.data.shards.read_shards import file_sha256
from homing.wire.shard_manifest import DataManifest, Shard, Split

T = 64


def write(folder: Path, lengths: list[int], *, num_shards: int = 2, seed: int = 1) -> DataManifest:
    """Conversation i is made of ids i+1 alone, so that ids read back identify their conversation."""
    folder.mkdir(parents=True, exist_ok=True)
    chance, shards = np.random.default_rng(seed), []
    for number, part in enumerate(np.array_split(np.arange(len(lengths)), num_shards)):
        sizes = [lengths[i] for i in part]
        ids = np.concatenate([np.full(lengths[i], i + 1, dtype="<u2") for i in part])
        mask = chance.integers(0, 2, len(ids), dtype=np.uint8)
        ids.tofile(folder / f"train-{number:05d}.bin")
        mask.tofile(folder / f"train-{number:05d}.mask")
        np.cumsum([0, *sizes]).astype("<u8").tofile(folder / f"train-{number:05d}.idx")
        names = [f"train-{number:05d}.{ending}" for ending in ("bin", "idx", "mask")]
        hashes = [file_sha256(folder / name) for name in names]
        shards.append(
            Shard(names[0], names[1], len(ids), len(part), 2 * len(ids), hashes[0], hashes[1], names[2], hashes[2])
        )
    split = Split(sum(s.num_tokens for s in shards), len(lengths), 0, shards)
    return DataManifest("uint16", 60_000, "", [], {"train": split}, [], "")


def packed(
    folder: Path, lengths: list[int], *, copies: list[float] | None = None, **kwargs: int
) -> PackedConversations:
    split = open_conversations(folder, write(folder, lengths), "train")
    counts = [len(part) for part in np.array_split(np.arange(len(lengths)), len(copies or [1.0]))]
    settings = {"context": T, "seed": 7, **kwargs}
    return PackedConversations(split, Mixture(counts, copies or [1.0]), **settings)


def rows_of(packed: PackedConversations, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    ids, targets, segments = (np.empty((count, packed.context), dtype=np.int32) for _ in range(3))
    return ids, targets, segments, packed.read_into(first, ids, targets, segments)


def some_lengths(count: int, seed: int = 3, longest: int = T + 1) -> list[int]:
    return np.random.default_rng(seed).integers(2, longest + 1, count).tolist()


def test_every_conversation_comes_once_an_epoch_whole_and_by_itself(tmp_path: Path) -> None:
    lengths = some_lengths(300)
    stream = packed(tmp_path, lengths)
    found = []
    for row in range(stream.num_rows()):
        ids, targets, segments, num_targets = rows_of(stream, row, 1)
        assert num_targets == (targets != IGNORED).sum()
        for segment in range(segments.max() + 1):
            here = segments[0] == segment
            (number,) = set(ids[0][here].tolist())
            assert here.sum() == lengths[number - 1] - 1
            _, mask = stream.split.read(number - 1)
            wanted = np.where(mask[1:] != 0, number, IGNORED)
            assert targets[0][here].tolist() == wanted.tolist()
            found.append(number)
        padding = segments[0] == -1
        assert (targets[0][padding] == IGNORED).all()
    assert sorted(found) == list(range(1, 301))


def test_a_row_does_not_depend_on_how_it_is_asked_for(tmp_path: Path) -> None:
    stream = packed(tmp_path, some_lengths(120))
    many = rows_of(stream, 0, 3 * stream.num_rows())
    again = PackedConversations(stream.split, Mixture([120], [1.0]), context=T, seed=7)
    for row in reversed(range(3 * stream.num_rows())):
        for whole, one in zip(many[:3], rows_of(again, row, 1)[:3], strict=True):
            assert whole[row].tolist() == one[0].tolist()


def test_epochs_and_seeds_differ_in_order_and_company_not_in_content(tmp_path: Path) -> None:
    stream = packed(tmp_path, some_lengths(120))
    other = PackedConversations(stream.split, Mixture([120], [1.0]), context=T, seed=8)
    num = stream.num_rows()
    first, second = [[sorted(stream.conversations_in(e * num + row)) for row in range(num)] for e in (0, 1)]
    third = [sorted(other.conversations_in(row)) for row in range(num)]
    assert first != second != third
    assert sorted(first) != sorted(second)  # not the same rows in another order
    assert sorted(chain(*first)) == sorted(chain(*second)) == sorted(chain(*third))


@pytest.mark.parametrize(("mean", "context"), [(150, 1024), (500, 2048), (900, 2048)])
def test_padding_is_under_two_percent_on_lengths_as_chats_have_them(tmp_path: Path, mean: int, context: int) -> None:
    lengths = np.random.default_rng(5).lognormal(np.log(mean), 0.7, 3000).astype(int).clip(8, context + 1).tolist()
    stream = packed(tmp_path, lengths, context=context)
    used = sum(length - 1 for length in lengths)
    assert 1 - used / (stream.num_rows() * context) < 0.02


@pytest.mark.acceptance(32)
def test_sources_come_as_often_as_the_mixture_says(tmp_path: Path) -> None:
    lengths = some_lengths(100, longest=20)
    stream = packed(tmp_path, lengths, copies=[2.0, 0.5])
    counts = np.zeros(100, dtype=int)
    row = 0
    for epoch in range(4):
        before = counts.copy()
        for _ in range(stream.num_rows(epoch)):
            for number in stream.conversations_in(row):
                counts[number] += 1
            row += 1
        assert ((counts - before)[:50] == 2).all()
        assert (counts - before)[50:].sum() == 25
    assert (counts[50:] == 2).all()  # each came equally often, though never in every epoch
    assert stream.locate(row)[0] == 4


def test_a_shorter_context_than_the_shards_were_made_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="exceeds the context"):
        packed(tmp_path, [10, T + 2])


@pytest.mark.acceptance(21)
def test_a_missing_short_or_changed_mask_is_refused(tmp_path: Path) -> None:
    manifest = write(tmp_path, [5, 6, 7, 8])
    path = tmp_path / "train-00000.mask"
    good = path.read_bytes()
    path.write_bytes(bytes(byte ^ 1 for byte in good))
    with pytest.raises(IntegrityError, match="damaged"):
        open_conversations(tmp_path, manifest, "train", checks_hashes=True)
    for broken in (good[:-1], None):
        path.write_bytes(broken) if broken is not None else path.unlink()
        with pytest.raises(DataError, match="Cannot use the conversations"):
            open_conversations(tmp_path, manifest, "train")


def test_a_hundred_thousand_conversations_are_packed_within_seconds(tmp_path: Path) -> None:
    import time

    lengths = np.random.default_rng(5).lognormal(5, 0.7, 100_000).astype(int).clip(8, 2049).tolist()
    stream = packed(tmp_path, lengths, context=2048)
    began = time.perf_counter()
    stream.num_rows()
    assert time.perf_counter() - began < 10
