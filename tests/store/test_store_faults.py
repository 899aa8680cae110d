"""The proof in its quick form: nothing damaged loads as good, and a cut upload costs at most a part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "store_faults.py"


@pytest.mark.acceptance(105)
@pytest.mark.slow
def test_the_quick_proof_of_the_store_passes() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("PASS ")
