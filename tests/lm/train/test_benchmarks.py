"""The engine's benchmark scripts run, in their quick form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(script: str, *, threads: int = 1) -> tuple[int, str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=570, check=False)
    lines = done.stdout.splitlines() or [""]
    return done.returncode, lines[-1] if done.returncode in (0, 1) else done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_run_is_at_least_as_fast_as_transformers_on_this_processor() -> None:
    found = [run("engine.py", threads=2)]
    while found[-1][0] and len(found) < 3:  # a busy machine now and then falls on one side only
        found.append(run("engine.py", threads=2))
    code, last = found[-1]
    assert (code, last.split()[0]) == (0, "PASS"), found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_waits_for_the_copy_of_a_checkpoint_and_not_for_the_disk() -> None:
    code, last = run("save_stall.py")
    assert (code, last.split()[0]) == (0, "PASS"), last


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", ["gpu/variants.py", "gpu/quality.py"])
def test_what_is_to_be_tried_on_a_card_runs_at_toy_size_on_a_cpu(script: str) -> None:
    code, last = run(script)
    assert (code, last.split()[0]) == (0, "PASS"), last


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loader_is_measured() -> None:
    """Whether it is fast enough depends on what else the machine does; that it counts does not."""
    code, last = run("loader.py")
    assert last.split()[0] in ("PASS", "FAIL"), last
    assert code == (0 if last.startswith("PASS") else 1)
    assert int(last.split()[1].replace(",", "")) > 100_000
