"""`.env` beside the run files: keys that nobody exported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from homing.cli import dotenv
from homing.cli.call import call
from homing.cli.main import VERBS
from homing.errors import UsageError


def write(folder: Path, text: str, mode: int = 0o600) -> None:
    path = folder / dotenv.FILE
    path.write_text(text)
    path.chmod(mode)


def test_exported_wins_over_the_file_and_the_file_over_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOSS_EXPORTED", "exported")
    monkeypatch.setenv("MOSS_KEY", "")
    monkeypatch.delenv("MOSS_KEY")
    write(tmp_path, "# keys\nMOSS_EXPORTED=file\nexport MOSS_KEY='a$b#c'\nMOSS_EMPTY\n")
    dotenv.load(tmp_path)
    assert os.environ["MOSS_EXPORTED"] == "exported"
    assert os.environ["MOSS_KEY"] == "a$b#c"
    assert "MOSS_EMPTY" not in os.environ


def test_where_there_is_none_nothing_happens(tmp_path: Path) -> None:
    before = dict(os.environ)
    dotenv.load(tmp_path)
    assert dict(os.environ) == before


def test_a_file_that_others_can_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "", mode=0o644)
    dotenv.load(tmp_path)
    assert "chmod 600" in capsys.readouterr().err
    write(tmp_path, "", mode=0o600)
    dotenv.load(tmp_path)
    assert capsys.readouterr().err == ""


def test_one_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / dotenv.FILE).write_bytes(b"KEY=\xff\xfe\n")
    with pytest.raises(UsageError, match=r"\.env cannot be read"):
        dotenv.load(tmp_path)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_reads_it_from_the_folder_it_is_called_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """Read first, whatever the verb needs beside it: here it cannot be read."""
    (tmp_path / dotenv.FILE).write_bytes(b"KEY=\xff\xfe\n")
    monkeypatch.chdir(tmp_path)
    assert call([verb]) == 2
    assert ".env cannot be read" in capsys.readouterr().err
