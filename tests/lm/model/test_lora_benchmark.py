from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/gpu/lora.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_every_part_of_the_benchmark_runs_where_there_is_no_card() -> None:
    done = run("--quick")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("PASS lora ")
    assert {line.split()[0] for line in lines} >= {"check", "lora", "qlora", "peer"}


@pytest.mark.slow
def test_without_a_card_the_real_shape_is_not_tried() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    done = run()
    assert done.returncode == 1
    assert done.stdout.startswith("FAIL no CUDA device")
