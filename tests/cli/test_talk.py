"""Tables for people: nothing of a cell is lost, whatever is in it and however narrow the terminal is."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from homing.cli import talk

ROW = ["chain-20261116-001222-86bf", "local", "$3.60/h", "2026-11-16 00:12:22Z", "$0.04"]
HEADERS = ["run", "provider", "rate", "from", "dollars"]


@pytest.fixture(autouse=True)
def _plain() -> None:
    talk.configure(loudness=0, is_json=False)


def on_terminal(code: str, columns: int) -> str:
    """What a program prints on a terminal of so many columns, without its colours."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {**{name: value for name, value in os.environ.items() if name != "COLUMNS"}, "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", code], stdin=its, stdout=its, stderr=its, env=env, check=False)
    os.close(its)
    said = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed, and all of it is read
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    assert done.returncode == 0, said
    return re.sub(r"\x1b\[\d*m", "", said.decode().replace("\r\n", "\n"))


def test_a_table_without_headers_has_no_empty_line_above_it_and_no_blanks_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk.table(["", ""], [("run", "moss"), ("state", "a long sentence about it")])
    assert capsys.readouterr().out == "run    moss\nstate  a long sentence about it\n"


def test_text_of_others_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    said = ["[rank0]: Traceback", "pip install 'homing[aws]'", "[/INST] :smile: [bold]"]
    talk.table(["what"], [[text] for text in said])
    assert capsys.readouterr().out.splitlines()[1:] == said


def test_where_the_words_fit_a_narrow_terminal_shows_columns() -> None:
    code = f"from homing.cli import talk; talk.table({HEADERS}, [{ROW}])"
    assert on_terminal(code, 120).splitlines()[1].split()[0] == ROW[0]


@pytest.mark.parametrize("columns", [30, 60])
def test_where_they_do_not_each_row_is_told_line_by_line_and_nothing_is_cut(columns: int) -> None:
    total = ["total", "", "", "", "$0.04"]
    code = f"from homing.cli import talk; talk.table({HEADERS}, [{ROW}, {total}], title='Every instance, by its age')"
    said = on_terminal(code, columns)
    assert "…" not in said
    assert said.splitlines()[0] == "Every instance, by its age"
    assert max(map(len, said.splitlines())) <= columns
    assert "".join(said.split()).startswith("Everyinstance,byitsage" + f"run{ROW[0][: columns - 10]}")
    if columns == 60:
        assert said.splitlines()[1:] == [
            "run       chain-20261116-001222-86bf",
            "provider  local",
            "rate      $3.60/h",
            "from      2026-11-16 00:12:22Z",
            "dollars   $0.04",
            "",
            "run       total",
            "dollars   $0.04",
        ]
