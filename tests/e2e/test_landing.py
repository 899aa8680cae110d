"""Landing and preemption on the whole path, and the quick forms of the benchmarks that prove them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "src/homing/presets/texts/shakespeare.txt.xz"


@pytest.mark.acceptance(106)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["landing", "preempt"])
def test_the_quick_form_passes(name: str) -> None:
    argv = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), "--quick"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=380)
    assert done.stdout.splitlines()[-1].startswith("PASS"), done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0


class Project:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A cent a second, so that a limit of cents is one of seconds.
        self.env = {**os.environ, "HOMING_HOME": str(folder / "home"), "HOMING_LOCAL_RATE": "36", "NO_COLOR": "1"}
        self.env["OMP_NUM_THREADS"] = "1"

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "homing.cli", *words]
        return subprocess.run(
            argv, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False, timeout=600
        )

    def json(self, *words: str) -> dict[str, Any]:
        done = self(*words, "--json")
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found


@pytest.mark.acceptance(123)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_limit_brings_a_finished_model_home_and_a_larger_one_resumes_from_it(tmp_path: Path) -> None:
    homing = Project(tmp_path)
    assert homing("new", "poor", "--from", "tiny", "--text", str(TEXT)).returncode == 0
    assert homing("prep", "poor").returncode == 0
    # More steps than any limit here pays for, each of them short: what the minimum pays for is then mostly the trip.
    changes = ("phases.0.steps=100000", "phases.0.batch_tokens=256", "phases.0.warmup_steps=5", "eval.tokens=1k")
    changes += ("limits.rate=40",)  # so dear an hour is else asked about by name
    steps = [word for change in changes for word in ("--set", change)]
    minimum = Decimal(homing.json("plan", "poor", *steps)["minimum_spend_usd"])
    refused = homing("launch", "poor", *steps, "--spend-limit", str(minimum * Decimal("0.9")), "--yes")
    assert refused.returncode == 2
    assert "too low to finish, push the model and end billing" in refused.stderr

    limit = (minimum * Decimal("1.05")).quantize(Decimal("0.01"))
    assert homing("launch", "poor", *steps, "--spend-limit", str(limit), "--yes").returncode == 0
    watched = homing("watch", "poor")
    assert watched.returncode == 5, watched.stdout[-3000:] + watched.stderr[-3000:]
    assert "Landing: the learning rate decays" in watched.stdout
    assert "Finishing the full plan would cost about $" in watched.stdout
    status = homing.json("status", "poor")
    assert status["state"] == "stopped"
    assert "Landed at step" in status["reason"]
    assert Decimal(status["spend_usd"]) <= limit
    assert homing("fetch", "poor").returncode == 0
    said = homing("generate", "poor", "--prompt", "ROMEO:", "--tokens", "8")
    assert said.returncode == 0, said.stderr

    landed = status["outcome"]["step"]
    assert homing("launch", "poor", "--resume", "--spend-limit", str(limit * 20), "--yes").returncode == 0
    deadline = time.monotonic() + 300
    while (homing.json("status", "poor")["heartbeat"] or {}).get("step", 0) <= landed + 5:
        assert time.monotonic() < deadline, "it did not resume"
        time.sleep(1.0)
    assert homing("stop", "poor").returncode == 0
    events = homing.json("status", "poor")
    assert events["outcome"]["step"] > landed
    assert events["state"] == "stopped"
    assert homing("destroy", "poor", "--yes").returncode == 0
