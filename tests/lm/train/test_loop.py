"""The loop: a golden run, resume that equals never stopping, and every way in which training may end."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    make_data,
    make_documents,
    make_run,
    make_run_dir,
    write_byte_tokenizer,
    write_manifest,
    write_shards,
)

from homing.errors import DataError, IntegrityError, RunFailed, UsageError
from homing.lm.generate.load_model import load_for_use
from homing.lm.generate.sampling import generate
from homing.lm.model import Decoder, count_params
from homing.lm.phases import pretrain
from homing.lm.train import loop
from homing.lm.train.__main__ import main
from homing.lm.train.checkpoints import checkpoint_files
from homing.lm.train.checkpoints.compatibility import check_same
from homing.lm.train.compute import hardware_choices
from homing.lm.train.loop import train
from homing.lm.train.stop_requests import ControlRequests, Stop
from homing.sampling_settings import SamplingSettings
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, Pointer
from homing.wire.control_files import boot_clock_s
from homing.wire.event_lines import Metric, Outcome
from homing.wire.run_json import Run
from homing.wire.shard_manifest import Split


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder


def go(run_dir: Path, run: Run | None = None, requests: ControlRequests | None = None) -> tuple[Outcome, list[str]]:
    if run is not None:
        make_run_dir(run_dir, run)
    said: list[str] = []
    return train(run_dir, say=said.append, requests=requests), said


class StopAt(ControlRequests):
    """Requests a stop after N polls, as a signal would."""

    def __init__(self, run_dir: Path, looks: int) -> None:
        super().__init__(run_dir)
        self.looks = looks

    def stop(self, *, save_s: float = 0.0) -> Stop | None:
        self.looks -= 1
        return Stop("signal", "SIGTERM was received.") if self.looks <= 0 else None


def metrics(run_dir: Path) -> list[Metric]:
    return [codec.loads(Metric, line) for line in (run_dir / file_names.METRICS).read_text().splitlines()]


def figures(run_dir: Path) -> list[tuple[Any, ...]]:
    """What must not depend on when the run was interrupted: all but time and speed."""
    return [(m.step, m.num_tokens, m.loss, m.lr, m.grad_norm, m.val_loss) for m in metrics(run_dir)]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / file_names.EVENTS).read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def outcome(run_dir: Path) -> Outcome:
    return codec.loads(Outcome, (run_dir / file_names.OUTCOME).read_bytes())


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints/pretrain" / file_names.step_dir(step)
    return checkpoint_files.load(folder, checkpoint_files.verify(folder)).weights


@pytest.mark.acceptance(87)
@pytest.mark.slow
def test_a_tiny_run_learns_and_reproduces_its_loss(tmp_path: Path, data_dir: Path) -> None:
    ended, said = go(tmp_path / "a", make_run(data_dir))
    go(tmp_path / "b", make_run(data_dir))
    first, last = metrics(tmp_path / "a")[0], metrics(tmp_path / "a")[-1]
    assert (ended.state, ended.exit_code, ended.step, ended.is_final) == ("done", 0, 12, True)
    assert outcome(tmp_path / "a") == ended
    assert figures(tmp_path / "a") == figures(tmp_path / "b")
    # The golden figures: another value means that the numbers of training changed, on purpose or not.
    assert first.loss == pytest.approx(GOLDEN_FIRST, abs=2e-3)
    assert last.loss == pytest.approx(GOLDEN_LAST, abs=2e-2)
    assert last.val_loss is not None
    assert last.val_perplexity == pytest.approx(2.718281828**last.val_loss)
    assert any("cpu" in line for line in said)
    assert len([line for line in said if line.startswith("step ")]) == 12


GOLDEN_FIRST, GOLDEN_LAST = 5.694, 2.510


@pytest.mark.acceptance(82, 97)
@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_the_micro_batch_changes_nothing_but_rounding(tmp_path: Path, data_dir: Path, micro_batch: int) -> None:
    go(tmp_path / "a", make_run(data_dir, num_steps=3))
    go(tmp_path / "b", make_run(data_dir, num_steps=3, micro_batch=micro_batch))
    for a, b in zip(metrics(tmp_path / "a"), metrics(tmp_path / "b"), strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-4)


@pytest.mark.acceptance(106, "X13", "P3")
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_resuming_equals_never_stopping_bit_for_bit(tmp_path: Path, data_dir: Path, optimizer: str) -> None:
    run = make_run(data_dir)
    phase = dataclasses.replace(run.phases[0], optimizer=dataclasses.replace(run.phases[0].optimizer, kind=optimizer))
    run = dataclasses.replace(run, phases=[phase])
    go(tmp_path / "whole", run)
    make_run_dir(tmp_path / "cut", run)
    for looks in (3, 4, 2):
        ended, _ = go(tmp_path / "cut", requests=StopAt(tmp_path / "cut", looks))
        assert (ended.state, ended.exit_code) == ("stopped", 75)
    ended, said = go(tmp_path / "cut")
    assert ended.state == "done"
    assert any("Resumed at step 9" in line for line in said)
    assert figures(tmp_path / "whole") == figures(tmp_path / "cut")
    whole, cut = weights(tmp_path / "whole", 12), weights(tmp_path / "cut", 12)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert [event["step"] for event in events(tmp_path / "cut", "resumed")] == [3, 7, 9]


@pytest.mark.acceptance("X10")
@pytest.mark.slow
def test_sampling_and_evaluating_do_not_change_training(tmp_path: Path, data_dir: Path) -> None:
    go(tmp_path / "a", make_run(data_dir, num_steps=6, sample_every=1, eval_every=1))
    go(tmp_path / "b", make_run(data_dir, num_steps=6, sample_every=6, eval_every=0))
    assert [m.loss for m in metrics(tmp_path / "a")] == [m.loss for m in metrics(tmp_path / "b")]
    assert len(list((tmp_path / "a/samples").iterdir())) == 6


def test_a_finished_run_is_not_trained_again(tmp_path: Path, data_dir: Path) -> None:
    go(tmp_path, make_run(data_dir, num_steps=2))
    before = (tmp_path / file_names.METRICS).read_text()
    ended, said = go(tmp_path)
    assert (ended.state, ended.step) == ("done", 2)
    assert any("already trained" in line for line in said)
    assert (tmp_path / file_names.METRICS).read_text() == before


@pytest.mark.acceptance(106)
@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(tmp_path: Path, data_dir: Path) -> None:
    go(tmp_path / "whole", make_run(data_dir))
    go(tmp_path / "hurt", make_run(data_dir))
    newest = tmp_path / "hurt/checkpoints/pretrain" / file_names.step_dir(12) / file_names.WEIGHTS
    data = bytearray(newest.read_bytes())
    data[-5] ^= 8
    newest.write_bytes(data)
    ended, said = go(tmp_path / "hurt")
    assert ended.state == "done"
    assert any("step-00000012 is damaged (" in line and "step-00000008" in line for line in said)
    assert events(tmp_path / "hurt", "checkpoint_refused")
    assert figures(tmp_path / "whole") == figures(tmp_path / "hurt")
    assert torch.equal(*(weights(tmp_path / side, 12)["model.norm.weight"] for side in ("whole", "hurt")))


@pytest.mark.acceptance("X7")
@pytest.mark.slow
def test_a_changed_configuration_is_refused_and_each_difference_named(tmp_path: Path, data_dir: Path) -> None:
    run = make_run(data_dir)
    go(tmp_path, run, StopAt(tmp_path, 2))
    harmless = dataclasses.replace(run.phases[0], keep_last=5, save_every=3, micro_batch=2, eval_every=0)
    go(tmp_path, dataclasses.replace(run, phases=[harmless]), StopAt(tmp_path, 2))
    other = dataclasses.replace(run.phases[0], schedule=dataclasses.replace(run.phases[0].schedule, floor=0.1))
    with pytest.raises(UsageError) as caught:
        go(tmp_path, dataclasses.replace(run, seed=8, phases=[other]))
    assert "phase.schedule.floor: 0.0 in the checkpoint, 0.1 in run.json" in caught.value.why
    assert "seed: 7 in the checkpoint, 8 in run.json" in caught.value.why
    assert outcome(tmp_path).state == "failed"


def as_of_another_version(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A checkpoint of a version with other keys in run.json, and so another hash of the same configuration."""
    run = json.loads((folder / file_names.RUN).read_text())
    change(run)
    (folder / file_names.RUN).write_text(json.dumps(run))
    manifest = codec.loads(CheckpointManifest, (folder / file_names.MANIFEST).read_bytes())
    files = [checkpoint_files._sync_and_hash(folder / file.name) for file in manifest.files]
    manifest = dataclasses.replace(manifest, files=files, config_sha256="0" * 64)
    (folder / file_names.MANIFEST).write_bytes(checkpoint_files._seal(manifest))


@pytest.mark.slow
def test_a_checkpoint_of_a_homing_that_knew_fewer_settings_is_gone_on_from(tmp_path: Path, data_dir: Path) -> None:
    go(tmp_path / "whole", make_run(data_dir))
    go(tmp_path / "old", make_run(data_dir), StopAt(tmp_path / "old", 3))
    folder = tmp_path / "old/checkpoints/pretrain" / file_names.step_dir(3)
    as_of_another_version(folder, lambda run: run["phases"][0]["optimizer"].pop("states"))
    assert go(tmp_path / "old")[0].state == "done"
    assert figures(tmp_path / "old") == figures(tmp_path / "whole")


def test_a_checkpoint_of_a_homing_that_knew_more_settings_is_refused_by_their_names(
    tmp_path: Path, data_dir: Path
) -> None:
    """Their effect is unknown here."""
    go(tmp_path, make_run(data_dir), StopAt(tmp_path, 3))
    folder = tmp_path / "checkpoints/pretrain" / file_names.step_dir(3)
    as_of_another_version(folder, lambda run: run["phases"][0]["optimizer"].update(lookahead=5))
    with pytest.raises(UsageError, match="belongs to a different configuration") as caught:
        go(tmp_path)
    assert "phases.0.optimizer.lookahead" in caught.value.why
    assert "Or resume with the version of homing that wrote it" in caught.value.fix


def test_settings_that_a_checkpoint_is_not_compared_by_may_be_unknown(tmp_path: Path, data_dir: Path) -> None:
    run = make_run(data_dir)
    later = dataclasses.replace(run.phases[0], kind="mid")
    document = json.loads(codec.dumps(dataclasses.replace(run, phases=[*run.phases, later])))
    document["train"]["colour"] = document["limits"]["colour"] = document["phases"][1]["colour"] = "blue"
    (tmp_path / file_names.RUN).write_text(json.dumps(document))
    check_same(tmp_path, "0" * 64, run, run.phases[0])
    document["model"]["colour"] = "blue"
    (tmp_path / file_names.RUN).write_text(json.dumps(document))
    with pytest.raises(UsageError) as caught:
        check_same(tmp_path, "0" * 64, run, run.phases[0])
    assert caught.value.why == "It was written with settings that this version of homing does not have: model.colour."


def test_stop_in_control_json_saves_and_ends_with_75(tmp_path: Path, data_dir: Path) -> None:
    make_run_dir(tmp_path, make_run(data_dir))
    (tmp_path / file_names.CONTROL).write_text(
        '{"schema": "homing.control/1", "stop": true, "reason": "asked at home"}'
    )
    ended, _ = go(tmp_path)
    assert (ended.state, ended.exit_code, ended.step) == ("stopped", 75, 1)
    assert ended.reason == "asked at home"
    assert not ended.is_final
    assert checkpoint_files.list_steps(tmp_path / "checkpoints/pretrain") == [1]
    (messages,) = [
        json.loads(e) for e in (tmp_path / file_names.EVENTS).read_text().splitlines() if "asked at home" in e
    ]
    assert (messages["kind"], messages["text"]) == ("run_stopped", "Stopped at step 1: asked at home")
    assert messages["data"]["why"] == "control"


def test_a_landing_time_that_has_come_saves_and_ends(tmp_path: Path, data_dir: Path) -> None:
    make_run_dir(tmp_path, make_run(data_dir))
    (tmp_path / file_names.CONTROL).write_text(json.dumps({"land_by": boot_clock_s() + 1}))
    assert go(tmp_path)[0].exit_code == 75


@pytest.mark.slow
def test_a_landing_leaves_time_for_the_evaluation_and_the_step_that_come_before_the_next_look(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, asked = pretrain.evaluate, []

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return plain(*args, **kwargs)

    class Noting(ControlRequests):
        def stop(self, *, save_s: float = 0.0) -> Stop | None:
            asked.append(save_s)
            return None

    monkeypatch.setattr(pretrain, "evaluate", slow)
    go(tmp_path, make_run(data_dir, num_steps=5, eval_every=2, save_every=0), requests=Noting(tmp_path))
    assert len(asked) == 4  # not after the last step, which saves anyway
    assert asked[0] < 0.3 <= asked[3]
    assert asked[2] < 0.3


def test_an_unreadable_control_file_is_reported_and_training_continues(tmp_path: Path, data_dir: Path) -> None:
    make_run_dir(tmp_path, make_run(data_dir, num_steps=3))
    (tmp_path / file_names.CONTROL).write_text('{"stop": ')
    assert go(tmp_path)[0].state == "done"
    assert len(events(tmp_path, "control_unreadable")) == 1


@pytest.mark.slow
@pytest.mark.acceptance("X25")
def test_the_wall_clock_limit_ends_with_75_and_says_why(tmp_path: Path, data_dir: Path) -> None:
    ended, _ = go(tmp_path, make_run(data_dir, num_steps=4000, train={"time_limit_s": 0.3}))
    assert (ended.state, ended.exit_code) == ("stopped", 75)
    assert "time limit" in ended.reason


class Poisoned:
    """The loss of some steps is not a number; counts optimizer steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bad_calls: set[int]) -> None:
        self.calls, plain = 0, Decoder.loss

        def loss(model: Decoder, ids: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
            self.calls += 1
            value = plain(model, ids, targets, **how)
            return value * float("nan") if self.calls in bad_calls else value

        monkeypatch.setattr(Decoder, "loss", loss)


@pytest.mark.slow
@pytest.mark.acceptance("X11")
def test_a_step_that_is_not_finite_is_skipped_counted_and_never_logged_as_nan(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Poisoned(monkeypatch, {5})  # two micro-batches a step: the third step
    ended, _ = go(tmp_path, make_run(data_dir, save_every=1, keep_last=9, num_steps=5))
    assert ended.state == "done"
    assert [m.loss is None for m in metrics(tmp_path)] == [False, False, True, False, False]
    assert "NaN" not in (tmp_path / file_names.METRICS).read_text()
    assert [event["step"] for event in events(tmp_path, "step_skipped")] == [3]
    before, after = weights(tmp_path, 2), weights(tmp_path, 3)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(after["model.norm.weight"], weights(tmp_path, 4)["model.norm.weight"])
    folder = tmp_path / "checkpoints/pretrain" / file_names.step_dir(3)
    loaded = checkpoint_files.load(folder, checkpoint_files.verify(folder))
    assert (loaded.state.num_skipped, loaded.state.rows_consumed) == (1, 24)
    assert int(loaded.optimizer["num_steps"]) == 2


@pytest.mark.slow
def test_figures_that_are_read_a_step_late_are_the_same_and_skip_the_same_steps(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(data_dir, save_every=4, keep_last=9, num_steps=9, train={"log_every": 3})
    Poisoned(monkeypatch, {5, 17})
    go(tmp_path / "at-once", run)
    monkeypatch.undo()
    Poisoned(monkeypatch, {5, 17})
    monkeypatch.setitem(loop.LATE, "cpu", 1)
    go(tmp_path / "late", run)
    assert figures(tmp_path / "late") == figures(tmp_path / "at-once")
    for step in (4, 8, 9):
        before, after = weights(tmp_path / "at-once", step), weights(tmp_path / "late", step)
        assert all(torch.equal(before[name], after[name]) for name in before)
    for folder in ("at-once", "late"):
        assert [event["text"].split(" skipped")[0] for event in events(tmp_path / folder, "step_skipped")] == [
            "Step 3", "Step 9"
        ]  # fmt: skip


@pytest.mark.acceptance(119)
def test_too_many_bad_steps_in_a_row_fail_the_run_with_the_reason(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Poisoned(monkeypatch, set(range(9, 1000)))
    with pytest.raises(RunFailed, match="3 steps in a row"):
        go(tmp_path, make_run(data_dir, train={"max_bad_steps": 3}))
    ended = outcome(tmp_path)
    assert (ended.state, ended.exit_code, ended.step, ended.is_final) == ("failed", 1, 7, True)
    assert checkpoint_files.find_latest(tmp_path / "checkpoints/pretrain").folder is not None


@pytest.mark.acceptance(103)
def test_a_failed_save_warns_and_training_continues(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = checkpoint_files.save

    def full(phase_dir: Path, manifest: Any, state: Any, **rest: Any) -> Path:
        if state.step == 4:
            raise RunFailed("The checkpoint for step 4 could not be written.", os.strerror(errno.ENOSPC))
        return plain(phase_dir, manifest, state, **rest)

    monkeypatch.setattr(checkpoint_files, "save", full)
    ended, said = go(tmp_path, make_run(data_dir))
    assert ended.state == "done"
    assert any("warning" in line and "step 4" in line for line in said)
    assert [event["step"] for event in events(tmp_path, "save_failed")] == [4]
    assert checkpoint_files.list_steps(tmp_path / "checkpoints/pretrain") == [8, 12]


def test_a_final_save_that_fails_is_a_failure(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Path:
        raise RunFailed("It could not be written.", os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_files, "save", full)
    said: list[str] = []
    with pytest.raises(RunFailed) as caught:
        train(make_run_dir(tmp_path, make_run(data_dir, num_steps=2)), say=said.append)
    assert outcome(tmp_path).state == "failed"
    assert caught.value.what.startswith("The run cannot finish: its checkpoint for step 2 could not be written to ")
    assert caught.value.why == os.strerror(errno.ENOSPC)
    assert "checkpoint.keep_last" in caught.value.fix
    assert caught.value.fix.endswith("starts over, since there is no other checkpoint.")
    assert not [line for line in said if "could not be written" in line], "it is said once, by the error"


@pytest.mark.acceptance(81, "P5")
def test_a_run_that_needs_a_gpu_never_runs_on_the_cpu(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunFailed, match="needs a CUDA GPU, but none works on this machine"):
        go(tmp_path / "auto", make_run(data_dir, train={"needs_gpu": True, "device": "auto"}))
    with pytest.raises(RunFailed, match="needs a CUDA GPU"):
        go(tmp_path / "cpu", make_run(data_dir, train={"needs_gpu": True}))
    assert not (tmp_path / "auto" / file_names.METRICS).exists()
    assert outcome(tmp_path / "auto").exit_code == 1


@pytest.mark.acceptance(99, 146, "X3")
@pytest.mark.slow
def test_out_of_memory_lowers_an_automatic_micro_batch_with_a_notice(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Decoder.loss

    def tight(model: Decoder, ids: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
        if len(ids) > 2:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return plain(model, ids, targets, **how)

    go(tmp_path / "a", make_run(data_dir, num_steps=3, micro_batch=2))
    monkeypatch.setattr(Decoder, "loss", tight)
    _, said = go(tmp_path / "b", make_run(data_dir, num_steps=3, micro_batch=0))
    assert any("micro-batch lowered from 8 to 4" in line for line in said)
    assert any("micro-batch lowered from 4 to 2" in line for line in said)
    assert figures(tmp_path / "a") == figures(tmp_path / "b")
    manifest = checkpoint_files.verify(tmp_path / "b/checkpoints/pretrain" / file_names.step_dir(3))
    assert manifest.choices["micro_batch"] == 2
    with pytest.raises(RunFailed, match=r"Out of memory at a micro-batch of 4 rows \(peak [\d.]+ GiB\)") as caught:
        go(tmp_path / "c", make_run(data_dir, num_steps=3, micro_batch=4))
    assert "micro_batch: 2" in caught.value.fix


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["auto", "on"])
def test_too_many_compiled_shapes_disable_compilation_or_fail_a_run_that_requires_it(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    def compile_blocks(model: Decoder, *, is_on: bool = True) -> None:
        plain, calls = type(model.model).end, []

        def end(*args: Any) -> torch.Tensor:
            calls.append(args)
            if len(calls) > 4:
                raise FailOnRecompileLimitHit("recompile_limit reached")
            return plain(*args)

        model.model.compiled = {"end": end} if is_on else {}

    monkeypatch.setattr(Decoder, "compile_blocks", compile_blocks)
    monkeypatch.setattr(hardware_choices, "is_compile_worthwhile", lambda _: True)
    run = make_run(data_dir, num_steps=6, micro_batch=4, train={"compile": asked})
    if asked == "on":
        with pytest.raises(RunFailed, match=r"torch.compile failed on this model"):
            go(tmp_path, run)
        return
    _, said = go(tmp_path, run)
    assert len([line for line in said if "training continues without it" in line]) == 1
    assert (
        checkpoint_files.verify(tmp_path / "checkpoints/pretrain" / file_names.step_dir(6)).choices["is_compiled"]
        is False
    )


def test_another_device_picks_its_choices_anew_and_says_so(tiny_run: Run) -> None:
    phase, cpu = dataclasses.replace(tiny_run.phases[0], micro_batch=0), torch.device("cpu")
    was = {"device": "cuda (NVIDIA H200)", "precision": "bf16", "is_compiled": True, "micro_batch": 8}
    picked, changed = hardware_choices.pick_choices(tiny_run.train, phase, tiny_run.model, cpu, 8, was)
    assert (picked.precision, picked.is_compiled) == ("fp32", False)
    assert len(changed) == 3
    same, changed = hardware_choices.pick_choices(
        tiny_run.train, phase, tiny_run.model, cpu, 8, picked.to_dict() | {"micro_batch": 2}
    )
    assert (same.micro_batch, changed) == (2, [])


def test_phases_that_cannot_run_are_refused_before_the_first_costs_anything(tmp_path: Path, data_dir: Path) -> None:
    run = make_run(data_dir)
    sft = dataclasses.replace(run.phases[0], kind="sft", method="lora")
    with pytest.raises(UsageError, match="sft/lora"):
        go(tmp_path, dataclasses.replace(run, phases=[*run.phases, sft]))
    assert not (tmp_path / file_names.METRICS).exists()


@pytest.mark.acceptance(101)
@pytest.mark.slow
def test_weights_can_start_from_a_checkpoint(tmp_path: Path, data_dir: Path) -> None:
    go(tmp_path / "first", make_run(data_dir))
    start = tmp_path / "first/checkpoints/pretrain" / file_names.step_dir(12)
    go(tmp_path / "next", make_run(data_dir, num_steps=1, init_from=str(start)))
    before, after = metrics(tmp_path / "first")[-1].loss, metrics(tmp_path / "next")[0].loss
    assert before is not None
    assert after is not None
    assert after < before + 0.3


@pytest.mark.slow
def test_weights_can_start_from_a_folder_that_holds_no_optimizer_and_a_changed_file_is_refused(
    tmp_path: Path, data_dir: Path
) -> None:
    go(tmp_path / "first", make_run(data_dir, num_steps=2))
    start = tmp_path / "first/checkpoints/pretrain" / file_names.step_dir(2)
    (start / file_names.OPTIMIZER).unlink()
    go(tmp_path / "next", make_run(data_dir, num_steps=1, init_from=str(start)))
    (start / file_names.WEIGHTS).write_bytes(b"not these")
    with pytest.raises(IntegrityError, match="cannot be used as a starting point"):
        go(tmp_path / "damaged", make_run(data_dir, num_steps=1, init_from=str(start)))


def test_without_held_out_text_it_trains_unevaluated_and_says_so(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_byte_tokenizer(data)
    nothing = Split(num_tokens=0, num_documents=0, num_text_bytes=0, shards=[])
    write_manifest(data, {"train": write_shards(data, "train", make_documents(50, seed=1)), "val": nothing})
    ended, said = go(tmp_path / "run", make_run(data))
    assert (ended.state, ended.step) == ("done", 12)
    assert any("No held-out text" in line for line in said)
    assert all(m.val_loss is None for m in metrics(tmp_path / "run"))
    phase_dir = tmp_path / "run/checkpoints/pretrain"
    assert json.loads((phase_dir / file_names.LATEST).read_text())["step"] == 12
    assert not (phase_dir / file_names.BEST).exists()


@pytest.mark.slow
def test_every_planned_checkpoint_is_evaluated_so_that_the_best_is_among_those_kept(
    tmp_path: Path, data_dir: Path
) -> None:
    go(tmp_path, make_run(data_dir, num_steps=8, eval_every=5, save_every=2, keep_last=9))
    phase_dir = tmp_path / "checkpoints/pretrain"
    losses = {step: checkpoint_files.verify(phase_dir / file_names.step_dir(step)).val_loss for step in (2, 4, 6, 8)}
    assert all(loss is not None for loss in losses.values())
    assert [m.step for m in metrics(tmp_path) if m.val_loss is not None] == [2, 4, 5, 6, 8]
    best = json.loads((phase_dir / file_names.BEST).read_text())
    assert losses[best["step"]] == best["val_loss"] == min(loss for loss in losses.values() if loss is not None)
    go(tmp_path / "never", make_run(data_dir, num_steps=4, eval_every=0, save_every=2))
    assert [m.step for m in metrics(tmp_path / "never") if m.val_loss is not None] == [4]


def test_a_checkpoint_says_by_which_exam_it_was_judged(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pretrain.evaluate
    monkeypatch.setattr(
        pretrain, "evaluate", lambda *args, **kwargs: dataclasses.replace(plain(*args, **kwargs), exam="8 rows drawn")
    )
    go(tmp_path, make_run(data_dir, num_steps=2, save_every=2, eval_every=2))
    folder = tmp_path / "checkpoints/pretrain" / file_names.step_dir(2)
    assert checkpoint_files.verify(folder).val_exam == "8 rows drawn"


def test_pointers_left_stale_by_a_kill_are_repaired_to_the_final_checkpoint(tmp_path: Path, data_dir: Path) -> None:
    go(tmp_path, make_run(data_dir, num_steps=4, save_every=2))
    phase_dir = tmp_path / "checkpoints/pretrain"
    (phase_dir / file_names.LATEST).write_text(codec.dumps(Pointer(step=2)))
    (phase_dir / file_names.BEST).unlink()
    go(tmp_path)
    assert json.loads((phase_dir / file_names.LATEST).read_text())["step"] == 4
    assert json.loads((phase_dir / file_names.BEST).read_text())["step"] in (2, 4)


@pytest.mark.acceptance(81, 97)
@pytest.mark.slow
def test_a_failed_compilation_is_reported_and_fails_a_run_that_requires_it(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("no working C compiler")

    go(tmp_path / "plain", make_run(data_dir, num_steps=2))
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: broken)
    monkeypatch.setattr(hardware_choices, "is_compile_worthwhile", lambda device: True)
    _, said = go(tmp_path / "auto", make_run(data_dir, num_steps=2))
    assert any("torch.compile failed" in line and "no working C compiler" in line for line in said)
    assert figures(tmp_path / "auto") == figures(tmp_path / "plain")
    manifest = checkpoint_files.verify(tmp_path / "auto/checkpoints/pretrain" / file_names.step_dir(2))
    assert manifest.choices["is_compiled"] is False
    with pytest.raises(RunFailed, match=r"torch\.compile failed"):
        go(tmp_path / "on", make_run(data_dir, num_steps=2, train={"compile": "on"}))


@pytest.mark.slow
def test_the_minutes_of_compiling_are_no_part_of_speed_or_eta(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_once(function: Any, **kwargs: object) -> Any:
        calls = iter([0.5])

        def compiled(*args: torch.Tensor) -> torch.Tensor:
            time.sleep(next(calls, 0.0))
            loss: torch.Tensor = function(*args)
            return loss

        return compiled

    monkeypatch.setattr(torch, "compile", slow_once)
    _, said = go(tmp_path, make_run(data_dir, num_steps=3, train={"compile": "on"}))
    first, second, _ = metrics(tmp_path)
    assert (first.tokens_per_s, first.step_s) == (None, None)
    assert second.step_s is not None
    assert second.step_s < 0.4
    assert any(line.startswith("step 1/3") and "- tok/s" in line and "eta" not in line for line in said)


@pytest.mark.acceptance("X10")
def test_by_default_each_checkpoint_has_its_sample(tmp_path: Path, data_dir: Path) -> None:
    go(tmp_path, make_run(data_dir, num_steps=5, save_every=2, keep_last=9))
    written = sorted(path.name for path in (tmp_path / file_names.SAMPLES).iterdir())
    assert written == [f"pretrain-{step:08d}.txt" for step in (2, 4, 5)]
    assert (tmp_path / file_names.SAMPLES / written[0]).read_text().startswith("[the cat]")


@pytest.mark.slow
def test_a_checkpoint_carries_the_tokenizer_with_its_chat_template(tmp_path: Path, data_dir: Path) -> None:
    go(tmp_path, make_run(data_dir, num_steps=1))
    folder = tmp_path / "checkpoints/pretrain" / file_names.step_dir(1)
    for name in (file_names.TOKENIZER, file_names.TOKENIZER_CONFIG):
        assert (folder / name).read_bytes() == (data_dir / name).read_bytes()
        assert name in {file.name for file in checkpoint_files.verify(folder).files}


def test_a_disk_that_refuses_is_explained_and_not_a_traceback(
    tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run_dir(tmp_path, make_run(data_dir, num_steps=1))
    (tmp_path / file_names.TRAINER_LOCK).mkdir()
    assert main([str(tmp_path)]) == file_names.EXIT_FAILED
    said = capsys.readouterr()
    assert "Disk error" in said.err
    assert "state failed" in said.out


def test_data_that_changed_since_the_run_was_resolved_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data(tmp_path / "data")
    run = make_run(tmp_path / "data")
    make_data(tmp_path / "data", num_documents=50)
    with pytest.raises(DataError, match="does not belong to this run") as caught:
        go(tmp_path / "run", run)
    said = "Start over (homing train {0} --fresh), or prepare the data again (homing prep {0})."
    assert caught.value.fix == said.format("tiny")
    with pytest.raises(DataError) as caught:
        go(tmp_path / "smoke", dataclasses.replace(run, name="tiny-smoke", origin={"name": "smoke profile"}))
    assert caught.value.fix == said.format("RUN"), "no file has the name of a smoke profile"
    monkeypatch.setenv(file_names.TYPED_ENV, "files/tiny.yaml --smoke")
    with pytest.raises(DataError) as caught:
        go(tmp_path / "again", run)
    assert caught.value.fix == said.format("files/tiny.yaml --smoke"), "as it was typed, where that is known"
    outcome = codec.loads(Outcome, (tmp_path / "again" / file_names.OUTCOME).read_bytes())
    assert "homing prep files/tiny.yaml --smoke" in outcome.reason


def test_a_vocabulary_mismatch_names_every_number(tmp_path: Path, data_dir: Path) -> None:
    run = make_run(data_dir)
    other = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=300))
    with pytest.raises(DataError) as caught:
        go(tmp_path, other)
    assert "vocab_size mismatch: model.vocab_size in run.json: 300" in caught.value.why
    assert "272" in caught.value.why


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_id_past_the_vocabulary_is_named_before_it_reaches_the_model(tmp_path: Path, split: str) -> None:
    make_data(tmp_path / "data", num_shards=1)
    run = make_run(tmp_path / "data")
    shard = tmp_path / "data" / file_names.shard_name(split, 0)
    shard.write_bytes(b"\xff\xfe" * (shard.stat().st_size // 2))
    with pytest.raises(DataError, match=rf"The {split} shards contain token id 65,279, but the vocabulary ends at 271"):
        go(tmp_path / "run", run)


def test_a_batch_that_is_not_whole_rows_is_refused(tmp_path: Path, data_dir: Path) -> None:
    with pytest.raises(UsageError, match="cannot be split into whole rows"):
        go(tmp_path, make_run(data_dir, batch_tokens=250))


def test_a_run_json_that_cannot_be_read_still_leaves_an_outcome(tmp_path: Path) -> None:
    (tmp_path / file_names.RUN).write_text("{")
    with pytest.raises(UsageError, match=r"run\.json cannot be read"):
        go(tmp_path)
    assert outcome(tmp_path).state == "failed"


def test_two_trainers_never_share_a_run_directory(tmp_path: Path, data_dir: Path) -> None:
    make_run_dir(tmp_path, make_run(data_dir))
    with loop.locked(tmp_path), pytest.raises(UsageError, match="Another trainer"):
        go(tmp_path)


def test_the_csv_is_written_on_request(tmp_path: Path, data_dir: Path) -> None:
    go(tmp_path, make_run(data_dir, num_steps=2, train={"writes_csv": True}))
    assert len((tmp_path / file_names.METRICS_CSV).read_text().splitlines()) == 3


def program(run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "homing.lm.train", str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.acceptance(120)
@pytest.mark.slow
def test_the_program_ends_with_training_complete_the_state_and_the_path(tmp_path: Path, data_dir: Path) -> None:
    make_run_dir(tmp_path, make_run(data_dir, num_steps=2))
    with program(tmp_path) as child:
        out, _ = child.communicate(timeout=120)
    last = out.splitlines()[-1]
    assert child.returncode == 0
    assert last.startswith("Training Complete | state done | exit 0 | step 2")
    assert last.endswith(str(tmp_path / "checkpoints/pretrain" / file_names.step_dir(2)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_ends_with_75(tmp_path: Path, data_dir: Path, number: int) -> None:
    make_run_dir(tmp_path, make_run(data_dir, num_steps=100_000, save_every=0, eval_every=0))
    with program(tmp_path) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("step 5/"):
                child.send_signal(number)
                break
        out, _ = child.communicate(timeout=120)
    assert child.returncode == 75
    assert f"{signal.Signals(number).name} was received" in out.splitlines()[-1]
    saved = checkpoint_files.find_latest(tmp_path / "checkpoints/pretrain")
    assert saved.manifest is not None
    assert outcome(tmp_path).step == saved.manifest.step == metrics(tmp_path)[-1].step


@pytest.mark.slow
def test_the_program_explains_a_mistake_in_lines_and_not_in_a_traceback(tmp_path: Path) -> None:
    with program(tmp_path / "absent") as child:
        out, err = child.communicate(timeout=120)
    assert child.returncode == 1
    assert "error: The run directory" in err
    assert "Traceback" not in err
    assert out.startswith("Training failed | state failed | exit 1")


@pytest.mark.acceptance(87)
@pytest.mark.slow
def test_the_trainer_loads_torch_numpy_safetensors_tokenizers_and_nothing_else() -> None:
    foreign = ["pydantic", "typer", "rich", "httpx", "ruamel", "rustbpe", "gigatoken", "zstandard", "transformers"]
    code = f"import homing.lm.train.loop, sys; print([m for m in {foreign} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_swift_trains_stops_resumes_bit_equal_and_can_chat(tmp_path: Path, data_dir: Path) -> None:
    plain = make_run(data_dir, num_steps=6, save_every=3)
    model = dataclasses.replace(plain.model, family="swift", arch="swift", is_tied=False)
    spec = dataclasses.replace(
        plain.phases[0].optimizer, kind="muon", lr_scalar=0.05, momentum_start=0.85, variance_beta=0.9, is_cautious=True
    )
    phases = [dataclasses.replace(plain.phases[0], optimizer=spec)]
    sizes = dataclasses.replace(plain.sizes, num_params=sum(count_params(model).values()))
    run = dataclasses.replace(plain, model=model, phases=phases, sizes=sizes)
    go(tmp_path / "whole", run)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/pretrain" / file_names.step_dir(6))
    go(tmp_path / "again")
    assert figures(tmp_path / "again") == figures(tmp_path / "whole")
    same = weights(tmp_path / "again", 6)
    assert all(torch.equal(same[name], tensor) for name, tensor in weights(tmp_path / "whole", 6).items())
    model, _ = load_for_use(tmp_path / "whole/checkpoints/pretrain" / file_names.step_dir(6), "cpu")
    assert model.shape == run.model
    assert len(list(generate(model, [1, 2, 3], num_tokens=5, sampling=SamplingSettings(temperature=0.0)))) == 5
