"""`homing` on a real terminal without input: what it prints, and whether it ends without an answer."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path


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
