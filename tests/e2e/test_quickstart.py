"""The promise of the first five minutes: one command, a trained model, a receipt, nothing left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.acceptance(141, "P6", "P7")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_trains_fetches_speaks_and_leaves_nothing(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "homing.cli", "quickstart", "--yes", "--json"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    figures = json.loads(done.stdout)
    assert figures["val_loss"] < 0.95 * figures["bigram_nats"]
    assert figures["sample"].strip()
    assert float(figures["spend_usd"]) > 0
    assert json.loads((tmp_path / "homing-quickstart" / "quickstart.json").read_text())["run"] == figures["run"]

    argv = [sys.executable, "-m", "homing.cli", "runs", "--json"]
    runs = json.loads(subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert [run["state"] for run in runs["runs"]] == ["done"]
    assert runs["billing"] == []
