"""Keys written into a run file, and nothing else of it changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from homing.config.parse.edit import write_keys
from homing.config.parse.source import read_source


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("name: a\n", "name: a\n\ndata:\n  take: 2MB\n"),
        ("data:\n  text: [a.txt]  # mine\n", "data:\n  take: 2MB\n  text: [a.txt]  # mine\n"),
        ("data:\n  take: 5GB   # much\n  text: [a]\n", "data:\n  take: 2MB   # much\n  text: [a]\n"),
        ("data: {text: [a.txt]}  # mine\n", "data: {take: 2MB, text: [a.txt]}  # mine\n"),
        ("data: {take: 5GB, text: [a]}\n", "data: {take: 2MB, text: [a]}\n"),
        ("data:\nname: a\n", "data: {take: 2MB}\nname: a\n"),
        ("data: {}\nname: a\n", "data: {take: 2MB}\nname: a\n"),
        ("data:\n  take:\nname: a\n", "data:\n  take: 2MB\nname: a\n"),
        ("data:\n  take: >\n    5GB\nname: a\n", "data:\n  take: 2MBname: a\n"),
    ],
)
def test_a_key_is_written_where_it_belongs(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(before)
    problem = write_keys(path, {"data.take": "2MB"})
    if "2MBname" in after:  # what would not be read back is not written
        assert problem == "the file cannot be edited safely"
        after = before
    else:
        assert problem == ""
    assert path.read_text() == after
    assert not list(tmp_path.glob(".*")), "no other file is left"


@pytest.mark.parametrize("dashes", ["  - a.txt\n  - b.txt", "    - a.txt\n    - b.txt"])
def test_a_list_on_lines_of_its_own_is_replaced_and_comments_behind_it_stay(tmp_path: Path, dashes: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"data:\n  text:\n{dashes}\n  # the end\nmodel:\n  depth: 4\n")
    assert write_keys(path, {"data.text": '["c.txt"]'}) == ""
    assert path.read_text() == 'data:\n  text: ["c.txt"]\n  # the end\nmodel:\n  depth: 4\n'


def test_json_is_written_again_and_toml_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"data": {"text": ["a"]}}')
    assert write_keys(tmp_path / "a.json", {"tokenizer.vocab_size": "500", "data.take": "2MB"}) == ""
    wanted = {"data": {"text": ["a"], "take": "2MB"}, "tokenizer": {"vocab_size": 500}}
    assert json.loads((tmp_path / "a.json").read_text()) == wanted
    (tmp_path / "a.toml").write_text("name = 'a'\n")
    assert write_keys(tmp_path / "a.toml", {"data.take": "2MB"}) == "homing does not write TOML"
    assert read_source(tmp_path / "a.toml").data == {"name": "a"}


def test_a_file_with_anchors_is_left_as_it_is_where_a_change_would_break_it(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data:\n  take: &much 5GB\ntokenizer:\n  sample: *much\n")
    assert "cannot be edited safely" in write_keys(path, {"data.take": "2MB"})
    assert path.read_text() == "data:\n  take: &much 5GB\ntokenizer:\n  sample: *much\n"
