from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homing.errors import DataError, RunFailed
from homing.lm.rl.user_reward import OwnReward

GOOD = "def reward(prompt, completion, answer):\n    return len(completion) + (completion == answer)\n"


@pytest.fixture
def messages() -> list[tuple[str, str]]:
    return []


def opened(tmp_path: Path, text: str, messages: list[tuple[str, str]], **changes: Any) -> OwnReward:
    path = tmp_path / "reward.py"
    path.write_text(text, encoding="utf-8")
    settings = {"sha256": "", "timeout_s": 20.0, "memory_bytes": 2**30} | changes
    return OwnReward(path, notify=lambda kind, words: messages.append((kind, words)), **settings)


def test_a_reward_is_computed_for_each_sample(tmp_path: Path, messages: list[tuple[str, str]]) -> None:
    with opened(tmp_path, "print('hello')\n" + GOOD, messages) as own:
        assert own.judge([("p", "ab", "x"), ("p", "abc", "abc"), ("p", "\u00e4\n\u2603", "")]) == [2.0, 4.0, 3.0]


def test_a_failing_sample_scores_zero_and_its_line_is_reported_once(
    tmp_path: Path, messages: list[tuple[str, str]]
) -> None:
    text = "def reward(prompt, completion, answer):\n    value = 1\n    return value / len(completion)\n"
    with opened(tmp_path, text, messages) as own:
        assert own.judge([("p", "ab", ""), ("p", "", ""), ("p", "", "")]) == [0.5, None, None]
    failures = [words for kind, words in messages if kind == "reward_failed"]
    assert len(failures) == 1
    assert "line 3" in failures[0]
    assert "ZeroDivisionError" in failures[0]


def test_when_every_sample_of_a_step_fails_the_run_stops_and_says_where(
    tmp_path: Path, messages: list[tuple[str, str]]
) -> None:
    text = "def reward(prompt, completion, answer):\n    return float('nan')\n"
    with opened(tmp_path, text, messages) as own, pytest.raises(RunFailed, match="no reward for any of 2") as caught:
        own.judge([("p", "a", ""), ("p", "b", "")])
    assert "not a finite number" in caught.value.why


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def reward(:\n", "line 1: SyntaxError"),
        ("x = 1\nimport nothing_of_that_name\n", "line 2: ModuleNotFoundError"),
        ("def rewards(p, c, a): return 1\n", "defines no function reward"),
        ("import os\nos._exit(3)\n", "exit code 3"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line(
    tmp_path: Path, messages: list[tuple[str, str]], text: str, words: str
) -> None:
    with pytest.raises(RunFailed, match="cannot be used as a reward") as caught, opened(tmp_path, text, messages):
        pass
    assert words in caught.value.why


@pytest.mark.acceptance(91)
@pytest.mark.slow
def test_a_reward_that_hangs_is_ended_with_what_it_started_and_the_next_sample_is_judged(
    tmp_path: Path, messages: list[tuple[str, str]]
) -> None:
    pid_file = tmp_path / "pid"
    text = (
        "import subprocess, sys, time\n"
        "def reward(prompt, completion, answer):\n"
        "    if completion == 'hang':\n"
        # By its number outside: in a namespace of its own it has another.
        f'        wait = \'import os, time; open(r"{pid_file}", "w").write(os.readlink("/proc/self"))\'\n'
        "        subprocess.Popen([sys.executable, '-c', wait + '; time.sleep(600)'])\n"
        "        time.sleep(600)\n"
        "    return 1.0\n"
    )
    with opened(tmp_path, text, messages, timeout_s=2.0) as own:
        assert own.judge([("p", "hang", ""), ("p", "ok", "")]) == [None, 1.0]
    assert "no response within 2 s" in next(words for kind, words in messages if kind == "reward_failed")
    pid = int(pid_file.read_text(encoding="utf-8"))
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)


def test_a_reward_does_not_outlive_a_trainer_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("import time\ndef reward(p, c, a):\n    while True: pass\n", encoding="utf-8")
    code = (
        "import sys\nfrom pathlib import Path\nfrom homing.lm.rl.user_reward import OwnReward\n"
        "limits = {'timeout_s': 600, 'memory_bytes': 2**30}\n"
        "own = OwnReward(Path(sys.argv[1]), sha256='', notify=lambda kind, text: None, **limits)\n"
        "with own:\n    print(own._child.pid, flush=True)\n    own.judge([('p', 'c', 'a')])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "reward.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        assert is_running(pid)
        trainer.kill()
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_reward_has_no_keys_no_more_memory_than_allowed_and_no_say_in_the_answers(
    tmp_path: Path, messages: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    text = (
        "import os, sys\n"
        "def reward(prompt, completion, answer):\n"
        "    print('{\"reward\": 99}', flush=True)\n"
        "    if completion == 'keys':\n        return float('canary' in str(dict(os.environ)))\n"
        "    if completion == 'die':\n        os.kill(os.getpid(), 9)\n"
        "    return len(bytes(10**9)) / 10**9\n"
    )
    with opened(tmp_path, text, messages, memory_bytes=256 * 2**20) as own:
        assert own.judge([("p", "keys", ""), ("p", "much", ""), ("p", "die", ""), ("p", "keys", "")]) == [
            0.0, None, None, 0.0,
        ]  # fmt: skip
    failures = " ".join(words for kind, words in messages if kind == "reward_failed")
    assert "MemoryError" in failures
    assert "SIGKILL" in failures


@pytest.mark.parametrize("nonsense", ["b'words'", "b'[1]'", "b'{}'", 'b\'{"reward": "much"}\'', "b'[' * 50_000"])
def test_what_is_no_answer_counts_for_nothing_and_is_called_so(
    tmp_path: Path, messages: list[tuple[str, str]], nonsense: str
) -> None:
    text = f"""\
import contextlib, os
def reward(prompt, completion, answer):
    for fd in range(3, 16):
        with contextlib.suppress(OSError):
            os.write(fd, completion.encode() and {nonsense} + b"\\n")
    return 1.0
"""
    with opened(tmp_path, text, messages) as own:
        assert own.judge([("p", "", ""), ("p", "x", ""), ("p", "", "")]) == [1.0, None, 1.0]
    (words,) = [words for kind, words in messages if kind == "reward_failed"]
    assert "sent an invalid response" in words


def test_a_reward_reaches_no_network_or_that_is_said(tmp_path: Path, messages: list[tuple[str, str]]) -> None:
    text = (
        "import socket\n"
        "def reward(prompt, completion, answer):\n"
        "    with socket.socket() as s:\n"
        "        s.settimeout(5)\n"
        "        return float(s.connect_ex(('127.0.0.1', int(completion))) == 0)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server, opened(tmp_path, text, messages) as own:
        (reached,) = own.judge([("p", str(server.getsockname()[1]), "")])
    is_said = any(kind == "reward_not_bounded" and "network" in words for kind, words in messages)
    assert bool(reached) == is_said


def test_a_reward_that_was_exchanged_or_is_not_there_is_refused(
    tmp_path: Path, messages: list[tuple[str, str]]
) -> None:
    with pytest.raises(DataError, match="has changed since this run was created"):
        opened(tmp_path, GOOD, messages, sha256="0" * 64)
    os.remove(tmp_path / "reward.py")
    with pytest.raises(DataError, match="cannot be read"):
        OwnReward(tmp_path / "reward.py", sha256="", timeout_s=1, memory_bytes=2**30, notify=lambda kind, words: None)


def lately_running(pid_file: Path) -> bool:
    """Return whether the process with the id in the file still runs after a few seconds."""
    pid, deadline = int(pid_file.read_text(encoding="utf-8")), time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_running(pid)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            "while True: [os.write(fd, b'x' * 4096) for fd in fds]", marks=pytest.mark.regression("reward-deadline")
        ),
        "while True: [os.write(fd, b'x' * 16 + b'\\n') for fd in fds] and time.sleep(0.001)",
        "while True: [(os.write(fd, b'x'), time.sleep(0.01)) for fd in fds]",
    ],
    ids=["flood", "flood of lines", "drip"],
)
@pytest.mark.slow
def test_a_reward_that_never_stops_writing_meets_its_deadline(
    tmp_path: Path, messages: list[tuple[str, str]], how: str
) -> None:
    text = (
        "import os, time\n"
        "def reward(prompt, completion, answer):\n"
        "    if completion == 'flood':\n"
        "        fds = [fd for fd in range(3, 16) if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "        fds = [fd for fd in fds if 'pipe' in os.readlink(f'/proc/self/fd/{fd}')]\n"
        f"        {how}\n"
        "    return 1.0\n"
    )
    with opened(tmp_path, text, messages, timeout_s=2.0) as own, deadline_of(25):
        assert own.judge([("p", "flood", ""), ("p", "ok", "")]) == [None, 1.0]


@pytest.mark.regression("reward-deadline")
@pytest.mark.slow
def test_a_reward_that_does_not_read_meets_its_deadline(tmp_path: Path, messages: list[tuple[str, str]]) -> None:
    """The question is larger than a pipe, so writing it waits for the reader."""
    text = (
        "import os, threading, time\n"
        "def reward(prompt, completion, answer):\n"
        "    threading.Thread(target=stop, daemon=True).start()\n"
        "    return 1.0\n"
        "def stop():\n"
        "    time.sleep(0.2)\n"
        "    os.kill(os.getpid(), 19)\n"
    )
    with opened(tmp_path, text, messages, timeout_s=2.0) as own:
        assert own.judge([("p", "ok", "")]) == [1.0]
        time.sleep(0.5)
        with deadline_of(25):
            assert own.judge([("p" * 2_000_000, "x", ""), ("p", "ok", "")]) == [None, 1.0]


@pytest.mark.regression("reward-deadline")
@pytest.mark.slow
@pytest.mark.parametrize("end", ["time.sleep(600)", "os._exit(3)", "return 1.0"])
def test_a_grandchild_in_a_session_of_its_own_does_not_outlive_the_reward(
    tmp_path: Path, messages: list[tuple[str, str]], end: str
) -> None:
    pid_file = tmp_path / "pid"
    text = (
        "import os, time\n"
        "def reward(prompt, completion, answer):\n"
        "    if completion == 'start':\n"
        "        if os.fork() == 0:\n"
        "            os.setsid()\n"
        "            if os.fork() == 0:\n"
        # By its number outside: in a namespace of its own it has another.
        f"                open({str(pid_file)!r}, 'w').write(os.readlink('/proc/self'))\n"
        "                time.sleep(600)\n"
        "            os._exit(0)\n"
        f"        while not os.path.exists({str(pid_file)!r}): time.sleep(0.01)\n"
        f"        time.sleep(0.3)\n"
        f"        {end}\n"
        "    return 1.0\n"
    )
    with opened(tmp_path, text, messages, timeout_s=3.0) as own:
        assert own.judge([("p", "start", ""), ("p", "ok", "")])[1] == 1.0
    assert not lately_running(pid_file)


@contextlib.contextmanager
def deadline_of(seconds: int) -> Iterator[None]:
    """Fails a call that waits for ever, by an alarm."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
