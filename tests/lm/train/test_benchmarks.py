"""The engine's benchmark scripts run, in their quick form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from homing.wire import codec, file_names
from homing.wire.run_json import Run

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
@pytest.mark.parametrize(
    "script", ["gpu/variants.py", "gpu/quality.py", "gpu/hours.py", "gpu/graphs.py", "gpu/decode.py"]
)
def test_what_is_to_be_tried_on_a_card_runs_at_toy_size_on_a_cpu(script: str) -> None:
    code, last = run(script)
    assert (code, last.split()[0]) == (0, "PASS"), last


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_five_benchmark_runs_are_written_with_the_requested_length(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks/gpu/hours.py"), "--write-runs", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([*script, "--seconds-each", "60"], env=env, check=True, timeout=300)
    runs = {folder.name: codec.loads(Run, (folder / file_names.RUN).read_bytes()) for folder in tmp_path.iterdir()}
    shapes = {name: (run.model.num_layers, run.model.width, run.model.num_heads) for name, run in runs.items()}
    assert shapes == {
        "6x384": (6, 384, 3), "12x768-6heads": (12, 768, 6), "12x768-12heads": (12, 768, 12),
        "12x768-swift": (12, 768, 6), "20x1280": (20, 1280, 10),
    }  # fmt: skip
    assert {name for name, run in runs.items() if run.model.family == "swift"} == {"12x768-swift"}
    for name, run in runs.items():
        phase = run.phases[0]
        # At what an H200 does at all; each with evaluations and saves before its end.
        seconds = phase.num_steps * phase.batch_tokens * run.sizes.flops_per_token / 989e12
        assert 10 < seconds < 60, name
        assert 20 < phase.eval_every <= phase.save_every < phase.num_steps / 2, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loader_is_measured() -> None:
    """Whether it is fast enough depends on what else the machine does; that it counts does not."""
    code, last = run("loader.py")
    assert last.split()[0] in ("PASS", "FAIL"), last
    assert code == (0 if last.startswith("PASS") else 1)
    assert int(last.split()[1].replace(",", "")) > 100_000
