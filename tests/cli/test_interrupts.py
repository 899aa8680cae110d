"""Ctrl-C at any moment: one short line, exit code 130, and the names of runs that continue.

The moment is not a matter of time: the launcher below presses Ctrl-C when a certain module is imported or a certain
function called. It also puts SIGINT back to what a terminal gives, for whoever runs these tests may ignore it.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cloud.rig import Said

from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow
from homing.world import World

LAUNCHER = """
import os, signal, sys
signal.signal(signal.SIGINT, {before})

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == {moment!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
from homing.cli.main import main
sys.argv = ["homing", *sys.argv[1:]]
main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOMING_HOME", str(tmp_path / "home"))
    return tmp_path


def pressed_at(moment: str, *arguments: str, before: str = "signal.default_int_handler") -> Said:
    code = LAUNCHER.format(moment=moment, before=before)
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "moment", ["homing.cli.run_verb", "typer", "logging", "homing.cli.output", "homing.cli.verb_help"]
)
def test_while_homing_itself_is_loaded(folder: Path, moment: str) -> None:
    assert pressed_at(moment, "runs") == Said(130, "", "Interrupted.\n")


@pytest.mark.parametrize(
    ("moment", "verb"),
    [
        ("homing.cli.verbs.runs", "runs"),
        ("homing.cloud.home", "runs"),
        ("pydantic", "plan"),
        ("homing.cli.verbs.prep", "prep"),
        ("homing.config", "verify"),
        ("homing.cli.verbs.train", "train"),
    ],
)
def test_while_a_verb_is_loaded(folder: Path, moment: str, verb: str) -> None:
    assert pressed_at(moment, verb) == Said(130, "", "Interrupted.\n")


def test_in_prep_it_is_said_that_the_same_command_goes_on(folder: Path) -> None:
    (folder / "a.txt").write_text("moss grows on stones\n" * 50)
    said = pressed_at("homing.api.data.download_input_files", "prep", "--text", "a.txt", "--out", "data/a")
    assert said.code == 130
    assert said.err.splitlines()[-2:] == [
        "Progress is saved. Run the same command to continue.",
        "Interrupted.",
    ]


def test_where_it_is_ignored_it_stays_ignored(folder: Path) -> None:
    """As under nohup, and wherever a shell starts a program in the background."""
    said = pressed_at("homing.cli.run_verb", "explain", "seed", before="signal.SIG_IGN")
    assert (said.code, said.out.splitlines()[0]) == (0, "seed")


def test_who_calls_main_has_his_own_handler_back(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from homing.cli.main import main

    def own(number: int, frame: object) -> None: ...

    monkeypatch.setattr(sys, "argv", ["homing", "--version"])
    before = signal.signal(signal.SIGINT, own)
    try:
        with pytest.raises(SystemExit):
            main()
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_after_the_verb_nothing_is_said_of_what_python_takes_down(folder: Path) -> None:
    """Registered first, called last: when all of ours is over."""
    code = LAUNCHER.format(moment="-", before="signal.default_int_handler").replace(
        "sys.meta_path", "import atexit; atexit.register(os.kill, os.getpid(), signal.SIGINT)\nsys.meta_path", 1
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("homing ")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_what_goes_on_all_the_same_is_named(folder: Path) -> None:
    home = Home(folder / "home", World())
    home.ledger.adopt_run(RunRow("moss-1", "moss", "running", 1.0, "file:/nowhere", "0" * 64), [], [])
    said = pressed_at("homing.cli.verbs.prep", "prep", "moss")
    assert said.code == 130
    first, second = said.err.splitlines()
    assert first == "Interrupted."
    assert second.startswith("moss is still running, as far as is known. Watch it: homing watch moss")
    assert "End it: homing destroy moss" in second
    assert pressed_at("homing.cli.verbs.prep", "prep", "moss", "-q") == Said(130, "", "")


def test_ctrl_c_at_a_question_is_no_answer_and_ends_on_its_own_line(folder: Path) -> None:
    ours, its = pty.openpty()
    code = LAUNCHER.format(moment="-", before="signal.default_int_handler")
    argv = [sys.executable, "-c", "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + code, "quickstart"]
    with subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, start_new_session=True) as child:
        os.close(its)
        said = b""
        while b"[y/N]" not in said:
            said += os.read(ours, 65536)
        os.write(ours, b"\x03")
        with contextlib.suppress(OSError):  # how the end of a terminal reads
            while piece := os.read(ours, 65536):
                said += piece
    os.close(ours)
    assert child.returncode == 130
    assert "\nInterrupted." in said.decode().replace("\r\n", "\n")
    assert b"Traceback" not in said
    assert not (folder / "homing-quickstart").exists()
