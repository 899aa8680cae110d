"""Progress of long work: a bar on a terminal, a line every 30 seconds elsewhere, nothing under --json and -q."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from tests.cli.pseudo_terminal import Emulator

from homing import progress
from homing.api.models.export_model import write_export
from homing.cli import output, run_verb
from homing.cli.run_verb import Bars, describe
from homing.progress import SECONDS, Progress

GB = 10**9
# Work in the library with a message in between, as a verb would do it.
WORK = """
import sys, threading
sys.argv = ["homing", "store", "put", "big.bin", "files/big.bin", *sys.argv[1:]]
import homing.api.tools.store_files as files
from homing.api import notices
from homing import progress
def put(path, key, *, on_progress, **_):
    pause = threading.Event()
    for done in range(0, 101, 5):
        on_progress(done * 10**7, 10**9)
        pause.wait(0.05)
        if done == 50:
            notices.say("Half of it is there.")
    with progress.working("Reading it back"):
        pause.wait(0.5)
    return {"num_bytes": 10**9}
files.put_file = put
from homing.cli.main import main
main()
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(run_verb.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_there_is_a_line_every_30_seconds(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with progress.listening(Bars().show):
        for step in range(10):
            clock[0] = 10.0 * step
            progress.report("Pushing 3 inputs", step * GB, 10 * GB)
        progress.finished()
    assert capsys.readouterr().err.splitlines() == [
        "Pushing 3 inputs: 3.00 GB of 10.00 GB, 30%, 100.00 MB/s, eta 1m10s",
        "Pushing 3 inputs: 6.00 GB of 10.00 GB, 60%, 100.00 MB/s, eta 40s",
        "Pushing 3 inputs: 9.00 GB of 10.00 GB, 90%, 100.00 MB/s, eta 10s",
    ]


@pytest.mark.parametrize(("loudness", "is_json"), [(-1, False), (0, True)], ids=["quiet", "json"])
def test_under_quiet_and_json_nothing_is_shown(
    capsys: pytest.CaptureFixture[str], clock: list[float], loudness: int, is_json: bool
) -> None:
    output.configure(loudness=loudness, is_json=is_json)
    with progress.listening(Bars().show):
        for step in range(10):
            clock[0] = 100.0 * step
            progress.report("Pushing", step, 10)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
def test_a_terminal_that_is_gone_does_not_end_the_work(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], is_terminal: bool
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def isatty(self) -> bool:
            return is_terminal

        def fileno(self) -> int:
            raise OSError

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", Gone())
    bars = Bars()
    with progress.listening(bars.show):
        for step in range(3):
            clock[0] = 100.0 * step
            progress.report("Waiting for the agent's first heartbeat", clock[0], 600.0, SECONDS)
        progress.finished()
    bars.erase()


def test_a_wait_says_how_long_so_far_and_its_deadline() -> None:
    wait = Progress("Waiting for the agent's first heartbeat", 80.0, 600.0, SECONDS)
    assert describe(wait, 80.0) == "Waiting for the agent's first heartbeat: 1m20s so far, at most 10m00s"
    assert describe(Progress("Hashing"), 12.0) == "Hashing: 12s so far"


def test_without_a_listener_the_library_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress.report("Pushing", 1, 2)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_on_a_terminal_a_bar_is_drawn_and_erased_and_messages_stay_whole(homing_home: Path, tmp_path: Path) -> None:
    with Emulator(["-c", WORK], cwd=tmp_path, columns=100) as terminal:
        shown = terminal.read_until(lambda text: "60%" in text and "Half of it" in text)
        assert "Half of it is there.\nCopying big.bin ━" in shown
        terminal.read_until(lambda text: "Reading it back" in text)
        assert terminal.read_to_the_end() == 0
        assert terminal.text == "Half of it is there.\nfiles/big.bin: 1.00 GB stored, read back and verified."
    assert terminal.raw.endswith(b"verified.\r\n")
    assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(b"\x1b[?25l"), "the cursor is visible again"


@pytest.mark.parametrize("words", [["--json"], ["-q"]])
def test_no_bar_is_drawn_on_a_terminal_under_json_and_quiet(
    homing_home: Path, tmp_path: Path, words: list[str]
) -> None:
    with Emulator(["-c", WORK, *words], cwd=tmp_path) as terminal:
        assert terminal.read_to_the_end() == 0
    assert b"\x1b" not in terminal.raw
    assert b"Copying" not in terminal.raw


def test_an_export_reports_each_of_its_steps(
    homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.lm.export.export", lambda order, notify: notify("writing the folder"))
    seen: list[Progress] = []
    with progress.listening(seen.append):
        write_export(tmp_path, "hf", tmp_path / "out", name="moss")
    assert [each.what for each in seen] == ["Exporting: writing the folder", ""]
