from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from homing.config.home_and_run_files import find_run_file, home, newest_run, run_files, typed_name
from homing.errors import UsageError


@pytest.mark.acceptance("X12")
def test_home_is_the_environments_or_the_persons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOMING_HOME", str(tmp_path / "h"))
    assert home() == tmp_path / "h"
    assert not home().exists()
    monkeypatch.delenv("HOMING_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / ".homing"


def test_a_name_is_a_file_in_runs_and_a_path_is_itself() -> None:
    Path("runs/a.toml").write_text("x")
    Path("other.yaml").write_text("x")
    assert find_run_file("a") == Path("runs/a.toml")
    assert find_run_file("other.yaml") == Path("other.yaml")
    assert find_run_file("runs/a.toml") == Path("runs/a.toml")


def test_the_newest_run_is_the_file_changed_last() -> None:
    for number, name in enumerate(("b", "a", "c")):
        Path(f"runs/{name}.yaml").write_text("x")
        os.utime(f"runs/{name}.yaml", (number, number))
    assert newest_run() == "c"
    os.utime("runs/b.yaml", (9, 9))
    assert newest_run() == "b"
    assert list(run_files()) == ["a", "b", "c"]


def test_without_any_run_file_the_first_command_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        newest_run()
    assert "homing new" in caught.value.fix


@pytest.mark.parametrize("wanted", ["gothe", "Goethe", "goethee"])
def test_a_missing_run_is_answered_with_the_nearest(wanted: str) -> None:
    Path("runs/goethe.yaml").write_text("x")
    with pytest.raises(UsageError) as caught:
        find_run_file(wanted)
    assert "Did you mean goethe?" in caught.value.fix


def test_a_directory_and_a_file_without_ending_are_refused_as_what_they_are() -> None:
    Path("dir.yaml").mkdir()
    Path("goethe").mkdir()
    Path("plain").write_text("x")
    for wanted, words in (("dir.yaml", "is a directory"), ("goethe", "is a directory"), ("plain", "is a file")):
        with pytest.raises(UsageError, match=words):
            find_run_file(wanted)


@pytest.mark.parametrize("wanted", ["", "nowhere/x.yaml", "x" * 5000, "a\0b"])
def test_names_that_no_disk_can_hold_are_refused_without_a_traceback(wanted: str) -> None:
    with pytest.raises(UsageError):
        find_run_file(wanted)


def test_a_run_file_next_to_the_runs_folder_is_noticed() -> None:
    Path("moss.yaml").write_text("x")
    with pytest.raises(UsageError) as caught:
        find_run_file("moss")
    assert "moss.yaml" in caught.value.fix
    assert "homing new" not in caught.value.fix


def test_a_file_is_named_so_that_it_is_found_again() -> None:
    for path in ("moss.yaml", "runs/moss.yaml", "runs/moss.toml", "a moss.yaml"):
        Path(path).write_text("x")
        assert find_run_file(shlex.split(typed_name(Path(path)))[0]) == Path(path)
    assert typed_name(Path("runs/moss.yaml")) == "moss"
    assert typed_name(Path("runs/moss.toml")) == "runs/moss.toml"  # moss is the other one
