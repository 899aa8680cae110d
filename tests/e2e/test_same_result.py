"""The same trainer here and there, and no work lost: real text, real trainer, real processes, equal losses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from homing.wire import file_names
from homing.world import World

RUN_FILE = """
name: stone
data: {text: [shakespeare.txt.xz], val_fraction: 0.05}
tokenizer: {vocab_size: 512, specials: one}
model: {arch: qwen3, layers: 2, width: 64, heads: 2, ffn_width: 128, context: 64, tied: true}
phases:
  - {kind: pretrain, steps: 300, batch_tokens: 256, optimizer: muon}
eval: {every: 50, tokens: 2k}
checkpoint: {every: 50}
sample: {tokens: 8}
train: {log_every: 1, threads: 1}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from importlib.resources import files

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/stone.yaml").write_text(RUN_FILE)
    text = files("homing.presets") / "texts/shakespeare.txt.xz"
    (tmp_path / "shakespeare.txt.xz").write_bytes(text.read_bytes())
    homing(tmp_path, "prep", "stone")
    return tmp_path


def homing(folder: Path, *argv: str) -> str:
    command = [sys.executable, "-m", "homing.cli", *argv]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
    return done.stdout


def losses(metrics: Path) -> list[tuple[int, Any, Any]]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(line["step"], line["loss"], line["val_loss"]) for line in lines]


def only(pattern: Path, glob: str) -> Path:
    (found,) = pattern.glob(glob)
    return found


@pytest.mark.acceptance(87)
def test_training_here_and_through_the_control_plane_gives_the_same_losses(folder: Path, homing_home: Path) -> None:
    homing(folder, "train", "stone")
    here = losses(only(homing_home / "runs", "stone-*/metrics.jsonl"))
    homing(folder, "launch", "stone", "--spend-limit", "1", "--yes")
    homing(folder, "watch", "stone")
    there = losses(only(homing_home / "store/runs", "stone-*/metrics.jsonl"))
    assert len({step for step, *_ in here}) >= 300
    assert here == there


@pytest.mark.acceptance("P3")
def test_a_machine_that_is_lost_costs_no_step(folder: Path, homing_home: Path) -> None:
    homing(folder, "train", "stone")
    never_lost = losses(only(homing_home / "runs", "stone-*/metrics.jsonl"))

    homing(folder, "launch", "stone", "--spend-limit", "1", "--yes")
    run = only(homing_home / "store/runs", "stone-*")
    wait_for_a_checkpoint(run)
    lose_every_machine(homing_home)
    homing(folder, "destroy", "stone", "--yes")
    homing(folder, "launch", "stone", "--resume", "--spend-limit", "1", "--yes")
    homing(folder, "watch", "stone")

    assert losses(run / "metrics.jsonl") == never_lost
    runs = json.loads(homing(folder, "runs", "--json"))
    assert runs["billing"] == []
    lines = json.loads(homing(folder, "ledger", "stone", "--json"))["lines"]
    assert [line["attempt"] for line in lines] == [1, 2]


def wait_for_a_checkpoint(run: Path) -> None:
    deadline = time.monotonic() + 120
    while not list(run.glob("checkpoints/pretrain/step-*/manifest.json")):
        assert time.monotonic() < deadline, f"no checkpoint came to {run}"
        time.sleep(0.01)


def lose_every_machine(home: Path) -> None:
    """Power off, and the disk is gone with it."""
    prefix = f"homing-{(home / 'owner').read_text().strip()}"
    while found := World().marked(file_names.MARK_ENV, prefix):
        for process, _ in found:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    for instance in (home / "local").iterdir():
        shutil.rmtree(instance / "work")
