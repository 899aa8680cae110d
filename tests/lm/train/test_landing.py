"""Landing: an earlier end with a whole decay, inside the deadline at any speed, at the same place after a crash."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steady import Clock, SteadyPace
from tests.lm.train.test_loop import StopAt, events, figures, go, metrics, weights
from tiny import make_data, make_run

from homing.lm.train import apply_landing, loop, stop_requests
from homing.lm.train.checkpoints import checkpoint_files, manager
from homing.lm.train.compute import engine
from homing.lm.train.landing import Pace, Pilot, Rates
from homing.lm.train.optim.schedule import Landing, lr_scale
from homing.lm.train.stop_requests import ControlRequests
from homing.wire import file_names
from homing.wire.control_files import boot_clock_s
from homing.wire.run_json import Optimizer, Phase, Schedule

WSD = Schedule("wsd", warmup_steps=10, decay_steps=200, floor=0.0)


def make_phase(**changes: Any) -> Phase:
    phase = Phase(
        "pretrain", "full", 1000, 64, 1, Optimizer("adamw", 1e-3, 1e-3, 1e-3, 1e-3, 0.0), WSD, 100, 640, 100, 0.0, 0, 2
    )
    return dataclasses.replace(phase, **changes)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder


# --- the arithmetic, on a clock of our own ---


@dataclasses.dataclass
class Flight:
    """Simulates a phase with these durations of steps."""

    ended_at: float
    step: int
    landing: Landing | None
    scales: list[float]
    kinds: list[str]


def fly(
    phase: Phase,
    step_times: Iterator[float],
    deadline: float,
    *,
    eval_s: float = 0.1,
    save_s: float = 0.2,
    raised: dict[int, float] | None = None,
    later_tokens: int = 0,
    num_later: int = 0,
) -> Flight:
    pace = Pace(phase, checkpoint_bytes=1_000_000)
    pilot = Pilot(phase, pace, later_tokens=later_tokens, num_later=num_later)
    now, landing, warm_from = 0.0, None, 0
    flight = Flight(0.0, 0, None, [], [])
    for step in range(1, phase.num_steps + 1):
        flight.scales.append(lr_scale(phase.schedule, step - 1, phase.num_steps, landing, warm_from))
        took = next(step_times)
        now += took
        if step > 1:
            pace.step(took)
        deadline = (raised or {}).get(step, deadline)
        landing, turn = pilot.look(step, landing, warm_from, deadline - now, now)
        if turn:
            flight.kinds.append(turn.kind)
            warm_from = step if turn.kind == "called_off" else warm_from
        is_last = step == (landing.end_step if landing else phase.num_steps)
        if is_last or step % phase.eval_every == 0:
            now += eval_s
            pace.evaluated(eval_s)
        if is_last or step % phase.save_every == 0:
            now += save_s
            pace.saved(save_s)
        flight.ended_at, flight.step, flight.landing = now, step, landing
        if is_last or now + save_s + 2.0 >= deadline:  # the second is what `ControlRequests.stop` does
            break
    return flight


def test_a_plan_that_fits_is_left_alone() -> None:
    flight = fly(make_phase(), itertools.repeat(1.0), 1100.0)
    assert (flight.step, flight.landing, flight.kinds) == (1000, None, [])


def test_a_landing_decays_over_the_same_fraction_and_reports_its_end_in_advance() -> None:
    flight = fly(make_phase(), itertools.repeat(1.0), 500.0)
    assert flight.landing is not None
    assert flight.kinds[:2] == ["planned", "started"]
    assert 470 <= flight.step <= 495
    decay = flight.landing.end_step - flight.landing.begin_step
    assert decay == pytest.approx(0.2 * flight.step, rel=0.1)
    assert flight.scales[int(flight.landing.begin_step) - 1] == 1.0
    assert flight.scales[-1] < 0.05
    assert flight.ended_at <= 500.0


@pytest.mark.acceptance(123)
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    deadline=st.floats(30.0, 900.0),
    base=st.floats(0.02, 1.5),
    slower=st.floats(0.2, 6.0),
    slower_from=st.integers(1, 1000),
    noise=st.floats(0.0, 0.9),
    kind=st.sampled_from(["wsd", "cosine", "constant"]),
)
def test_the_end_is_inside_the_deadline_for_any_speed(
    seed: int, deadline: float, base: float, slower: float, slower_from: int, noise: float, kind: str
) -> None:
    chance = random.Random(seed)

    def times() -> Iterator[float]:
        for step in itertools.count():
            speed = base * (slower if step >= slower_from else 1.0) * (1 + noise * chance.uniform(-1, 1))
            yield min(2.5, speed)  # a single step longer than all spare time can only be cut off

    decay = {"wsd": 200, "cosine": 990, "constant": 0}[kind]
    phase = make_phase(schedule=Schedule(kind, 10, decay, 0.0))
    # An evaluation that was never seen is guessed by the steps: it may be shorter than that, not longer.
    eval_s = 5 * base * min(1.0, slower) * (1 - noise) * chance.random()
    flight = fly(phase, times(), deadline, eval_s=eval_s, save_s=0.5)
    assert flight.ended_at <= deadline
    assert flight.step == phase.num_steps or flight.landing is not None or deadline < 40 * base + 15
    rises = [b - a for a, b in itertools.pairwise(flight.scales[10:]) if flight.landing]
    assert all(rise <= 1e-9 for rise in rises), "a rate that was lowered is not raised again"


def test_little_is_left_unused_at_a_steady_speed() -> None:
    for deadline in (60.0, 200.0, 450.0):
        flight = fly(make_phase(), itertools.repeat(0.5), deadline)
        assert deadline * 0.9 - 6 <= flight.ended_at <= deadline


def test_steps_that_grow_slower_in_the_decay_move_the_end_to_an_earlier_one_and_the_rate_still_comes_down() -> None:
    slow = itertools.chain(itertools.repeat(1.0, 420), itertools.repeat(2.0))
    flight = fly(make_phase(), slow, 500.0)
    assert "moved" in flight.kinds
    assert flight.ended_at <= 500.0
    assert flight.scales[-1] < 0.1


def test_steps_that_grow_faster_in_the_decay_do_not_move_the_end() -> None:
    fast = itertools.chain(itertools.repeat(1.0, 420), itertools.repeat(0.2))
    flight = fly(make_phase(), fast, 500.0)
    assert flight.kinds == ["planned", "started"]
    assert flight.step < 500


def test_a_limit_raised_far_enough_in_the_decay_calls_the_landing_off() -> None:
    flight = fly(make_phase(), itertools.repeat(1.0), 500.0, raised={450: 2000.0})
    assert flight.kinds == ["planned", "started", "called_off"]
    assert (flight.step, flight.landing) == (1000, None)
    assert flight.scales[450] == pytest.approx(0.1), "the rate warms up again"
    assert flight.scales[500] == 1.0


def test_a_limit_raised_by_little_in_the_decay_changes_nothing() -> None:
    flight = fly(make_phase(), itertools.repeat(1.0), 500.0, raised={450: 540.0})
    assert flight.kinds == ["planned", "started"]


def test_cosine_is_aimed_at_the_new_end_at_once() -> None:
    flight = fly(make_phase(schedule=Schedule("cosine", 10, 990, 0.0)), itertools.repeat(1.0), 500.0)
    assert flight.landing is not None
    assert flight.scales[250] == pytest.approx(0.5, abs=0.1)
    assert flight.scales[-1] < 0.01
    assert flight.ended_at <= 500.0


def test_later_phases_get_their_share_of_what_is_left() -> None:
    alone = fly(make_phase(), itertools.repeat(1.0), 500.0)
    shared = fly(make_phase(), itertools.repeat(1.0), 500.0, later_tokens=1000 * 64, num_later=1)
    assert shared.step == pytest.approx(alone.step / 2, abs=60)
    fits = fly(make_phase(), itertools.repeat(1.0), 2300.0, later_tokens=1000 * 64, num_later=1)
    assert fits.landing is None


def test_what_was_not_measured_yet_is_guessed_and_one_pause_is_no_speed() -> None:
    pace = Pace(make_phase(), checkpoint_bytes=10**9)
    assert pace.step_s == 0.0
    for seconds in [1.0] * 20 + [60.0]:
        pace.step(seconds)
    assert pace.step_s == 1.0
    assert pace.save_s >= 10
    assert pace.eval_s == pytest.approx(640 / 64 * 0.5)
    pace.saved(2.0)
    pace.evaluated(3.0)
    pace.sampled(1.0)
    assert pace.finish_s == pytest.approx(1.25 * 6.0 + 3.0)


def test_a_deadline_reckons_with_samples_that_cannot_be_captured_until_one_was_made() -> None:
    rates = Rates.usual_on(torch.device("cuda"))
    phase = make_phase(eval_every=0, save_every=0, sample_every=50)
    pace = Pace(phase, checkpoint_bytes=0, can_evaluate=False, sampled_layers=10_000, rates=rates)
    pace.step(1.0)
    assert pace.sample_s == pytest.approx(10_000 * Rates.layer_s)
    assert pace.needs_s(100) == pytest.approx(100 + (2 + 1.25) * 15.0 + 3.0)
    assert pace.affordable(pace.needs_s(100) + 0.5) == 100
    assert pace.to_go_s(1, 101) == pytest.approx(100 + 3 * 2.0)  # what is likely: captured
    pace.sampled(3.0)
    assert pace.needs_s(100) == pytest.approx(100 + (2 + 1.25) * 3.0 + 3.0)


@given(st.integers(0, 99), st.floats(0.0, 1.0), st.integers(1, 50), st.sampled_from(["wsd", "cosine"]))
def test_a_landing_begins_at_the_current_rate_and_ends_at_the_floor(
    begin: int, scale: float, length: int, kind: str
) -> None:
    schedule = Schedule(kind, 10, 50, 0.1)
    landing = Landing(begin, scale, begin + length)
    found = [lr_scale(schedule, step, 1000, landing) for step in range(begin, begin + length + 1)]
    assert found[0] == pytest.approx(scale)
    assert found[-1] == pytest.approx(min(0.1, scale))
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(found))


# --- the loop ---


class Ticking(StopAt):
    """A second passes between two looks of the pilot."""

    def __init__(self, run_dir: Path, left_s: float, looks: int = 10**6) -> None:
        super().__init__(run_dir, looks)
        self.seconds = left_s

    def left_s(self) -> float | None:
        self.seconds -= 1.0
        return self.seconds


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Pace", SteadyPace)


def long_run(data_dir: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "num_steps": 60, "schedule": Schedule("wsd", 2, 20, 0.0), "eval_every": 10, "save_every": 10
    }  # fmt: skip
    return make_run(data_dir, **(settings | changes))


@pytest.mark.usefixtures("steady")
def test_a_landed_run_stops_with_a_finished_model_and_says_what_finishing_would_take(
    tmp_path: Path, data_dir: Path
) -> None:
    ended, said = go(tmp_path, long_run(data_dir), Ticking(tmp_path, 34.0))
    assert (ended.state, ended.exit_code) == ("stopped", 75)
    assert "Landed at step" in ended.reason
    assert "limit" in ended.reason
    (started,) = events(tmp_path, "landing_started")
    assert started["data"]["end_step"] == ended.step
    assert started["data"]["needs_s"] > started["data"]["left_s"]
    assert any("finishing the plan would take" in line for line in said)
    assert (tmp_path / file_names.EVENTS).read_text().count(ended.reason) == 1
    (stopped,) = events(tmp_path, "run_stopped")
    assert stopped["data"]["why"] == "landed"
    last = metrics(tmp_path)[-1]
    assert (last.step, last.end_step, last.num_steps) == (ended.step, ended.step, 60)
    assert last.val_loss is not None, "the last checkpoint of a landing is measured"
    rates = [m.lr or 0.0 for m in metrics(tmp_path)]
    assert rates[-1] < 0.2 * max(rates)
    manifest = checkpoint_files.verify(tmp_path / "checkpoints/pretrain" / file_names.step_dir(ended.step))
    assert manifest.is_final
    assert list((tmp_path / "samples").iterdir())


@pytest.mark.acceptance(123)
@pytest.mark.slow
@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_a_trainer_that_died_in_its_landing_lands_at_the_same_place_bit_for_bit(
    tmp_path: Path, data_dir: Path, kind: str
) -> None:
    schedule = Schedule(kind, 2, 20 if kind == "wsd" else 58, 0.0)
    run = long_run(data_dir, schedule=schedule)
    whole, _ = go(tmp_path / "whole", run, Ticking(tmp_path / "whole", 34.0))
    died_at = whole.step - 3
    cut, _ = go(tmp_path / "cut", run, Ticking(tmp_path / "cut", 34.0, looks=died_at))
    assert (cut.step, cut.state) == (died_at, "stopped")
    again, said = go(tmp_path / "cut", requests=Ticking(tmp_path / "cut", 34.0 - died_at))
    assert (again.step, again.reason) == (whole.step, whole.reason)
    assert any("Resumed" in line for line in said)
    assert figures(tmp_path / "whole") == figures(tmp_path / "cut")
    left, right = (weights(tmp_path / side, whole.step) for side in ("whole", "cut"))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@pytest.mark.usefixtures("steady")
def test_a_landed_run_with_more_time_continues_to_its_planned_end(tmp_path: Path, data_dir: Path) -> None:
    landed, _ = go(tmp_path, long_run(data_dir), Ticking(tmp_path, 34.0))
    ended, said = go(tmp_path)
    assert (ended.state, ended.step) == ("done", 60)
    assert events(tmp_path, "landing_called_off")
    assert any(f"Resumed at step {landed.step}" in line for line in said)
    found = metrics(tmp_path)
    assert [m.step for m in found] == list(range(1, 61)), "no step is trained twice or left out"
    peak = max(m.lr or 0.0 for m in found)
    assert found[landed.step].lr == pytest.approx(peak / 2), "the rate warms up again"
    assert found[-1].end_step is None


@pytest.mark.slow
@pytest.mark.usefixtures("steady")
def test_a_landed_run_resumed_with_another_limit_warms_up_and_lands_again(tmp_path: Path, data_dir: Path) -> None:
    run = long_run(data_dir, num_steps=400, schedule=Schedule("wsd", 4, 200, 0.0))
    first, _ = go(tmp_path, run, Ticking(tmp_path, 34.0))
    again, _ = go(tmp_path, requests=Ticking(tmp_path, 60.0))
    assert "Landed at step" in again.reason
    assert first.step + 45 <= again.step <= first.step + 60
    later = [m.lr or 0.0 for m in metrics(tmp_path)][first.step :]
    assert max(later) == pytest.approx(0.02), "it comes back to the peak"
    assert later.index(max(later)) == 3
    assert len([rate for rate in later if rate == max(later)]) >= 10
    assert later[-1] < 0.1 * max(later)


@pytest.mark.usefixtures("steady")
def test_a_landed_run_with_no_more_time_stays_as_it_is(tmp_path: Path, data_dir: Path) -> None:
    landed, _ = go(tmp_path, long_run(data_dir), Ticking(tmp_path, 34.0))
    before = (tmp_path / file_names.METRICS).read_text()
    ended, _ = go(tmp_path, requests=Ticking(tmp_path, 8.0))
    assert (ended.state, ended.step, ended.exit_code) == ("stopped", landed.step, 75)
    assert (tmp_path / file_names.METRICS).read_text() == before


def limited_run(data_dir: Path) -> Any:
    return make_run(
        data_dir, num_steps=100_000, eval_every=0, save_every=0, train={"time_limit_s": 8.0},
        schedule=Schedule("wsd", 10, 20_000, 0.0),
    )  # fmt: skip


@pytest.mark.slow
def test_a_time_limit_lands_too_with_a_whole_decay(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in (loop, engine, manager, stop_requests, apply_landing):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(loop._Phase, "step", clock.takes(0.05, loop._Phase.step))
    requests = ControlRequests(tmp_path)
    ended, _ = go(tmp_path, limited_run(data_dir), requests)
    assert "Landed at step" in ended.reason
    assert 60 < ended.step < 8.0 / 0.05
    assert (requests.left_s() or -1.0) > 0
    rates = [m.lr or 0.0 for m in metrics(tmp_path)]
    assert rates[-1] < 0.1 * max(rates)


@pytest.mark.acceptance("X25")
@pytest.mark.slow
def test_a_time_limit_lands_too_on_the_real_clock(tmp_path: Path, data_dir: Path) -> None:
    """How many steps that leaves for the decay is the machine's matter, and not looked at."""
    requests = ControlRequests(tmp_path)
    ended, _ = go(tmp_path, limited_run(data_dir), requests)
    assert "Landed at step" in ended.reason
    assert "time limit" in ended.reason
    assert (requests.left_s() or -1.0) > 0, "everything was done inside the limit"


@pytest.mark.parametrize(("limit_s", "why"), [(60.0, "time limit"), (3600.0, "spend limit")])
def test_of_two_moments_the_nearer_one_is_named(tmp_path: Path, limit_s: float, why: str) -> None:
    land_by = {"land_by": boot_clock_s() + 600, "reason": "The spend limit is near."}
    (tmp_path / file_names.CONTROL).write_text(json.dumps(land_by))
    assert why in ControlRequests(tmp_path, time_limit_s=limit_s).why()
