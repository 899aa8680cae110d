"""Fixtures of the training half: a tiny language, its shards and a run on them. How they are made: tiny.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# tests/lm/**/test_*.py say `from tiny import make_run`, whatever pytest's import mode is.
sys.path.insert(0, str(Path(__file__).parent))

from tiny import make_data, make_run, make_run_dir

from homing.wire.run import Run


@pytest.fixture
def tiny_data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    make_data(folder)
    return folder


@pytest.fixture
def tiny_run(tiny_data: Path) -> Run:
    return make_run(tiny_data)


@pytest.fixture
def tiny_run_dir(tmp_path: Path, tiny_run: Run) -> Path:
    return make_run_dir(tmp_path / "run", tiny_run)
