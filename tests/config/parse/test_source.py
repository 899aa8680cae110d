from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from homing.config.parse.source import json_lines, read_source, toml_lines, yaml_value
from homing.errors import Mistake, RunFileError, UsageError

Mistakes = Callable[..., list[Mistake]]


def read(text: str | bytes, name: str = "x.yaml") -> object:
    path = Path("runs") / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_source(path)


@pytest.mark.parametrize(
    ("typed", "value"),
    [("3e-4", 3e-4), ("12", 12), ("012", 12), ("0x10", 16), ("true", True), ("on", "on"), ("no", "no"), ("$12", "$12"),
     ("[a, 2]", ["a", 2]), ("~", None), ("", None), ("1_000", 1000), ("2B", "2B"), ("'7'", "7"), ("30m", "30m"),
     ("2026-01-01", "2026-01-01")],
)  # fmt: skip
def test_a_value_is_read_as_yaml_1_2_reads_it(typed: str, value: object) -> None:
    assert yaml_value(typed) == value
    assert type(yaml_value(typed)) is type(value)


def test_every_key_knows_its_line() -> None:
    source = read("name: a\n\nmodel:\n  # why\n  width: 64\nphases:\n  - steps: 1\n    eval:\n      every: 2\n")
    assert source.lines[("model", "width")] == 5  # type: ignore[attr-defined]
    assert source.lines[("phases", 0, "eval", "every")] == 9  # type: ignore[attr-defined]


def test_toml_keys_know_their_lines() -> None:
    text = 'name = "a"\n[model]\nwidth = 64\n[[phases]]\nsteps = 1\n[phases.eval]\nevery = 2\n[[phases]]\nsteps = 3\n'
    lines = toml_lines(text)
    assert lines[("model", "width")] == 3
    assert lines[("phases", 0, "eval", "every")] == 7
    assert lines[("phases", 1, "steps")] == 9


def test_json_keys_know_their_lines_and_twins_are_found() -> None:
    text = '{\n "name": "a",\n "model": {\n  "width": 64,\n  "x": [1, {"y": 2}]\n },\n "name": "b"\n}\n'
    lines, twice = json_lines(text)
    assert lines[("model", "width")] == 4
    assert lines[("model", "x", 1, "y")] == 5
    assert twice == [(("name",), 2, 7)]


@pytest.mark.parametrize(
    ("text", "name", "line", "words"),
    [
        ("name: a\nmodel:\n\twidth: 3\n", "x.yaml", 3, "tab"),
        ("name: a\nmodel: [1\nseed: 2\n", "x.yaml", 3, "not valid YAML"),
        ("name: a\nmodel: b: c\n", "x.yaml", 2, "colon"),
        ("name: a\n---\nname: b\n", "x.yaml", 2, "second document"),
        ("name: *missing\n", "x.yaml", 1, "alias"),
        ("- a\n- b\n", "x.yaml", 1, "no `key: value`"),
        ("hello\n", "x.yaml", 1, "no `key: value`"),
        ("", "x.yaml", 1, "empty"),
        ("# only a comment\n", "x.yaml", 1, "only comments"),
        ("a: &x\n  b: *x\n", "x.yaml", 1, "refers to itself"),
        ("name: a\nseed: \x07\n", "x.yaml", 2, "control character"),
        (b"name: a\nseed: \xff\n", "x.yaml", 2, "UTF-8"),
        ("name = a\n", "x.toml", 1, "not valid TOML"),
        ("", "x.toml", 1, "empty"),
        ('{"name": "a",\n}', "x.json", 2, "not valid JSON"),
        ("[1]", "x.json", 1, "no object"),
        ("", "x.json", 1, "empty"),
    ],
)
def test_what_is_broken_in_the_language_is_named_with_its_line(text: str, name: str, line: int, words: str) -> None:
    with pytest.raises(RunFileError) as caught:
        read(text, name)
    (mistake,) = caught.value.mistakes
    assert mistake.line == line
    assert words in mistake.problem
    assert mistake.file == f"runs/{name}"


def test_a_key_given_twice_names_both_lines(mistakes: Mistakes) -> None:
    found = mistakes("name: a\nname: b\nphases:\n  - steps: 3\n")
    assert [(m.line, m.key) for m in found] == [(2, "name")]
    assert "line 1" in found[0].problem


def test_a_huge_file_and_an_unreadable_one_are_refused() -> None:
    with pytest.raises(RunFileError, match=r"x\.yaml has 1 mistake"):
        read("a: b\n" * 300_000)
    with pytest.raises(UsageError, match="Cannot read"):
        read_source(Path("runs/none.yaml"))


def test_a_byte_order_mark_is_no_mistake() -> None:
    assert read(b"\xef\xbb\xbfname: a\n").data == {"name": "a"}  # type: ignore[attr-defined]
