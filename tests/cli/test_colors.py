"""Colors on a terminal, and none where they are not wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.live_run import finish, training_here
from tests.cli.pseudo_terminal import Emulator

# Verbs with a table, an error, a warning and a live view.
VERBS = [["runs"], ["status", "moss"], ["plan", "nope"], ["doctor"], ["ledger"], ["watch", "moss", "--plain"]]
COLOR = b"\x1b[3"


@pytest.fixture
def here(homing_home: Path, tmp_path: Path) -> Path:
    with training_here(homing_home, tmp_path) as folder:
        finish(folder)
    return tmp_path


def said(words: list[str], cwd: Path, **env: str) -> bytes:
    with Emulator(["-m", "homing.cli", *words], cwd=cwd, columns=160, **env) as terminal:
        terminal.read_to_the_end()
    return terminal.raw


def test_errors_are_red_and_states_are_colored_next_to_their_words(here: Path) -> None:
    assert b"\x1b[1;31merror:\x1b[0m" in said(["plan", "nope"], here)
    assert b"\x1b[32mdone" in said(["runs"], here)


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_no_color_and_dumb_terminals_get_the_same_words_without_color(here: Path, words: list[str]) -> None:
    assert COLOR not in said(words, here, NO_COLOR="1")
    assert b"\x1b" not in said(words, here, TERM="dumb", NO_COLOR="1")


@pytest.mark.parametrize("words", [["runs"], ["status", "moss"], ["plan", "nope"]], ids=lambda words: words[0])
def test_json_is_never_colored(here: Path, words: list[str]) -> None:
    shown = said([*words, "--json"], here)
    document = next(line for line in shown.splitlines() if line.startswith(b"{"))
    assert b"\x1b" not in document
