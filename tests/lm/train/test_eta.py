"""The eta: one figure of the trainer's, that counts evaluations, saves and samples, for everybody who shows one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lm.train.test_landing import make_phase
from tests.lm.train.test_loop import go, metrics
from tiny import make_data, make_run

from homing.lm.phases.pretrain import Pretrain
from homing.lm.train import checkpoint, figures, loop, shelf
from homing.lm.train.landing import Pace
from homing.units import format_duration
from homing.wire import codec, names
from homing.wire.event import Metric
from homing.wire.run import Phase


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
    pace.evaluated(EVAL)
    pace.saved(SAVE)
    pace.held(HELD)
    pace.sampled(SAMPLE)
    return pace


def walk(phase: Phase, begin: int, end: int) -> float:
    """What the loop does after its line of step `begin`, done by hand."""
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


class Clock:
    """As the module `time`, for whoever trains: it goes on when something is said to take long, and never by itself."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    perf_counter = monotonic = time

    def takes(self, seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **settings: Any) -> Any:
            self.now += seconds
            return work(*args, **settings)

        return timed


def test_the_eta_of_a_run_with_heavy_evaluations_is_what_really_passes(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in (loop, figures, shelf):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Pretrain, "evaluate", clock.takes(8.0, Pretrain.evaluate))
    monkeypatch.setattr(loop._Phase, "step", clock.takes(1.0, loop._Phase.step))
    monkeypatch.setattr(loop, "sample_texts", clock.takes(3.0, loop.sample_texts))
    monkeypatch.setattr(checkpoint, "save", clock.takes(2.0, checkpoint.save))
    _, said = go(tmp_path, make_run(data_dir, num_steps=24, eval_every=4, save_every=0, sample_every=6))
    told = metrics(tmp_path)
    assert clock.now == 1000.0 + 24 * 1.0 + 6 * 8.0 + 4 * 3.0 + 2.0
    assert told[0].eta_s is None, "before a step was measured nobody knows"
    for metric in told[5:-1]:  # from the first evaluation and sample on; the one save is a guess to the end
        left = clock.now - metric.t
        assert metric.eta_s == pytest.approx(left, rel=0.2)
        assert (24 - metric.step) * (metric.step_s or 0.0) < 0.6 * left, "steps alone say far too little"
    shown = format_duration(told[11].eta_s or 0.0)
    assert any(line.startswith("step 12/24") and line.endswith(f"eta {shown}") for line in said)


def test_a_line_of_before_is_still_read_and_says_no_eta(tmp_path: Path) -> None:
    now = codec.dump(Metric(t=1.0, phase="pretrain", step=3, num_steps=9, num_tokens=30, loss=2.0, step_s=1.5))
    before = {name: value for name, value in now.items() if name not in ("eta_s", "plan_s")}
    (tmp_path / names.METRICS).write_text(json.dumps(before) + "\n")
    (read,) = metrics(tmp_path)
    assert (read.step, read.step_s, read.eta_s, read.plan_s) == (3, 1.5, None, None)
