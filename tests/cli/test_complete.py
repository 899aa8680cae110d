"""Completion in the shell, as bash asks for it, and its installation, which edits files of the person's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.typed import Homing

from homing.cli.verb_list import VERBS


@pytest.fixture
def complete(homing: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    Path("runs").mkdir()
    Path("runs/moss.yaml").touch()
    for run_id in ("moss-20260101-120000-aaaa", "fern-20260102-120000-bbbb"):
        (homing_home / "runs" / run_id).mkdir(parents=True)

    def words(line: str) -> list[str]:
        monkeypatch.setenv("_HOMING_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        _, out, _ = homing()
        monkeypatch.delenv("_HOMING_COMPLETE")
        return out.split()

    return words


@pytest.mark.regression("shell-completion")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("homing plan mo", ["moss"]),
        ("homing chat fe", ["fern"]),
        ("homing destroy moss-2", ["moss-20260101-120000-aaaa"]),
        ("homing generate moss@", ["moss@moss-20260101-120000-aaaa"]),
        ("homing plan moss --set model.dep", ["model.depth="]),
        ("homing explain model.dep", ["model.depth"]),
    ],
)
def test_run_names_and_keys_are_completed(complete, line: str, found: list[str]) -> None:  # type: ignore[no-untyped-def]
    assert complete(line) == found


def test_verbs_and_options_are_completed_and_no_value_is_guessed(complete) -> None:  # type: ignore[no-untyped-def]
    assert complete("homing qui") == ["quickstart"]
    assert set(complete("homing ")) == set(VERBS)
    assert "--set" in complete("homing plan --s")
    assert complete("homing plan moss --set model.depth=") == []


@pytest.mark.regression("shell-completion")
def test_nothing_is_edited_before_a_person_has_agreed(
    homing: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    monkeypatch.setenv("SHELL", "/bin/bash")
    (tmp_path / "person").mkdir()
    (tmp_path / "person/.bashrc").write_text("mine\n")
    code, _, err = homing("--install-completion")
    assert (tmp_path / "person/.bashrc").read_text() == "mine\n"
    assert code == 2
    assert "adds lines to" in err
    code, _, err = homing("--install-completion", "bash", "--yes")
    assert code == 0, err
    assert (tmp_path / "person/.bash_completions/homing.sh").is_file()
    assert (tmp_path / "person/.bashrc").read_text().startswith("mine\n")
    code, _, err = homing("--install-completion", "tcsh")
    assert code == 2
    assert "bash, fish, zsh" in err


def test_it_is_named_by_the_help(homing: Homing) -> None:
    assert "homing --install-completion" in homing("--help")[1]
