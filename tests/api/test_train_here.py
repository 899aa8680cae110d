"""What a trainer here prints, on the terminal and in its log."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from homing.api import train_here
from homing.api.train_here import log_path, printing
from homing.cli import output

SAYS = "import sys; print('step 1', flush=True); print('error: boom', file=sys.stderr, flush=True); print('step 2')"


def run(code: str, run_dir: Path, out: TextIO | None, err: TextIO | None) -> int:
    argv = [sys.executable, "-c", code]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with printing(child, run_dir, out=output.line_writer(out), err=output.line_writer(err)):
        return child.wait()


def screen() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO())


def shown(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


def test_each_stream_goes_to_its_own_and_the_log_has_both_over_all_attempts(tmp_path: Path) -> None:
    out, err = screen(), screen()
    assert run(SAYS, tmp_path, out, err) == 0
    assert (shown(out), shown(err)) == ("step 1\nstep 2\n", "error: boom\n")
    assert sorted(log_path(tmp_path).read_text().splitlines()) == ["error: boom", "step 1", "step 2"]
    assert run("print('step 3')", tmp_path, None, None) == 0
    assert log_path(tmp_path).read_text().endswith("step 3\n"), "quiet is not forgotten"


def test_bytes_that_are_no_text_pass_through_as_they_are(tmp_path: Path) -> None:
    out = screen()
    run(r"import sys; sys.stdout.buffer.write(b'a\xff\xe4\n')", tmp_path, out, None)
    assert isinstance(out.buffer, io.BytesIO)
    assert out.buffer.getvalue() == log_path(tmp_path).read_bytes() == b"a\xff\xe4\n"


@pytest.mark.regression("terminal-escapes")
def test_a_trainer_cannot_change_the_terminal_and_its_log_keeps_every_byte(tmp_path: Path) -> None:
    out = screen()
    run(r"import sys; sys.stdout.buffer.write(b'a\x1b[2J\x9b5m\xc2\x9b\x07 b\n')", tmp_path, out, None)
    assert not set(shown(out)) & set("\x1b\x07\x9b\udc9b")
    assert shown(out).endswith(" b\n")
    assert log_path(tmp_path).read_bytes() == b"a\x1b[2J\x9b5m\xc2\x9b\x07 b\n"


@pytest.mark.regression("crash-secrets")
def test_a_key_that_a_trainer_prints_is_neither_shown_nor_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_CANARY0123456789")
    out = screen()
    run("import os; print('with', os.environ['HF_TOKEN'])", tmp_path, out, None)
    assert shown(out) == log_path(tmp_path).read_text() == "with ***\n"


@pytest.mark.slow
def test_a_reader_that_left_holds_nothing_up_and_the_log_is_whole(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    many = 100_000  # more than a pipe holds
    with os.fdopen(writing, "w") as gone:
        assert run(f"print('step\\n' * {many}, end='')", tmp_path, gone, None) == 0
        gone.write("what is written later goes nowhere")
    assert len(log_path(tmp_path).read_text().splitlines()) == many


def test_a_log_that_cannot_be_written_costs_only_the_log(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    out = screen()
    assert run("print('step 1')", tmp_path, out, None) == 0
    assert shown(out) == "step 1\n"


def test_a_program_that_the_trainer_left_behind_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_here, "_LAST_LINES_S", 0.2)
    left = "import sys; sys.stdin.read()"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {left!r}]); print('done', flush=True)"
    # It holds the pipes until its own stdin ends, which this test holds.
    given, kept = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.close(given)
    with printing(child, tmp_path, out=None, err=None):
        assert child.wait() == 0
    os.close(kept)
