"""The benchmark of bad inputs in its quick form: a run file that is refused is refused with the place and the key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bad_input.py"


@pytest.mark.slow
def test_bad_inputs_end_with_exit_code_2_their_line_and_the_key_that_was_meant() -> None:
    argv = [sys.executable, str(SCRIPT), "--quick"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("PASS ")
