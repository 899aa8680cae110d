"""The watchdog's arithmetic, on a clock of our own."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from pathlib import Path

import pytest

from homing.instance.agent.folder import Folder
from homing.instance.agent.watchdog import Watchdog
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, EndBilling
from homing.wire.control_files import Heartbeat, Request
from homing.wire.event_lines import Event, Metric
from homing.wire.guard_timing import DEAD_MAN, END, GUARD, KILL, LAND, PROVIDER
from homing.world import World

HOUR = 3600.0


class Clock(World):
    def __init__(self) -> None:
        self.wall, self.mono = 1_000_000.0, 50.0

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.mono

    def boottime(self) -> float:
        return self.mono

    def boot_id(self) -> str:
        return "first"

    def pass_s(self, seconds: float) -> None:
        self.wall += seconds
        self.mono += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / file_names.RUN_DIR).mkdir()
    return tmp_path / file_names.RUN_DIR


def make_boot(**changes: object) -> Boot:
    boot = Boot(
        run_id="r", run_name="r", mark="m", attempt=1, work_dir="", store="", inputs=[], trainer_argv=[], sync_argv=[],
        end_billing=EndBilling(kind="command"), started_at=1_000_000.0, rate_usd_per_hour="2.49",
        spent_before_usd="0", spend_limit_usd="12.00", time_limit_s=0.0, idle_limit_s=0.0, stall_factor=10.0,
    )  # fmt: skip
    return dataclasses.replace(boot, **changes)  # type: ignore[arg-type]


def make_dog(clock: Clock, run_dir: Path, **changes: object) -> Watchdog:
    return Watchdog(Folder(make_boot(work_dir=str(run_dir.parent), **changes), clock))


def train(clock: Clock, run_dir: Path, steps: range, step_s: float = 1.0, phase: str = "pretrain") -> None:
    for step in steps:
        clock.pass_s(step_s)
        metric = Metric(clock.now(), phase, step, 1000, step * 10, step_s=step_s)
        clock.append(run_dir / file_names.METRICS, (codec.dumps(metric) + "\n").encode())


def test_spend_is_exact_decimal_arithmetic(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, spent_before_usd="1.10")
    clock.pass_s(2 * HOUR)
    assert dog.spend() == Decimal("1.10") + Decimal("4.98")


def test_landing_begins_before_the_limit_and_the_end_comes_inside_it(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="2")
    clock.pass_s(2 * HOUR - 241)
    assert dog.why_stop() == ""
    clock.pass_s(1)
    assert "spend limit of $2" in dog.why_stop()
    assert dog.left_s(LAND) == 0
    assert dog.left_s(KILL) == 120
    assert dog.left_s(END) == pytest.approx(168)
    clock.pass_s(168)
    assert dog.spend() < Decimal(2)


def test_a_small_limit_keeps_a_small_reserve(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="0.01")
    assert dog.left_s(LAND) == pytest.approx(36 * 0.9)
    assert dog.left_s(KILL) == pytest.approx(36 - 3.6 / 2)
    assert dog.left_s(END) == pytest.approx(36 - 3.6 / 2 * 0.75)


def test_the_smallest_limit_that_launch_takes_leaves_seconds_to_end_in(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, rate_usd_per_hour="3600", spend_limit_usd="185", stop_grace_s=120.0)
    assert 185 - dog.left_s(END) > 4
    assert dog.left_s(LAND) < dog.left_s(KILL) < dog.left_s(END)


@pytest.mark.acceptance(122)
@pytest.mark.parametrize("limit_s", [5.0, 36.0, 160.0, 185.0, 600.0, HOUR, 100 * HOUR])
def test_agent_dead_man_guard_and_provider_act_in_this_order_and_before_the_limit(
    clock: Clock, run_dir: Path, limit_s: float
) -> None:
    dog = make_dog(clock, run_dir, rate_usd_per_hour="3600", spend_limit_usd=str(limit_s), stop_grace_s=120.0)
    moments = [dog.left_s(share) for share in (LAND, KILL, END, DEAD_MAN, GUARD, PROVIDER)]
    assert moments == sorted(moments)
    assert len(set(moments[2:])) == 4
    assert moments[-1] < limit_s


def test_the_nearer_of_money_and_time_counts(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="2", time_limit_s=HOUR)
    assert dog.nearest() == (HOUR, "time limit of 3600 s")
    dog.change(Request(serial=1, time_limit_s=9 * HOUR))
    assert dog.nearest() == (2 * HOUR, "spend limit of $2")
    dog.change(Request(serial=2, spend_limit_usd="3.5"))
    assert dog.nearest()[0] == 3.5 * HOUR


def test_what_earlier_attempts_spent_counts(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="2", spent_before_usd="2.01")
    assert dog.nearest()[0] == 0
    assert dog.why_stop()


@pytest.mark.parametrize("changes", [{"spend_limit_usd": None}, {"rate_usd_per_hour": "0"}])
def test_without_a_limit_there_is_for_ever_left(clock: Clock, run_dir: Path, changes: dict[str, object]) -> None:
    dog = make_dog(clock, run_dir, **changes)
    clock.pass_s(1e9)
    assert dog.left_s(LAND) == math.inf
    assert dog.why_stop() == ""


@pytest.mark.parametrize(
    "jump_s",
    [-48 * HOUR, -1.0, 0.0, *(pytest.param(n * HOUR, marks=pytest.mark.regression("clock-jumps")) for n in (5, 48))],
)
def test_a_clock_that_jumps_makes_it_neither_cheaper_nor_dearer(clock: Clock, run_dir: Path, jump_s: float) -> None:
    dog = make_dog(clock, run_dir, rate_usd_per_hour="1")
    clock.pass_s(HOUR)
    clock.wall += jump_s
    assert dog.elapsed_s() == HOUR
    clock.pass_s(HOUR)
    assert dog.spend() == 2


@pytest.mark.regression("clock-jumps")
@pytest.mark.parametrize("jump_s", [-5 * HOUR, 5 * HOUR])
def test_an_agent_that_starts_again_after_a_jump_counts_on_where_the_last_one_was(
    clock: Clock, run_dir: Path, jump_s: float
) -> None:
    make_dog(clock, run_dir, rate_usd_per_hour="1")
    clock.pass_s(HOUR)
    clock.wall += jump_s
    assert make_dog(clock, run_dir, rate_usd_per_hour="1").elapsed_s() == HOUR


def test_after_the_machine_has_started_again_the_time_of_day_counts(
    clock: Clock, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dog(clock, run_dir, rate_usd_per_hour="1")
    clock.pass_s(HOUR)
    clock.mono = 3.0
    monkeypatch.setattr(Clock, "boot_id", lambda self: "second")
    assert make_dog(clock, run_dir, rate_usd_per_hour="1").elapsed_s() == HOUR


def test_a_clock_set_back_while_no_agent_lived_does_not_undo_what_was_known(clock: Clock, run_dir: Path) -> None:
    beat = Heartbeat(1_000_000.0 + 2 * HOUR, "m", 1, "training", 1_000_000.0, "2.49", "0")
    (run_dir / file_names.HEARTBEAT).write_text(codec.dumps(beat))
    clock.wall = 1_000_000.0 - 5 * HOUR
    dog = make_dog(clock, run_dir)
    clock.pass_s(60)
    assert dog.elapsed_s() == 2 * HOUR + 60


def test_a_clock_behind_that_of_home_gives_no_time_away(clock: Clock, run_dir: Path) -> None:
    clock.wall -= 5 * HOUR
    dog = make_dog(clock, run_dir, rate_usd_per_hour="1")
    clock.pass_s(HOUR)
    assert dog.elapsed_s() == HOUR
    assert dog.spend() == 1


@pytest.mark.acceptance(125)
def test_idle_means_no_progress_of_any_kind(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, idle_limit_s=100.0)
    clock.pass_s(99)
    assert dog.why_stop() == ""
    for source, kind, is_new_cause in (
        ("trainer", "compiling", True),
        ("sync", "checkpoint_pushed", True),
        ("sync", "input_fetched", True),
        ("sync", "input_fetching", True),
        ("sync", "input_retried", False),
        ("trainer", "step_skipped", False),
        ("agent", "sync_restarted", False),
        ("sync", "push_failing", False),
    ):
        dog.begin()
        clock.pass_s(99)
        clock.append(run_dir / file_names.EVENTS, (codec.dumps(Event(clock.now(), source, kind, "")) + "\n").encode())
        dog.read()
        clock.pass_s(2)
        assert (dog.why_stop() == "") == is_new_cause, kind


def test_the_same_step_again_is_no_progress(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, idle_limit_s=100.0)
    train(clock, run_dir, range(1, 3))
    dog.read()
    train(clock, run_dir, range(2, 3), step_s=101)
    dog.read()
    assert "idle limit" in dog.why_stop()


def test_a_stall_is_many_usual_steps_and_at_least_two_minutes(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir)
    train(clock, run_dir, range(1, 12))
    dog.read()
    clock.pass_s(119)
    assert dog.why_stalled() == ""
    clock.pass_s(1)
    assert "no step for 120 s, normally one every 1.0 s" in dog.why_stalled()
    train(clock, run_dir, range(12, 62), step_s=30)
    dog.read()
    clock.pass_s(299)
    assert dog.why_stalled() == ""
    clock.pass_s(1)
    assert dog.why_stalled()


def test_no_stall_before_ten_steps_of_this_trainer_and_phase(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir)
    train(clock, run_dir, range(1, 11))
    dog.read()
    clock.pass_s(1000)
    assert dog.why_stalled() == ""
    train(clock, run_dir, range(11, 30))
    dog.begin()  # a new trainer, which loads and compiles first
    train(clock, run_dir, range(25, 28))
    dog.read()
    clock.pass_s(1000)
    assert dog.why_stalled() == ""
    train(clock, run_dir, range(28, 60))
    train(clock, run_dir, range(1, 5), phase="mid")
    dog.read()
    clock.pass_s(1000)
    assert dog.why_stalled() == ""


def test_a_torn_or_foreign_line_is_read_over(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir)
    clock.append(run_dir / file_names.METRICS, b"not json\n{}\n[1]\n")
    train(clock, run_dir, range(1, 3))
    whole = codec.dumps(Metric(clock.now(), "pretrain", 3, 10, 30)).encode()
    clock.append(run_dir / file_names.METRICS, whole[:20])
    dog.read()
    assert dog.metric is not None
    assert dog.metric.step == 2
    clock.append(run_dir / file_names.METRICS, whole[20:] + b"\n")
    dog.read()
    assert dog.metric.step == 3


def test_metrics_cut_back_to_a_checkpoint_are_read_again(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir)
    train(clock, run_dir, range(1, 21))
    dog.read()
    (run_dir / file_names.METRICS).unlink()
    train(clock, run_dir, range(1, 8))
    dog.read()
    assert dog.metric is not None
    assert dog.metric.step == 7
    assert dog.furthest == (0, 20)


def test_files_that_cannot_be_read_do_not_take_it_down(clock: Clock, run_dir: Path) -> None:
    (run_dir / file_names.METRICS).mkdir()
    dog = make_dog(clock, run_dir)
    dog.read()
    assert dog.metric is None


def test_the_landing_deadline_leaves_time_for_the_final_push(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="2")
    assert dog.land_s() == dog.left_s(LAND)
    planned = make_dog(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="2", push_s=200.0, home_s=20.0)
    assert planned.land_s() == planned.left_s(END) - 420


def test_a_measured_push_replaces_the_planned_one(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="2", push_s=200.0, home_s=20.0)
    pushed = Event(clock.now(), "sync", "checkpoint_pushed", "", data={"seconds": 500.0, "num_bytes": 1})
    clock.append(run_dir / file_names.EVENTS, (codec.dumps(pushed) + "\n").encode())
    dog.read()
    assert dog.land_s() == dog.left_s(END) - 1020


def test_a_limit_that_is_no_number_is_refused_and_changes_nothing(clock: Clock, run_dir: Path) -> None:
    dog = make_dog(clock, run_dir, spend_limit_usd="12")
    for amount in ("NaN", "Infinity", "-Infinity", "lots", "1e999999999", "1e30", "9" * 200):
        with pytest.raises(ArithmeticError):
            dog.change(Request(serial=1, spend_limit_usd=amount))
    assert dog.spend_limit == 12
