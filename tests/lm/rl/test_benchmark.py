from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/gpu/rl.py"


@pytest.mark.slow
def test_the_benchmark_of_a_step_runs_where_there_is_no_card() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--steps", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS 4 x 4 x 16")
