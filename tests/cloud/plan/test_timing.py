"""Where the seconds go: the minimum that launch accepts, what a limit buys, and what a run teaches the next plan."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cloud.rig import make_run

from homing.cloud.home import Home
from homing.cloud.launch.launch import LaunchOrder, draft
from homing.cloud.plan.plan import make_plan
from homing.cloud.plan.speed import Speed, Trip, measure_trip, remember
from homing.cloud.plan.timing import Timing, checkpoint_bytes, pushing, timing_of
from homing.cloud.providers.base import Needs, Offer
from homing.errors import UsageError
from homing.units import format_duration
from homing.wire.event_lines import Event, Outcome
from homing.wire.guard_timing import END, LAND, reserve_s
from homing.wire.run_json import Limits, Run

H100 = Offer("runpod", "h100", "H100", 1, 16, 80 * 2**30, Decimal("2.49"))
TIMING = Timing(
    arrive_s=5.0, start_s=10.0, tokens_per_s=6400.0, save_s=0.5, push_s=1.0, home_s=6.0, doubt=1.5, text="as measured"
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def long_run(run: Run, num_steps: int = 100_000) -> Run:
    return dataclasses.replace(run, phases=[dataclasses.replace(run.phases[0], num_steps=num_steps)])


def test_of_the_minimum_enough_is_left_for_work_after_what_every_guard_keeps(run: Run) -> None:
    least_s = TIMING.least_s(long_run(run))
    kept_s = max(reserve_s(LAND, least_s), reserve_s(END, least_s) + TIMING.home_s + 2 * TIMING.push_s)
    assert least_s - kept_s >= 1.5 * (5.0 + 10.0)
    assert TIMING.steps_in(long_run(run), least_s)[0] >= 20


@given(
    st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.floats(1.0, 1e7), st.floats(0.0, 1e4), st.floats(0.0, 1e4)
)  # fmt: skip
def test_there_is_a_minimum_for_every_machine_and_every_limit_above_it_buys_steps(
    arrive_s: float, start_s: float, tokens_per_s: float, push_s: float, home_s: float
) -> None:
    timing = Timing(arrive_s, start_s, tokens_per_s, 0.1, push_s, home_s, 1.5, "")
    run = long_run(_some_run())
    least_s = timing.least_s(run)
    assert timing.steps_in(run, least_s)[0] >= 1
    assert timing.steps_in(run, 2 * least_s)[0] >= timing.steps_in(run, least_s)[0]
    assert least_s > timing.arrive_s + timing.start_s + timing.home_s


def _some_run() -> Run:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return make_run(Path(folder))


def test_a_limit_buys_no_more_than_the_plan_and_a_small_one_a_part_of_it(run: Run) -> None:
    whole = long_run(run, 1000)
    assert TIMING.steps_in(whole, 1e6)[0] == 1000
    part, lands_s = TIMING.steps_in(whole, TIMING.whole_s(whole) / 2 + 30)
    assert 0 < part < 1000
    assert lands_s < TIMING.whole_s(whole)


def test_a_slow_push_and_a_big_checkpoint_raise_the_minimum(run: Run) -> None:
    slow = dataclasses.replace(TIMING, push_s=500.0)
    assert slow.least_s(run) > TIMING.least_s(run) + 900


@pytest.mark.acceptance(62)
def test_what_is_assumed_says_so_and_what_was_measured_replaces_it(home: Home, run: Run) -> None:
    run = dataclasses.replace(run, id="moss-1")
    (offer,) = home.provider("local").offers(Needs())
    speed = Speed(5000.0, "measured", "")
    assumed = timing_of(run, offer, speed, home)
    assert "assumed" in assumed.text
    assert assumed.push_s == pytest.approx(checkpoint_bytes(run) / 100e6)
    trip = Trip(arrive_s=2.0, start_s=3.0, home_s=4.0, push_bytes_per_s=1e6)
    remember(run, offer.device, 0, 5000.0, home, provider="local", trip=dataclasses.asdict(trip))
    measured = timing_of(run, offer, speed, home)
    assert "measured" in measured.text
    assert (measured.arrive_s, measured.start_s) == (2.0, 3.0)
    assert measured.push_s == pytest.approx(checkpoint_bytes(run) / 1e6)
    assert measured.least_s(run) < assumed.least_s(run)
    elsewhere = dataclasses.replace(run, store="s3://bucket/x")
    assert "assumed" in timing_of(elsewhere, offer, speed, home).text, "another store is another way home"


def test_the_way_home_is_one_figure_in_the_words_and_in_the_table(home: Home, run: Run) -> None:
    run = dataclasses.replace(run, id="moss-1")
    (offer,) = home.provider("local").offers(Needs())
    trip = Trip(arrive_s=2.0, start_s=3.0, home_s=40.0, push_bytes_per_s=1e6)
    assumed = timing_of(run, offer, Speed(5000.0, "assumed", ""), home)
    remember(run, offer.device, 0, 5000.0, home, provider="local", trip=dataclasses.asdict(trip))
    measured = timing_of(run, offer, Speed(5000.0, "measured", ""), home)
    for timing, home_s in ((assumed, 20.0), (measured, 40.0)):
        way_s = dict(timing.parts(run))["home"]
        assert way_s == home_s + 2 * timing.push_s
        assert f" {format_duration(way_s)} to push the model and end billing" in timing.text
    assert measured.home_reserve_s == 60.0, "a limit keeps half as much again, for another day"
    assert measured.least_s(run) > dataclasses.replace(measured, home_doubt=1.0).least_s(run)


def test_a_card_has_to_compile_first_and_its_store_is_a_network_away(home: Home, run: Run) -> None:
    far = dataclasses.replace(run, store="s3://bucket/x")
    timing = timing_of(far, H100, Speed(1e6, "assumed", ""), home)
    assert timing.start_s > 60
    assert timing.push_s == pytest.approx(checkpoint_bytes(run) / 25e6)
    assert timing.doubt == 2.0


def test_a_trip_is_measured_from_what_an_attempt_left_in_the_store() -> None:
    events = [
        Event(50.0, "trainer", "first_step", "", data={"seconds": 99.0}),  # of an earlier attempt
        Event(120.0, "trainer", "first_step", "", data={"seconds": 15.0}),
        Event(130.0, "sync", "checkpoint_pushed", "", data={"seconds": 2.0, "num_bytes": 4_000_000}),
    ]
    trip = measure_trip(events, Outcome("done", "", 0, t=200.0), created_at=100.0, ended_at=212.0)
    assert trip == Trip(arrive_s=5.0, start_s=15.0, home_s=10.0, push_bytes_per_s=2e6)
    assert measure_trip(events[:1], Outcome("done", "", 0, t=200.0), created_at=100.0, ended_at=212.0) is None


def order(home: Home, run: Run, limit: str) -> LaunchOrder:
    plan = make_plan(dataclasses.replace(run, limits=dataclasses.replace(run.limits, spend_usd=limit)), home)
    best = plan.offers[0]
    return LaunchOrder(plan.run, "name: moss\n", True, best.offer, Decimal(limit), timing=best.timing)


@pytest.mark.acceptance(61)
def test_launch_refuses_less_than_the_minimum_that_plan_prints_and_takes_it_from_there_on(home: Home, run: Run) -> None:
    long = long_run(run)
    minimum = make_plan(long, home).offers[0].minimum_usd
    with pytest.raises(UsageError) as caught:
        draft(order(home, long, str(minimum * Decimal("0.99"))), home)
    assert "too low to finish, push the model and end billing" in caught.value.what
    assert "to push the model and end billing" in caught.value.why
    assert "--spend-limit" in caught.value.fix
    ready = draft(order(home, long, str(minimum * Decimal("1.01"))), home)
    assert ready.timing.home_s > 0


def test_a_time_limit_below_the_minimum_is_refused_too(home: Home, run: Run) -> None:
    short = dataclasses.replace(long_run(run), limits=Limits(time_s=20.0))
    with pytest.raises(UsageError, match=r"limits\.time"):
        draft(order(home, short, "50"), home)


@pytest.mark.acceptance(61)
def test_plan_says_what_the_limit_buys(home: Home, run: Run) -> None:
    long = long_run(run, 10**7)
    minimum = make_plan(long, home).offers[0].minimum_usd
    plan = make_plan(dataclasses.replace(long, limits=Limits(spend_usd=str(2 * minimum))), home)
    buys = plan.offers[0].buys
    assert buys is not None
    assert buys.is_landing
    assert 0 < buys.num_steps < buys.of_steps
    assert f"land at about step {buys.num_steps:,}" in " ".join(plan.warnings)


@pytest.mark.acceptance(45)
def test_what_goes_to_the_store_first_says_how_much_and_how_long(run: Run) -> None:
    data = dataclasses.replace(run.data, num_train_tokens=2_000_000_000, num_val_tokens=0)
    far = dataclasses.replace(run, data=data, store="modal:runs")
    assert pushing(far) == "at most 8.00 GB of tokens and weights, about 5m20s at 25.00 MB/s"
    assert "1m20s" in pushing(dataclasses.replace(far, store="file:/x"))
