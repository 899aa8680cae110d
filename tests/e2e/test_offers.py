"""Four clouds at once: the real adapters, their doubles, and a network that is slow or gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.acceptance(49)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_slow_clouds_answer_in_the_time_of_one_and_a_dead_one_is_reported() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/offers.py"), "--quick"],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("PASS 4 clouds")
