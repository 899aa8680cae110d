"""Reading shards: mapped, checked against the manifest, every wrong file named at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny import make_data, write_manifest, write_shards

from homing.errors import DataError, IntegrityError
from homing.lm.data.shards.read_shards import open_split, read_manifest


def test_documents_come_back_as_they_were_written(tmp_path: Path) -> None:
    documents = [[0, 5, 6], [0], [0, 9, 9, 9], [0, 1]]
    manifest = write_manifest(tmp_path, {"train": write_shards(tmp_path, "train", documents, num_shards=3)})
    split = open_split(tmp_path, manifest, "train", checks_hashes=True)
    assert [document.tolist() for document in split.documents()] == documents
    assert (split.num_documents, split.num_tokens) == (4, 10)


def test_every_missing_empty_or_short_file_is_in_one_error(tmp_path: Path) -> None:
    manifest = make_data(tmp_path, num_shards=3)
    (tmp_path / "train-00000.bin").unlink()
    (tmp_path / "train-00001.bin").write_bytes(b"")
    os.truncate(tmp_path / "train-00002.idx", 8)
    with pytest.raises(DataError) as caught:
        open_split(tmp_path, manifest, "train")
    assert "3 files are damaged or missing" in caught.value.what
    assert "train-00000.bin: missing" in caught.value.why
    assert "train-00001.bin: empty" in caught.value.why
    assert "train-00002.idx: 8 bytes" in caught.value.why


def test_a_flipped_byte_is_found_when_hashes_are_checked(tmp_path: Path) -> None:
    manifest = make_data(tmp_path)
    shard = tmp_path / "val-00000.bin"
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    open_split(tmp_path, manifest, "val")
    with pytest.raises(IntegrityError, match="Cannot use the data"):
        open_split(tmp_path, manifest, "val", checks_hashes=True)


def test_an_index_that_does_not_cover_its_shard_is_refused(tmp_path: Path) -> None:
    manifest = make_data(tmp_path)
    index = tmp_path / "val-00000.idx"
    index.write_bytes(index.read_bytes()[8:] + b"\0" * 8)
    with pytest.raises(DataError, match="1 file is damaged or missing"):
        open_split(tmp_path, manifest, "val")


def test_a_missing_split_names_those_that_are_there(tmp_path: Path) -> None:
    manifest = make_data(tmp_path)
    with pytest.raises(DataError, match="no split 'test'") as caught:
        open_split(tmp_path, manifest, "test")
    assert "train, val" in caught.value.why


def test_a_split_without_a_token_is_refused(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"val": write_shards(tmp_path, "val", [])})
    with pytest.raises(DataError) as caught:
        open_split(tmp_path, manifest, "val")
    assert "no tokens" in caught.value.why


def test_unprepared_data_says_which_command_prepares_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_manifest(tmp_path)
    assert "homing prep" in caught.value.fix


def test_a_manifest_that_is_no_json_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        read_manifest(tmp_path)
