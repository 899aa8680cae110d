"""A folder with a run file and prepared data, and `homing` to type in it; the trainer is the small one of the rig."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import MOSS, Said, clear, homing, look_more_often, make_data, trainer_argv

Homing = Callable[..., Said]

RUN_FILE = """
name: moss
data: {text: [moss.txt]}
tokenizer: {vocab_size: 512}
model: {arch: llama, layers: 2, width: 64, heads: 4, ffn_width: 128, context: 64, tied: true}
phases:
  - {kind: pretrain, steps: 20, batch_tokens: 128, lr: 0.01, warmup_steps: 1}
train: {device: cpu}
"""


def lay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int, step_s: float, how: str = "ok") -> Path:
    folder = tmp_path / "project"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs/moss.yaml").write_text(RUN_FILE)
    (folder / "moss.txt").write_bytes(MOSS)
    make_data(folder / "data/moss")
    monkeypatch.chdir(folder)
    look_more_often(monkeypatch)
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=steps, step_s=step_s, how=how),
    )
    return folder


def typing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Homing:
    return lambda *argv: homing(capsys, monkeypatch, *argv)


def cli_with(*, steps: int) -> Any:
    """A fixture, as `cli = cli_with(steps=12)` in a test file: `homing` in such a folder, and nothing left after it."""

    @pytest.fixture
    def cli(
        tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Iterator[Homing]:
        lay_out(tmp_path, monkeypatch, steps=steps, step_s=0.02)
        yield typing(capsys, monkeypatch)
        clear(homing_home)

    return cli
