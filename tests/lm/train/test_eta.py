"""The eta: one figure of the trainer's, that counts evaluations, saves and samples, for everybody who shows one."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steady import Clock
from tests.lm.train.test_landing import make_phase
from tests.lm.train.test_loop import go, metrics
from tiny import make_data, make_run

from homing.lm.phases.pretrain import Pretrain
from homing.lm.train import loop
from homing.lm.train.checkpoints import checkpoint_files, manager
from homing.lm.train.compute import engine
from homing.lm.train.landing import Pace, Rates
from homing.units import format_duration
from homing.wire import codec, file_names
from homing.wire.event_lines import Metric
from homing.wire.run_json import Phase, Rl, RlTask


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder


STEP, EVAL, HELD, SAVE, SAMPLE = 1.0, 7.0, 0.5, 20.0, 3.0


def measured(phase: Phase, **settings: Any) -> Pace:
    pace = Pace(phase, checkpoint_bytes=0, **settings)
    for _ in range(3):
        pace.step(STEP)
    for _ in range(2):  # one alone is not wholly believed
        pace.evaluated(EVAL)
        pace.saved(SAVE)
        pace.held(HELD)
        pace.sampled(SAMPLE)
    return pace


def walk(phase: Phase, begin: int, end: int) -> float:
    """Repeats what the loop does after logging step `begin`."""
    seconds = 0.0
    for step in range(begin, end + 1):
        is_last, is_saved = step == end, bool(phase.save_every and step % phase.save_every == 0)
        is_evaluated = is_last or bool(phase.eval_every and (step % phase.eval_every == 0 or is_saved))
        if step > begin:
            seconds += STEP + (EVAL if is_evaluated else 0.0)
        seconds += SAVE if is_last else HELD if is_saved else 0.0
        is_sampled = is_last or (step % phase.sample_every == 0 if phase.sample_every else is_saved)
        seconds += SAMPLE if is_sampled else 0.0
    return seconds


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault of it
@given(
    st.integers(1, 60), st.integers(0, 60), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)
)  # fmt: skip
def test_what_falls_due_until_the_end_is_counted_one_by_one(
    begin: int, more: int, eval_every: int, save_every: int, sample_every: int
) -> None:
    phase = make_phase(eval_every=eval_every, save_every=save_every, sample_every=sample_every)
    assert measured(phase).to_go_s(begin, begin + more) == pytest.approx(walk(phase, begin, begin + more))


def test_saves_by_the_clock_count_by_the_time_there_is_and_without_a_step_nothing_is_known() -> None:
    phase = make_phase(eval_every=0, save_every=0, sample_every=1000, save_every_s=10.0)
    assert measured(phase).to_go_s(1, 101) == pytest.approx(100 + EVAL + (100 + EVAL) / 10 * HELD + SAVE + SAMPLE)
    assert measured(phase, can_evaluate=False).to_go_s(99, 99) == SAVE + SAMPLE
    assert Pace(phase, checkpoint_bytes=0).to_go_s(0, 100) is None


# --- what is reported after the first 20 steps, on a simulated clock ---


@dataclasses.dataclass(frozen=True)
class Machine:
    """What things take on it, which the pace of a run does not know beforehand."""

    eval_s: float
    save_s: float
    held_s: float
    sample_s: float


def planned_and_took(phase: Phase, pace: Pace, steps: Iterable[float], machine: Machine) -> tuple[float, float]:
    """The estimate at step 20, and the time from there to the end: as `walk` simulates it."""
    now, planned_s, reported_at, saved_at = 0.0, 0.0, 0.0, 0.0
    for step, took_s in zip(range(1, phase.num_steps + 1), steps, strict=False):
        now += took_s
        if step > 1:
            pace.step(took_s)
        is_last, is_planned = step == phase.num_steps, bool(phase.save_every and step % phase.save_every == 0)
        if is_last or (phase.eval_every and (step % phase.eval_every == 0 or is_planned)):
            now += machine.eval_s
            pace.evaluated(machine.eval_s)
        if step == 20:
            planned_s, reported_at = pace.to_go_s(step, phase.num_steps) or 0.0, now
        is_saved = is_last or is_planned or bool(phase.save_every_s and now - saved_at >= phase.save_every_s)
        if is_saved:
            saved_at = now
            now += machine.save_s if is_last else machine.held_s
            pace.saved(machine.save_s)
            if not is_last:
                pace.held(machine.held_s)
        if is_saved if not phase.sample_every else (is_last or step % phase.sample_every == 0):
            now += machine.sample_s
            pace.sampled(machine.sample_s)
    return planned_s, now - reported_at


# Layers, seconds of a step, of an evaluation, bytes of a checkpoint: about those of benchmarks/gpu/hours.py on a card.
SHAPES = {
    "6x384": (6, 0.06, 0.1, 300_000_000),
    "12x768": (12, 0.24, 0.4, 1_300_000_000),
    "20x1280": (20, 0.64, 1.0, 4_700_000_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seconds", [120.0, 3600.0])
@pytest.mark.parametrize("disk", [200e6, 400e6, 1.5e9])
@pytest.mark.parametrize(("device", "layer_s"), [("cpu", 1e-3), ("cuda", 0.24e-3)])
def test_eta_includes_the_expected_cost_of_saves_and_evaluations_before_any_is_measured(
    shape: str, seconds: float, disk: float, device: str, layer_s: float
) -> None:
    num_layers, step_s, eval_s, num_bytes = SHAPES[shape]
    num_steps = int(seconds / step_s)
    phase = make_phase(
        num_steps=num_steps, batch_tokens=2**17, eval_tokens=500_000, eval_every=max(25, num_steps // 20),
        save_every=max(25, num_steps // 10), save_every_s=900.0,
    )  # fmt: skip
    layers = 100 * num_layers
    rates = Rates.usual_on(torch.device(device))
    pace = Pace(phase, checkpoint_bytes=num_bytes, sampled_layers=layers, rates=rates)
    machine = Machine(eval_s, save_s=num_bytes / disk, held_s=num_bytes / 10e9, sample_s=layers * layer_s)
    planned_s, took_s = planned_and_took(phase, pace, itertools.repeat(step_s), machine)
    # In minutes the one save that is waited for weighs much, and the speed of this disk is not measured yet.
    assert planned_s == pytest.approx(took_s, rel=0.2 if seconds < 600 else 0.1)


@pytest.mark.parametrize(
    "beginning",
    [
        pytest.param([60.0, *[5.0] * 6], id="compiled in several steps"),
        pytest.param([60.0, *[0.5] * 9], id="another way of stepping"),
        pytest.param([60.0, *[0.25 - 0.01 * step for step in range(10)]], id="warming up"),
        pytest.param([60.0, *[0.1] * 12, 30.0], id="a pause just before"),
    ],
)
def test_steps_of_before_a_speed_up_are_forgotten(beginning: list[float]) -> None:
    phase = make_phase(eval_every=0, save_every=0)
    steps = itertools.chain(beginning, itertools.repeat(0.1))
    planned_s, took_s = planned_and_took(phase, Pace(phase, checkpoint_bytes=0), steps, Machine(0.5, 0.0, 0.0, 0.0))
    assert planned_s == pytest.approx(took_s, rel=0.1)


def test_steps_that_grow_slower_are_believed_too_and_a_pause_now_and_then_is_no_speed() -> None:
    pace = Pace(make_phase(eval_every=0, save_every=0), checkpoint_bytes=0, can_evaluate=False)
    for seconds in [1.0] * 30 + [2.0] * 10:
        pace.step(seconds)
    assert pace.to_go_s(40, 140) == pytest.approx(200.0)
    pace.step(60.0)
    assert pace.to_go_s(41, 141) == pytest.approx(200.0)


@pytest.mark.parametrize("updates", [2, 3, 8])
def test_where_one_step_of_rl_samples_for_several_they_are_counted_together(updates: int) -> None:
    rl = Rl([RlTask("gsm8k", file="train.jsonl")], updates_per_rollout=updates)
    phase = make_phase(kind="rl", rl=rl, eval_every=0, save_every=0, num_steps=960)
    steps = itertools.cycle([10.0, *[1.0] * (updates - 1)])
    planned_s, took_s = planned_and_took(phase, Pace(phase, checkpoint_bytes=0), steps, Machine(0.5, 0.0, 0.0, 0.0))
    assert planned_s == pytest.approx(took_s, rel=0.05)


def test_saves_by_the_clock_do_not_come_where_planned_ones_come_sooner() -> None:
    planned = make_phase(eval_every=0, save_every=100, sample_every=1000, save_every_s=0.0)
    both = dataclasses.replace(planned, save_every_s=900.0)
    assert measured(both).to_go_s(20, 1000) == measured(planned).to_go_s(20, 1000)
    rarely = dataclasses.replace(planned, save_every_s=40.0)
    more_s = (measured(rarely).to_go_s(20, 1000) or 0.0) - (measured(planned).to_go_s(20, 1000) or 0.0)
    assert more_s == pytest.approx(2 * 980 / 100 * HELD)


def test_a_later_phase_knows_what_the_one_before_it_has_measured() -> None:
    rates = Rates()
    first = Pace(make_phase(), checkpoint_bytes=10**9, sampled_layers=1000, rates=rates)
    first.saved(20.0)
    first.held(2.0)
    first.sampled(5.0)
    phase = make_phase(eval_every=0, save_every=100, sample_every=0)
    second = Pace(phase, checkpoint_bytes=10**8, can_evaluate=False, sampled_layers=2000, rates=rates)
    second.step(1.0)
    assert second.to_go_s(1, 201) == pytest.approx(200 + 2 * (0.2 + 10.0) + 2.0 + 10.0)


def test_a_first_evaluation_that_sets_everything_up_does_not_count_for_all_that_come() -> None:
    """As on an H200: 0.89 s the first time, 0.08 s then."""
    phase = make_phase(num_steps=723, batch_tokens=65536, eval_tokens=500_000, eval_every=36, save_every=0)
    pace = Pace(phase, checkpoint_bytes=0)
    for _ in range(15):
        pace.step(0.031)
    before_s = pace.to_go_s(35, 723) or 0.0
    pace.evaluated(0.89)
    assert pace.to_go_s(36, 723) == pytest.approx(before_s, rel=0.2)
    pace.evaluated(0.08)
    assert pace.to_go_s(36, 723) == pytest.approx(before_s, rel=0.05)


def test_a_first_save_that_sets_everything_up_does_not_count_for_all_that_come() -> None:
    phase = make_phase(num_steps=1000, eval_every=0, save_every=100, save_every_s=0.0, sample_every=0)
    pace = Pace(phase, checkpoint_bytes=4 * 10**9, can_evaluate=False)
    pace.step(1.0)
    before_s = pace.to_go_s(100, 1000) or 0.0  # nine saves that take a second each, and the last
    pace.held(9.0)
    after_first_s = pace.to_go_s(100, 1000) or 0.0
    assert after_first_s == pytest.approx(before_s + 9 * 2.0)  # three seconds: as far from one as from nine
    pace.held(1.0)
    assert pace.to_go_s(200, 1000) == pytest.approx(before_s - 101.0)
    for _ in range(2):  # a disk that became slow is believed
        pace.held(9.0)
    assert (pace.to_go_s(400, 1000) or 0.0) > before_s - 300 - 4.0 + 6 * 4.0


def test_the_eta_of_a_run_with_heavy_evaluations_is_what_really_passes(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in (loop, engine, manager):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Pretrain, "evaluate", clock.takes(8.0, Pretrain.evaluate))
    monkeypatch.setattr(loop._Phase, "step", clock.takes(1.0, loop._Phase.step))
    monkeypatch.setattr(loop, "sample_texts", clock.takes(3.0, loop.sample_texts))
    monkeypatch.setattr(checkpoint_files, "save", clock.takes(2.0, checkpoint_files.save))
    _, said = go(tmp_path, make_run(data_dir, num_steps=24, eval_every=4, save_every=0, sample_every=6))
    messages = metrics(tmp_path)
    assert clock.now == 1000.0 + 24 * 1.0 + 6 * 8.0 + 4 * 3.0 + 2.0
    assert messages[0].eta_s is None, "there is no estimate before a step was measured"
    for metric in messages[12:-1]:  # from the second evaluation and sample on; the one save is a guess to the end
        left = clock.now - metric.t
        assert metric.eta_s == pytest.approx(left, rel=0.2)
        assert (24 - metric.step) * (metric.step_s or 0.0) < 0.6 * left, "steps alone say far too little"
    shown = format_duration(messages[12].eta_s or 0.0)
    assert any(line.startswith("step 13/24") and line.endswith(f"eta {shown}") for line in said)


@pytest.mark.slow
def test_eta_after_20_steps_ignores_a_slow_start(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in (loop, engine, manager):
        monkeypatch.setattr(module, "time", clock)
    slow, fast = clock.takes(9.0, loop._Phase.step), clock.takes(1.0, loop._Phase.step)
    monkeypatch.setattr(loop._Phase, "step", lambda phase, batch: (slow, fast)[phase.state.step > 5](phase, batch))
    run = make_run(data_dir, num_steps=60, eval_every=30, save_every=0, sample_every=25)
    phase, sampling = run.phases[0], run.sampling
    eval_s = phase.eval_tokens / phase.batch_tokens * 0.4
    sample_s = 1e-3 * max(1, len(sampling.prompts)) * sampling.num_tokens * run.model.num_layers
    monkeypatch.setattr(Pretrain, "evaluate", clock.takes(eval_s, Pretrain.evaluate))
    monkeypatch.setattr(loop, "sample_texts", clock.takes(sample_s, loop.sample_texts))
    go(tmp_path, run)
    messages = metrics(tmp_path)[19]
    took_s = clock.now - messages.t
    assert (messages.step, took_s) == (20, pytest.approx(40 * 1.0 + 2 * eval_s + 3 * sample_s))
    assert messages.eta_s == pytest.approx(took_s, rel=0.1)


def test_a_line_of_before_is_still_read_and_says_no_eta(tmp_path: Path) -> None:
    now = codec.dump(Metric(t=1.0, phase="pretrain", step=3, num_steps=9, num_tokens=30, loss=2.0, step_s=1.5))
    before = {name: value for name, value in now.items() if name not in ("eta_s", "plan_s")}
    (tmp_path / file_names.METRICS).write_text(json.dumps(before) + "\n")
    (read,) = metrics(tmp_path)
    assert (read.step, read.step_s, read.eta_s, read.plan_s) == (3, 1.5, None, None)
