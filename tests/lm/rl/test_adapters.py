"""Reinforcement of adapters on frozen weights, through the real trainer: what is trained, what is frozen, and what
the phase is pulled towards."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import make_rl_run, small_model
from tiny import make_run_dir

from homing.lm.generate.load_model import load_for_use
from homing.lm.model import Decoder
from homing.lm.phases.rl import Reinforce
from homing.lm.train import loop
from homing.lm.train.build_phase import Built
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.event_lines import Metric
from homing.wire.run_json import Lora, Optimizer, Run

ADAM = Optimizer("adamw", 0.02, 0.02, 0.02, 0.02, 0.0)
LORA = {"method": "lora", "lora": Lora(rank=4, alpha=8.0, dropout=0.1), "optimizer": ADAM}
QLORA = {**LORA, "method": "qlora", "recompute": "all"}
DORA = {**LORA, "lora": Lora(rank=2, alpha=4.0, is_dora=True, targets=["q", "v", "down"])}
# Nearly every sample gets something, so that there is something to learn from: how long it is.
REWARD = "def reward(prompt, completion, answer):\n    return completion.count('e') + len(completion)\n"


def make_adapter_run(folder: Path, phase: dict[str, Any], **rl: Any) -> Run:
    """An rl run on weights in a neighboring folder."""
    every = {"save_every": 1, "keep_last": 9, "eval_every": 0, "init_from": str(folder / "start")}
    run = make_rl_run(folder / "data", phase={**every, **phase}, **rl)
    (folder / "data/reward.py").write_text(REWARD)
    if not (folder / "start").exists():
        (folder / "start").mkdir()
        save_file(small_model(run).weights_for_disk(), folder / "start" / file_names.WEIGHTS)
    made = run.phases[0]
    assert made.rl is not None
    tasks = [dataclasses.replace(task, reward="reward.py") for task in made.rl.tasks]
    return with_phases(run, dataclasses.replace(made, rl=dataclasses.replace(made.rl, tasks=tasks, pass_reward=3.0)))


def with_phases(run: Run, *phases: Any) -> Run:
    return dataclasses.replace(run, phases=list(phases))


def go(run_dir: Path, run: Run) -> Path:
    loop.train(make_run_dir(run_dir, run), say=lambda line: None)
    return run_dir


def saved(run_dir: Path, step: int, kind: str = "rl") -> Path:
    return run_dir / file_names.CHECKPOINTS / kind / file_names.step_dir(step)


def metrics(run_dir: Path, kind: str = "rl") -> list[Metric]:
    lines = [codec.loads(Metric, line) for line in (run_dir / file_names.METRICS).read_text().splitlines()]
    return [line for line in lines if line.phase == kind]


def messages(run_dir: Path) -> list[tuple[Any, ...]]:
    return [(line.step, line.loss, line.more.get("reward"), line.more.get("kl")) for line in metrics(run_dir)]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Built, dict[str, torch.Tensor]]]:
    """What each phase trained, and a copy of its frozen weights from the start."""
    found: list[tuple[Built, dict[str, torch.Tensor]]] = []

    def watched(*args: Any) -> Built:
        made = plain(*args)
        found.append((made, {name: tensor.clone() for name, tensor in still(made.model).items()}))
        return made

    plain = loop.build
    monkeypatch.setattr(loop, "build", watched)
    return found


def still(model: Decoder) -> dict[str, torch.Tensor]:
    trained = {name for name, parameter in model.named_parameters() if ".adapter." in name}
    return {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if name not in trained}


@pytest.mark.acceptance(91)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "rl"),
    [
        (LORA, {}),
        (LORA, {"updates_per_rollout": 3, "clip_high": 0.3, "kl": 0.1, "advantage": "mean"}),
        (QLORA, {"kl": 0.1}),
        (DORA, {"kl": 0.1}),
    ],
    ids=["lora", "lora, several updates and a pull", "qlora", "dora"],
)
def test_adapters_learn_the_weights_stand_still_and_a_resumed_run_is_bit_for_bit_the_same(
    tmp_path: Path, built: list[tuple[Built, dict[str, torch.Tensor]]], phase: dict[str, Any], rl: dict[str, Any]
) -> None:
    run = make_adapter_run(tmp_path, phase, **rl)
    whole = go(tmp_path / "whole", run)
    ((made, before),) = built
    assert made.model.lora is not None
    assert before
    assert all(torch.equal(before[name], tensor) for name, tensor in still(made.model).items())
    first, last = (load_file(saved(whole, step) / file_names.ADAPTER) for step in (1, 4))
    assert not any(torch.equal(first[name], last[name]) for name in first if "lora_B" in name), "all of them learn"
    assert not (saved(whole, 4) / file_names.WEIGHTS).exists()

    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    for later in (3, 4):
        shutil.rmtree(saved(resumed, later))
    go(resumed, run)
    again = load_file(saved(resumed, 4) / file_names.ADAPTER)
    assert all(torch.equal(last[name], again[name]) for name in last)
    assert messages(resumed) == messages(whole)
    merged, _ = load_for_use(saved(whole, 4), "cpu", base=tmp_path / "start", precision="fp32")
    assert merged.lora is None, "with its base it is weights as others are"


@pytest.mark.slow
def test_a_pull_is_towards_the_frozen_weights_without_a_second_copy_of_them(
    tmp_path: Path, built: list[tuple[Built, dict[str, torch.Tensor]]]
) -> None:
    go(tmp_path / "run", make_adapter_run(tmp_path, LORA, kl=0.5))
    ((made, _),) = built
    work = cast(Reinforce, made.work)
    assert work.start is None
    assert set(work.start_adapters.values()) == {None}
    pulls = [line.more["kl"] for line in metrics(tmp_path / "run")]
    assert pulls[0] == pytest.approx(0.0, abs=1e-6), "new adapters add nothing"
    assert pulls[-1] > 1e-4, "and are pulled back as soon as they do"
    go(tmp_path / "free", make_adapter_run(tmp_path, LORA))
    ends = [load_file(saved(tmp_path / name, 4) / file_names.ADAPTER) for name in ("run", "free")]
    assert not all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.slow
@pytest.mark.parametrize("phase", [LORA, QLORA], ids=["lora", "qlora"])
def test_after_a_phase_of_the_same_adapters_it_goes_on_with_them_and_is_pulled_to_where_they_were(
    tmp_path: Path, phase: dict[str, Any], built: list[tuple[Built, dict[str, torch.Tensor]]]
) -> None:
    run = make_adapter_run(tmp_path, phase, kl=0.5)
    reinforced = dataclasses.replace(run.phases[0], init_from="")
    text = dataclasses.replace(run.phases[0], kind="mid", rl=None)
    run_dir = go(tmp_path / "run", with_phases(run, text, reinforced))
    before, after = (load_file(saved(run_dir, 4, kind) / file_names.ADAPTER) for kind in ("mid", "rl"))
    start = cast(Reinforce, built[1][0].work).start_adapters
    for name, adapter in start.items():
        assert adapter is not None
        assert torch.equal(adapter.lora_B, before[f"base_model.model.{name}.lora_B.weight"])
    assert not any(torch.equal(before[name], after[name]) for name in before)
    pulls = [line.more["kl"] for line in metrics(run_dir)]
    assert pulls[0] == pytest.approx(0.0, abs=1e-6)
    assert pulls[-1] > 0.0
    metadata_files = [
        json.loads((saved(run_dir, 4, kind) / file_names.ADAPTER_CONFIG).read_text()) for kind in ("mid", "rl")
    ]
    assert metadata_files[0]["homing_base_sha256"] == metadata_files[1]["homing_base_sha256"], (
        "one adapter, of the same weights"
    )
    manifest = codec.loads(CheckpointManifest, (saved(run_dir, 4) / file_names.MANIFEST).read_bytes())
    assert [(stage.phase, stage.method) for stage in manifest.lineage[1:]] == [
        ("mid", phase["method"]), ("rl", phase["method"])
    ]  # fmt: skip


@pytest.mark.slow
def test_after_a_phase_of_other_adapters_these_are_put_into_the_weights_and_new_ones_begin(tmp_path: Path) -> None:
    run = make_adapter_run(tmp_path, LORA, kl=0.5)
    text = dataclasses.replace(run.phases[0], kind="mid", rl=None, lora=Lora(rank=2, alpha=4.0, targets=["o"]))
    run_dir = go(tmp_path / "run", with_phases(run, text, dataclasses.replace(run.phases[0], init_from="")))
    assert metrics(run_dir)[0].more["kl"] == pytest.approx(0.0, abs=1e-6)
    paper = json.loads((saved(run_dir, 4) / file_names.ADAPTER_CONFIG).read_text())
    assert (paper["r"], paper["homing_base_stage"]) == (4, 1)
    model, _ = load_for_use(saved(run_dir, 4), "cpu", precision="fp32")
    assert model.lora is None
