"""A phase of adapters through the real trainer: what its checkpoints hold, exact resume, and the phase after it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_trainer import kill_trainer_after
from safetensors.torch import load_file
from tiny import make_data, make_run, make_run_dir

from homing.errors import IntegrityError
from homing.lm.generate.load_model import load_for_use
from homing.lm.model import lora
from homing.lm.train.loop import train
from homing.lm.train.stop_requests import ControlRequests, Stop
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.event_lines import Metric, Outcome
from homing.wire.run_json import Lora, Optimizer, Run

ADAM = Optimizer("adamw", 0.01, 0.01, 0.01, 0.01, 0.0)
STILL = Optimizer("adamw", 1e-7, 1e-7, 1e-7, 1e-7, 0.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Data, and a run with a trained first phase."""
    folder = tmp_path_factory.mktemp("base")
    make_data(folder / "data")
    go(folder / "run", make_run(folder / "data"))
    return folder / "data", folder / "run"


def go(run_dir: Path, run: Run, requests: ControlRequests | None = None) -> Outcome:
    return train(make_run_dir(run_dir, run), say=lambda line: None, requests=requests)


class StopAt(ControlRequests):
    """Requests a stop after N polls, as a signal would."""

    def __init__(self, run_dir: Path, looks: int) -> None:
        super().__init__(run_dir)
        self.looks = looks

    def stop(self, *, save_s: float = 0.0) -> Stop | None:
        self.looks -= 1
        return Stop("signal", "SIGTERM was received.") if self.looks <= 0 else None


def chain(data_dir: Path, *later: dict[str, Any]) -> Run:
    run = make_run(data_dir)
    more = [dataclasses.replace(run.phases[0], **{"num_steps": 8, "optimizer": ADAM, **changes}) for changes in later]
    return dataclasses.replace(run, phases=[run.phases[0], *more])


def started(base_run: Path, run_dir: Path) -> Path:
    shutil.copytree(base_run, run_dir)
    return run_dir


def losses(run_dir: Path, phase: str) -> list[tuple[Any, ...]]:
    lines = [codec.loads(Metric, line) for line in (run_dir / file_names.METRICS).read_text().splitlines()]
    return [(m.step, m.loss, m.grad_norm, m.val_loss) for m in lines if m.phase == phase]


LORA = {"method": "lora", "lora": Lora(rank=4, alpha=8.0, targets=["all"], dropout=0.2)}
QLORA = {**LORA, "method": "qlora", "recompute": "all", "optimizer": dataclasses.replace(ADAM, states="int8")}


@pytest.mark.acceptance(94, 95)
@pytest.mark.slow
@pytest.mark.parametrize("method", [LORA, QLORA], ids=["lora", "qlora"])
def test_adapters_learn_resume_bit_for_bit_and_the_next_phase_takes_them_in(
    method: dict[str, Any], base: tuple[Path, Path], tmp_path: Path
) -> None:
    data_dir, base_run = base
    start = base_run / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(12)
    changes = {"num_steps": 8, "optimizer": ADAM, **method, "init_from": str(start)}
    run = make_run(data_dir, **changes)
    straight, broken = tmp_path / "a", tmp_path / "b"
    assert go(straight, run).state == "done"
    figures = losses(straight, "pretrain")
    assert figures[-1][3] < figures[3][3], "the held-out loss falls"
    assert go(broken, run, StopAt(broken, 6)).state == "stopped"
    assert go(broken, run).state == "done"
    assert losses(broken, "pretrain") == figures
    one, other = (d / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(8) for d in (straight, broken))
    for name in (file_names.ADAPTER, file_names.OPTIMIZER):
        left, right = load_file(one / name), load_file(other / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)

    assert not (one / file_names.WEIGHTS).exists(), "the base is not in the checkpoint, only named"
    assert len(json.loads((one / file_names.ADAPTER_CONFIG).read_text())["homing_base_sha256"]) == 64
    assert (one / file_names.ADAPTER).stat().st_size < 0.5 * (start / file_names.WEIGHTS).stat().st_size

    after = {"kind": "mid", "method": "full", "lora": None, "recompute": "none", "init_from": ""}
    full = dataclasses.replace(run.phases[0], **after, optimizer=STILL, num_steps=4)
    go(straight, dataclasses.replace(run, phases=[run.phases[0], full]))
    # A base in four bits loses its rounding when the adapter is put into the weights themselves.
    assert losses(straight, "mid")[-1][3] == pytest.approx(figures[-1][3], abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("method", [LORA, QLORA], ids=["lora", "qlora"])
def test_adapters_killed_twice_end_with_the_bits_of_never_stopping(
    method: dict[str, Any], base: tuple[Path, Path], tmp_path: Path
) -> None:
    """Killed by SIGKILL during a step or a save; with dropout, which must continue with the same draws."""
    data_dir, base_run = base
    start = base_run / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(12)
    changes = {"num_steps": 16, "save_every": 1, "eval_every": 0, "optimizer": ADAM, **method, "init_from": str(start)}
    run = make_run(data_dir, **changes)
    whole, killed = (make_run_dir(tmp_path / way, run) for way in ("whole", "killed"))
    alone: dict[str, Any] = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stdout": subprocess.DEVNULL}
    for step in (2, 5):
        kill_trainer_after(killed, "pretrain", step)
    for run_dir in (whole, killed):
        subprocess.run([sys.executable, "-m", "homing.lm.train", str(run_dir)], check=True, **alone)
    ends = [run_dir / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(16) for run_dir in (whole, killed)]
    for name in (file_names.ADAPTER, file_names.OPTIMIZER):
        one, other = (hashlib.sha256((end / name).read_bytes()).hexdigest() for end in ends)
        assert one == other, name
    assert losses(killed, "pretrain") == losses(whole, "pretrain")


@pytest.mark.acceptance(101)
@pytest.mark.slow
def test_a_new_run_starts_from_an_adapter_of_another_run_with_its_base_weights(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    data_dir, base_run = base
    start = base_run / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(12)
    adapter = make_run(data_dir, **{"num_steps": 8, "optimizer": ADAM, **LORA, "init_from": str(start)})
    after = make_run(data_dir, **{"kind": "mid", "num_steps": 4, "optimizer": ADAM}).phases[0]
    go(tmp_path / "first", dataclasses.replace(adapter, phases=[adapter.phases[0], after]))
    # As it comes home or travels to an instance: the adapter without its optimizer, the two apart from their run.
    sent, neighbor = tmp_path / "data/start-mid", tmp_path / "data/start-mid-base"
    trained = tmp_path / "first" / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(8)
    shutil.copytree(trained, sent, ignore=lambda *_: [file_names.OPTIMIZER, file_names.STATE])
    shutil.copytree(start, neighbor)
    places = {"init_from": "../data/start-mid", "init_base": "../data/start-mid-base"}
    alone = dataclasses.replace(adapter, phases=[dataclasses.replace(after, **places)])
    go(tmp_path / "second", alone)
    assert losses(tmp_path / "second", "mid") == losses(tmp_path / "first", "mid"), "as in one chain"
    manifest = (
        tmp_path / "second" / file_names.CHECKPOINTS / "mid" / file_names.step_dir(4) / file_names.MANIFEST
    ).read_bytes()
    lineage = codec.loads(CheckpointManifest, manifest).lineage
    assert [stage.method for stage in lineage] == ["full", "lora", "full"]
    assert [stage.phase for stage in lineage] == ["pretrain", "pretrain", "mid"]

    other = tmp_path / "second" / file_names.CHECKPOINTS / "mid" / file_names.step_dir(4) / file_names.WEIGHTS
    shutil.copy(other, neighbor / file_names.WEIGHTS)
    (neighbor / file_names.MANIFEST).unlink()  # now nothing verifies them
    with pytest.raises(IntegrityError, match="different base weights"):
        go(tmp_path / "third", alone)


@pytest.mark.slow
def test_an_adapter_on_top_of_an_adapter_is_put_together_with_all_below_it(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    data_dir, base_run = base
    start = base_run / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(12)
    first = make_run(data_dir, **{"num_steps": 8, "optimizer": ADAM, **LORA, "init_from": str(start)})
    other = Lora(rank=2, alpha=8.0, targets=["q", "down"])
    second = dataclasses.replace(first.phases[0], kind="mid", init_from="", lora=other)
    go(tmp_path / "a", dataclasses.replace(first, phases=[first.phases[0], second]))
    checkpoints = tmp_path / "a" / file_names.CHECKPOINTS
    places = {kind: str(checkpoints / kind / file_names.step_dir(8)) for kind in ("pretrain", "mid")}
    still = {"kind": "mid", "num_steps": 2, "optimizer": STILL}
    go(tmp_path / "b", make_run(data_dir, **still, init_from=places["mid"], init_base=places["pretrain"]))
    assert losses(tmp_path / "b", "mid")[-1][3] == pytest.approx(losses(tmp_path / "a", "mid")[-1][3], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", [LORA, QLORA], ids=["lora", "qlora"])
def test_a_phase_with_the_same_adapters_continues_them_on_their_base_weights(
    method: dict[str, Any], base: tuple[Path, Path], tmp_path: Path
) -> None:
    data_dir, base_run = base
    start = base_run / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(12)
    first = make_run(data_dir, **{"num_steps": 8, "optimizer": ADAM, **method, "init_from": str(start)})
    no_dropout = Lora(rank=4, alpha=8.0, targets=list(lora.TARGETS))
    second = dataclasses.replace(
        first.phases[0], kind="mid", init_from="", num_steps=2, optimizer=STILL, lora=no_dropout
    )
    go(tmp_path / "a", dataclasses.replace(first, phases=[first.phases[0], second]))
    folders = [
        tmp_path / "a" / file_names.CHECKPOINTS / kind / file_names.step_dir(step)
        for kind, step in (("pretrain", 8), ("mid", 2))
    ]
    before, after = (load_file(folder / file_names.ADAPTER) for folder in folders)
    assert all(torch.allclose(before[name], after[name], atol=1e-5) for name in before), "no new ones, which begin at 0"
    assert losses(tmp_path / "a", "mid")[-1][3] == pytest.approx(losses(tmp_path / "a", "pretrain")[-1][3], abs=1e-4)
    messages = [json.loads((folder / file_names.ADAPTER_CONFIG).read_text()) for folder in folders]
    assert messages[0]["homing_base_sha256"] == messages[1]["homing_base_sha256"], (
        "still one adapter of the first weights"
    )
    assert [paper["homing_base_stage"] for paper in messages] == [0, 0]
    model, _ = load_for_use(folders[1], "cpu", precision="fp32")
    assert model.lora is None


@pytest.mark.acceptance(94)
@pytest.mark.slow
def test_another_base_under_the_same_adapter_is_refused(base: tuple[Path, Path], tmp_path: Path) -> None:
    data_dir, base_run = base
    run_dir = started(base_run, tmp_path / "a")
    run = chain(data_dir, {"kind": "mid", **LORA})
    go(run_dir, run, StopAt(run_dir, 5))
    other = make_run(data_dir)
    go(tmp_path / "other", dataclasses.replace(other, seed=8))
    shutil.rmtree(run_dir / file_names.CHECKPOINTS / "pretrain")
    shutil.copytree(
        tmp_path / "other" / file_names.CHECKPOINTS / "pretrain", run_dir / file_names.CHECKPOINTS / "pretrain"
    )
    elsewhere = dataclasses.replace(run, phases=[dataclasses.replace(run.phases[0], init_from=""), run.phases[1]])
    with pytest.raises(IntegrityError, match="different base weights"):
        _resume_mid_only(run_dir, elsewhere)


def _resume_mid_only(run_dir: Path, run: Run) -> None:
    """The first phase's checkpoint belongs to another seed, so the chain would refuse it first: only mid is run."""
    start = run_dir / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(12)
    from homing.lm.train.build_phase import build
    from homing.lm.train.checkpoints.manager import CheckpointManager
    from homing.lm.train.metrics import Journal
    from homing.lm.train.open_session import open_session

    journal = Journal(run_dir, say=lambda line: None)
    try:
        session = open_session(run, run_dir, journal, ControlRequests(run_dir))
        checkpoints = CheckpointManager(session, run.phases[1], lambda kind, text, *, notice=False, **data: None)
        found = checkpoints.find()
        assert found is not None
        checkpoints.load(found, build(session, run.phases[1], start))
    finally:
        journal.close()


@pytest.mark.acceptance(94)
@pytest.mark.slow  # importing peft takes ten seconds
@pytest.mark.filterwarnings("ignore")
def test_peft_opens_the_folder_of_a_checkpoint(base: tuple[Path, Path], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    data_dir, base_run = base
    run_dir = started(base_run, tmp_path / "a")
    go(run_dir, chain(data_dir, {"kind": "mid", **LORA}))
    checkpoints = run_dir / file_names.CHECKPOINTS
    reference = AutoModelForCausalLM.from_pretrained(checkpoints / "pretrain" / file_names.step_dir(12))
    adapted = PeftModel.from_pretrained(reference, checkpoints / "mid" / file_names.step_dir(8))
    tensors = load_file(checkpoints / "mid" / file_names.step_dir(8) / file_names.ADAPTER)
    live = {name.replace(".default", ""): p for name, p in adapted.named_parameters() if "lora_" in name}
    assert live.keys() == tensors.keys()
    assert all(torch.equal(live[name], tensors[name]) for name in tensors)
