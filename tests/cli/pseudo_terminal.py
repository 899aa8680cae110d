"""`homing` on a real terminal without input: what it prints, and whether it ends without an answer."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte


def on_terminal(*words: str, cwd: Path, until: str = "", deadline_s: float = 120.0) -> tuple[int | None, str]:
    """Exit code and what was said. No code: it said `until` and was ended there, or it still ran at the deadline."""
    ours, reference = pty.openpty()
    argv = [sys.executable, "-m", "homing.cli", *words]
    # A session with this controlling terminal, as in a shell: a prompt for a key opens /dev/tty.
    shell = [sys.executable, "-c", "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
             " os.execv(sys.argv[1], sys.argv[1:])"]  # fmt: skip
    child = subprocess.Popen(
        [*shell, *argv], stdin=reference, stdout=reference, stderr=reference, start_new_session=True, cwd=cwd
    )
    os.close(reference)
    said, deadline = "", time.monotonic() + deadline_s
    try:
        while time.monotonic() < deadline and not (until and until in said):
            if not select.select([ours], [], [], 0.5)[0]:
                continue
            try:
                said += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                return child.wait(timeout=30), said
        return None, said
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        os.close(ours)


class Emulator:
    """A program on a pseudo-terminal of a given size, and what its screen looks like."""

    def __init__(self, argv: Sequence[str], *, cwd: Path, columns: int = 80, rows: int = 24, **env: str) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.raw = b""
        self._stream = pyte.ByteStream(self.screen)
        self._ours, reference = pty.openpty()
        self._size(columns, rows)
        shell = [sys.executable, "-c", "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
                 " os.execv(sys.argv[1], sys.argv[1:])"]  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.child = subprocess.Popen(
            [*shell, sys.executable, *argv], stdin=reference, stdout=reference, stderr=reference,
            start_new_session=True, cwd=cwd, env={**environment, "TERM": "xterm-256color", **env},
        )  # fmt: skip
        os.close(reference)

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self._size(columns, rows)

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def read_until(self, is_there: Callable[[str], bool], deadline_s: float = 60.0) -> str:
        """Return the screen once `is_there` accepts it. Fail at the deadline, or if the program ends before that."""
        deadline = time.monotonic() + deadline_s
        while not is_there(self.text):
            assert time.monotonic() < deadline, self.text
            assert self._read_on(), f"it ended: {self.text}"
        return self.text

    def read_to_the_end(self) -> int:
        while self._read_on():
            pass
        return self.child.wait(timeout=30)

    def _read_on(self) -> bool:
        """Read what the program wrote; return False once it has ended."""
        if select.select([self._ours], [], [], 0.2)[0]:
            try:
                data = os.read(self._ours, 65536)
            except OSError:
                return False
            self.raw += data
            self._stream.feed(data)
            return bool(data)
        return True

    def _size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
