"""`homing export` on a real terminal: it asks nothing."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.lm.export.folders import make_checkpoint


@pytest.mark.parametrize("kind", [pytest.param("swift", marks=pytest.mark.regression("export-prompt")), "qwen3"])
def test_an_export_never_asks_a_question(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path / "c", kind)
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "homing.cli", "export", str(tmp_path / "c"), "--out", str(tmp_path / "out")]
    child = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said, deadline = "", time.monotonic() + 240
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 1)[0]:
                try:
                    said += os.read(ours, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
            assert "[y/N]" not in said, said
            assert "Do you wish" not in said, said
        assert child.wait(timeout=30) == 0, said
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        os.close(ours)
