"""Tables for people: nothing of a cell is lost, whatever is in it and however narrow the terminal is."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from tests.cloud.rig import homing

from homing.cli import output, run_verb

ROW = ["chain-20261116-001222-86bf", "local", "$3.60/h", "2026-11-16 00:12:22Z", "$0.04"]
HEADERS = ["run", "provider", "rate", "from", "dollars"]


@pytest.fixture(autouse=True)
def _plain() -> None:
    output.configure(loudness=0, is_json=False)


def on_terminal(code: str, columns: int) -> str:
    """What a program prints on a terminal of that width, without colours."""
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
    output.table(["", ""], [("run", "moss"), ("state", "a long sentence about it")])
    assert capsys.readouterr().out == "run    moss\nstate  a long sentence about it\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_terminal_cannot_show_is_shown_by_its_number_and_json_stays_json(encoding: str) -> None:
    code = "from homing.cli import output; output.configure(loudness=0, is_json={}); "
    table = code.format(False) + "output.table(['path'], [['b\\u00fccher \\u2713 \\udcfc']]); print('\\u2713')"
    as_json = (
        code.format(True) + "output.emit('x/1', {'path': 'b\\u00fccher \\u2713 \\udcfc'})"
    )  # a name that is no UTF-8
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    shown, document = (
        subprocess.run([sys.executable, "-c", each], env=env, capture_output=True, check=True).stdout
        for each in (table, as_json)
    )
    assert rb"\udcfc" in shown
    assert (rb"\u2713" in shown) == (encoding != "utf-8")
    assert json.loads(document.decode(encoding))["path"] == "b\u00fccher \u2713 \udcfc"


def test_a_reader_that_left_costs_an_error_neither_its_lines_nor_its_exit_code(tmp_path: Path) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    argv = [sys.executable, "-m", "homing.cli", "plan", "nope", "--json"]
    done = subprocess.run(argv, cwd=tmp_path, stdout=writable, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writable)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: No run called 'nope' found."
    assert "Traceback" not in done.stderr


def test_what_may_still_bill_is_looked_at_also_when_the_reader_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leaves() -> None:
        raise BrokenPipeError

    monkeypatch.setattr("homing.cli.verbs.runs.command", leaves)
    monkeypatch.setattr(run_verb, "_after_the_reader_left", lambda: (0, ""))  # which is about a real stdout
    monkeypatch.setattr(run_verb, "_check_billing", lambda code, shown: 6)
    assert homing(capsys, monkeypatch, "runs").code == 6


def test_a_file_name_that_is_not_utf_8_is_a_user_error_with_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = os.fsdecode(b"l\xfc.txt")
    Path(odd).write_text("once upon a time")
    said = homing(capsys, monkeypatch, "new", "moss", "--from", "tiny", "--text", odd)
    assert said.code == 2
    assert said.err.splitlines()[0] == r"error: --text: the name 'l\udcfc.txt' is not UTF-8."
    assert "Traceback" not in said.err
    assert not list(Path("runs").glob("*"))


def test_a_table_of_nothing_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(HEADERS, [])
    assert capsys.readouterr().out == ""


def test_text_of_others_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    said = ["[rank0]: Traceback", "pip install 'homing[aws]'", "[/INST] :smile: [bold]"]
    output.table(["what"], [[text] for text in said])
    assert capsys.readouterr().out.splitlines()[1:] == said


def test_where_the_words_fit_a_narrow_terminal_shows_columns() -> None:
    code = f"from homing.cli import output; output.table({HEADERS}, [{ROW}])"
    assert on_terminal(code, 120).splitlines()[1].split()[0] == ROW[0]


@pytest.mark.parametrize("columns", [30, 60])
def test_on_a_narrow_terminal_each_row_becomes_lines_and_nothing_is_cut(columns: int) -> None:
    total = ["total", "", "", "", "$0.04"]
    code = (
        f"from homing.cli import output; output.table({HEADERS}, [{ROW}, {total}], title='Every instance, by its age')"
    )
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
