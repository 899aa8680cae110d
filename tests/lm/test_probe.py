"""The probe of a machine, in the trainer's environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from homing.lm import probe


def test_every_figure_is_a_number_above_nothing_and_the_disk_is_left_clean(tmp_path: Path) -> None:
    found = probe.measure(str(tmp_path), size=64, seconds=0.01)
    for name in ("matmul_tflops", "copy_gb_s", "attention_ms", "disk_mb_s"):
        value = found[name]
        assert isinstance(value, float)
        assert value >= 0
    assert found["device"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_as_a_program_its_last_line_is_the_figures(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "homing.lm.probe", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["disk_mb_s"] > 0
