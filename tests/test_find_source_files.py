"""What a person names, as files in one fixed order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from homing.errors import DataError
from homing.find_source_files import find_sources


@pytest.mark.acceptance(30)
def test_globs_folders_and_paths_give_each_file_once_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.md", "sub/d.jsonl.zst", "e.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_sources([f"{tmp_path}/*.html", str(tmp_path), str(tmp_path / "a.txt")], key="text")
    assert [Path(s.path).name for s in found.sources] == ["e.html", "a.txt", "b.txt", "c.md", "d.jsonl.zst"]
    assert [(s.form, s.packing) for s in found.sources][-1] == ("jsonl", "zstd")
    assert "1 .html" in found.warnings[0]


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("gone.txt", "does not exist"),
        ("gone*.txt", "no file matches"),
        ("empty.txt", "is empty"),
        ("images", "has no text files"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, pattern: str, complaint: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match=complaint):
        find_sources([str(tmp_path / pattern)], key="text")


def test_a_broken_symlink_is_reported_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("gone.txt")
    with pytest.raises(DataError, match=r"a\.txt is a broken link") as raised:
        find_sources([str(tmp_path)], key="text")
    assert "gone.txt" in raised.value.why


def test_every_empty_file_of_a_folder_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "full.txt").write_text("words")
    for name in "abcdefg":
        (tmp_path / f"{name}.txt").touch()
    with pytest.raises(DataError, match=r"text: 7 files are empty\.") as caught:
        find_sources([str(tmp_path)], key="text")
    assert f"{tmp_path}/a.txt, {tmp_path}/b.txt" in caught.value.why
    assert caught.value.why.endswith(f"{tmp_path}/e.txt and 2 more have 0 bytes.")


def test_a_name_that_is_no_utf_8_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/l\xfc.txt")
    Path(odd).write_text("words")
    for named in (odd, str(tmp_path)):
        with pytest.raises(DataError, match="is not UTF-8") as caught:
            find_sources([named], key="text")
        assert r"l\udcfc.txt" in caught.value.what, "and can itself be printed"


def test_a_misspelt_path_is_answered_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "goethe.txt").write_text("x")
    with pytest.raises(DataError) as caught:
        find_sources([str(tmp_path / "goehte.txt")], key="text")
    assert "goethe.txt" in caught.value.why
