"""pretrain, mid, sft and rl through the whole control plane, and killed in every phase."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.acceptance(90)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_form_passes() -> None:
    argv = [sys.executable, str(ROOT / "benchmarks/chain.py"), "--quick"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=880)
    assert done.stdout.splitlines()[-1].startswith("PASS"), done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0
