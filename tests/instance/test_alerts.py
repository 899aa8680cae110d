"""The monitor on a simulated clock: what it reports, and that it reports each thing once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.instance.agent.test_watchdog import HOUR, Clock, make_boot

from homing.instance.alerts import LOOK_S, Lookout, main, use_of_machine
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot
from homing.wire.control_files import Request, Use
from homing.wire.event_lines import Event, Metric
from homing.world import Completed, HttpRequest, HttpResponse, NetworkError


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / file_names.RUN_DIR).mkdir()
    return tmp_path / file_names.RUN_DIR


def make_lookout(clock: Clock, run_dir: Path, **changes: object) -> Lookout:
    return Lookout(make_boot(work_dir=str(run_dir.parent), **changes), clock)


def events(run_dir: Path) -> list[Event]:
    path = run_dir / file_names.EVENTS
    return [codec.loads(Event, line) for line in path.read_text().splitlines()] if path.exists() else []


def lines(clock: Clock, run_dir: Path, losses: list[float | None], **messages: object) -> None:
    for loss in losses:
        clock.pass_s(1)
        step = lines.step = getattr(lines, "step", 0) + 1  # type: ignore[attr-defined]
        metric = dataclasses.replace(Metric(clock.now(), "pretrain", step, 9999, step * 10, loss), **messages)  # type: ignore[arg-type]
        clock.append(run_dir / file_names.METRICS, (codec.dumps(metric) + "\n").encode())


def alarms(lookout: Lookout) -> list[str]:
    lookout.read()
    return [what for what, _, _ in lookout.alarms()]


@pytest.mark.acceptance(119)
def test_a_loss_far_above_its_usual_line_after_line_is_divergence(clock: Clock, run_dir: Path) -> None:
    lookout = make_lookout(clock, run_dir)
    lines(clock, run_dir, [9.0 - 0.1 * n for n in range(60)])
    assert alarms(lookout) == []
    lines(clock, run_dir, [20.0] * 9)
    assert alarms(lookout) == [], "a spike may come back"
    lines(clock, run_dir, [3.2, *[20.0] * 9])
    assert alarms(lookout) == []
    lines(clock, run_dir, [20.0])
    assert alarms(lookout) == ["divergence"]
    (run_dir / file_names.METRICS).unlink()
    lines(clock, run_dir, [3.2], step=40)
    assert alarms(lookout) == [], "another trainer starts from a good checkpoint"


def test_a_loss_that_is_no_number_line_after_line_is_divergence(clock: Clock, run_dir: Path) -> None:
    lookout = make_lookout(clock, run_dir)
    lines(clock, run_dir, [3.0, *[None] * 9])
    assert alarms(lookout) == []
    lines(clock, run_dir, [None])
    assert alarms(lookout) == ["divergence"]


def test_a_loss_that_only_falls_or_begins_a_phase_high_is_none(clock: Clock, run_dir: Path) -> None:
    lookout = make_lookout(clock, run_dir)
    lines(clock, run_dir, [0.5] * 50)
    lines(clock, run_dir, [5.0] * 50, phase="sft")
    assert alarms(lookout) == []


@pytest.mark.acceptance(62, 119)
def test_speed_is_judged_on_the_first_twenty_steps(clock: Clock, run_dir: Path) -> None:
    lookout = make_lookout(clock, run_dir, planned_speeds={"pretrain": 1000.0})
    lines(clock, run_dir, [3.0] * 20, tokens_per_s=300.0)
    assert alarms(lookout) == []
    lines(clock, run_dir, [3.0], tokens_per_s=300.0)
    assert alarms(lookout) == ["slow"]
    assert "300 tokens/s; the plan assumed 1,000" in next(iter(lookout.alarms()))[2]
    enough = make_lookout(clock, run_dir, planned_speeds={"pretrain": 899.0})
    lines(clock, run_dir, [3.0] * 30, tokens_per_s=300.0)
    assert alarms(enough) == []


def test_each_phase_is_held_against_its_own_plan(clock: Clock, run_dir: Path) -> None:
    """Answers of rl take many times as long as reading in pretrain: that is no slow machine."""
    lookout = make_lookout(clock, run_dir, planned_speeds={"pretrain": 1000.0, "rl": 20.0})
    lines(clock, run_dir, [3.0] * 30, tokens_per_s=900.0)
    lines(clock, run_dir, [3.0] * 30, tokens_per_s=18.0, phase="rl")
    lines(clock, run_dir, [3.0] * 30, tokens_per_s=1.0, phase="sft")
    assert alarms(lookout) == [], "no speed is planned for sft"
    lines(clock, run_dir, [3.0] * 30, tokens_per_s=5.0, phase="rl")
    assert alarms(lookout) == ["slow"]


def test_a_very_slow_machine_is_known_within_ten_minutes(clock: Clock, run_dir: Path) -> None:
    lookout = make_lookout(clock, run_dir, planned_speeds={"pretrain": 1000.0})
    lines(clock, run_dir, [3.0] * 3, tokens_per_s=2.0)
    assert alarms(lookout) == []
    clock.pass_s(600)
    assert alarms(lookout) == ["slow"]


@pytest.mark.acceptance(148, "X1")
def test_warnings_come_at_60_and_80_percent_of_money_or_time_whichever_is_first(clock: Clock, run_dir: Path) -> None:
    lookout = make_lookout(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="10", time_limit_s=20 * HOUR)
    clock.pass_s(6 * HOUR - 1)
    assert alarms(lookout) == []
    clock.pass_s(2)
    (_, at_60, text) = next(iter(lookout.alarms()))
    assert "60% of a limit is used: $6.01" in text
    clock.pass_s(2 * HOUR)
    (_, at_80, _) = next(iter(lookout.alarms()))
    assert at_80 != at_60
    lookout.change(Request(serial=1, spend_limit_usd="13"))
    (_, again, _) = next(iter(lookout.alarms()))
    assert again not in (at_60, at_80), "a new limit warns anew"
    short = make_lookout(clock, run_dir, rate_usd_per_hour="0.01", spend_limit_usd="10", time_limit_s=10 * HOUR)
    assert alarms(short) == ["limit_warning"]


def test_each_alarm_is_raised_once_even_after_a_restart_of_the_monitor(clock: Clock, run_dir: Path) -> None:
    lookout = make_lookout(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="10")
    clock.pass_s(6 * HOUR)
    for _ in range(3):
        lookout.look()
    make_lookout(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="10").look()
    assert [event.kind for event in events(run_dir)] == ["limit_warning"]
    assert set(events(run_dir)[0].data["use"]) >= {"cpu", "memory"}


@pytest.mark.parametrize(("control_request", "stops"), [("alert", None), ("stop", "m")])
def test_an_alert_stops_the_run_only_where_the_run_file_says_so(
    clock: Clock, run_dir: Path, control_request: str, stops: str | None
) -> None:
    lookout = make_lookout(clock, run_dir, on_divergence=control_request)
    lines(clock, run_dir, [3.0, *[None] * 10])
    lookout.look()
    (alert,) = events(run_dir)
    assert (alert.kind, alert.data.get("stops")) == ("alert", stops)


@pytest.mark.acceptance(62)
@pytest.mark.parametrize(("on_slow", "stops"), [("alert", None), ("stop", "m")])
def test_a_slow_instance_stops_the_run_only_where_the_run_file_says_so(
    clock: Clock, run_dir: Path, on_slow: str, stops: str | None
) -> None:
    lookout = make_lookout(clock, run_dir, on_slow=on_slow, planned_speeds={"pretrain": 1000.0})
    lines(clock, run_dir, [3.0] * 21, tokens_per_s=300.0)
    lookout.look()
    (alert,) = events(run_dir)
    assert (alert.kind, alert.data.get("stops")) == ("alert", stops)
    assert "the plan assumed 1,000" in alert.text


def test_it_follows_limits_that_home_changed(clock: Clock, run_dir: Path) -> None:
    lookout = make_lookout(clock, run_dir, rate_usd_per_hour="1", spend_limit_usd="10")
    (run_dir / file_names.LIMITS).write_text(codec.dumps(Request(serial=1, spend_limit_usd="100")))
    clock.pass_s(6 * HOUR)
    lookout.look()
    assert events(run_dir) == []


class Messages(Clock):
    """The machine's own address answers as configured."""

    def __init__(self, *answers: int | Exception) -> None:
        super().__init__()
        self.answers = list(answers)

    def http(self, request: HttpRequest) -> HttpResponse:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return HttpResponse(answer, {}, b"")


def test_a_preemption_notice_is_reported_once_and_only_for_status_200(run_dir: Path) -> None:
    machine = Messages(404, NetworkError("refused"), 500, 200)
    lookout = make_lookout(machine, run_dir, notice_url="http://169.254.0.1/notice")
    for _ in range(6):
        lookout.look()
    (notice,) = events(run_dir)
    assert (notice.kind, notice.data["stops"]) == ("preemption_notice", "m")
    assert machine.answers == []


class Card(Clock):
    def read(self, path: object, offset: int = 0, max_bytes: int = -1) -> bytes:
        raise OSError("no /proc here")

    def run(self, argv, timeout_s, env=None, stdin=""):  # type: ignore[no-untyped-def]
        return Completed(0, "50, 10, 40\n90, 20, 40\n", "") if argv[0] == "nvidia-smi" else super().run(argv, timeout_s)


def test_an_instance_near_its_end_of_life_is_left_in_time_with_one_event(clock: Clock, run_dir: Path) -> None:
    lookout = make_lookout(clock, run_dir, leave_s=HOUR / 4)
    clock.pass_s(HOUR / 4 - 60)
    lookout.look()
    assert [event.kind for event in events(run_dir) if event.kind == "preemption_notice"] == []
    clock.pass_s(120)
    for _ in range(2):
        lookout.look()
    make_lookout(clock, run_dir, leave_s=HOUR / 4).look()
    (notice,) = [event for event in events(run_dir) if event.kind == "preemption_notice"]
    assert notice.data["stops"] == lookout._plan.mark


def test_a_run_that_lands_at_its_limit_does_not_leave(clock: Clock, run_dir: Path) -> None:
    """What leaves is launched again; what landed is over."""
    lookout = make_lookout(clock, run_dir, leave_s=HOUR - 100, time_limit_s=HOUR)
    clock.pass_s(HOUR - 90)
    assert lookout.left_s(1.0) <= 0
    lookout.look()
    assert [event for event in events(run_dir) if event.kind == "preemption_notice"] == []


@pytest.mark.acceptance(118)
def test_how_busy_the_machine_is_is_written_down_every_minute_as_far_as_it_can_be_asked(
    clock: Clock, run_dir: Path
) -> None:
    assert use_of_machine(Card()) == {"gpu": 0.9, "gpu_memory": 0.5}
    lookout = make_lookout(clock, run_dir)
    lookout.look()
    assert set(codec.loads(Use, (run_dir / file_names.USE).read_bytes()).shares) >= {"cpu", "memory"}
    (run_dir / file_names.USE).unlink()
    clock.pass_s(59)
    lookout.look()
    assert not (run_dir / file_names.USE).exists()
    clock.pass_s(1)
    lookout.look()
    assert (run_dir / file_names.USE).exists()


def test_the_monitor_survives_any_error_of_a_check(
    clock: Clock, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, slept = [], []

    def look(self: Lookout) -> None:
        looks.append(1)
        raise OSError("an ill disk")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Lookout, "look", look)
    monkeypatch.setattr(clock, "sleep", sleep)
    boot = make_boot(work_dir=str(run_dir.parent))
    assert isinstance(boot, Boot)
    (run_dir.parent / file_names.BOOT).write_text(codec.dumps(boot))
    with pytest.raises(KeyboardInterrupt):
        main([str(run_dir.parent / file_names.BOOT)], clock)
    assert (len(looks), slept) == (3, [LOOK_S] * 3)


class Metadata(Clock):
    """EC2's metadata service: nothing without a token, and a notice once there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.has_notice = False

    def http(self, request: HttpRequest) -> HttpResponse:
        if request.method == "PUT" and request.url.endswith("/latest/api/token"):
            assert request.headers == {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            return HttpResponse(200, {}, b"the-token")
        if request.headers.get("X-aws-ec2-metadata-token") != "the-token":
            return HttpResponse(401, {}, b"")
        return HttpResponse(200 if self.has_notice else 404, {}, b'{"action": "terminate"}')


def test_a_notice_that_wants_a_token_is_asked_for_with_one(run_dir: Path) -> None:
    machine = Metadata()
    metadata = "http://169.254.169.254/latest"
    lookout = make_lookout(
        machine,
        run_dir,
        notice_url=f"{metadata}/meta-data/spot/instance-action",
        notice_token_url=f"{metadata}/api/token",
    )
    lookout.look()
    assert events(run_dir) == []
    machine.has_notice = True
    lookout.look()
    assert [event.kind for event in events(run_dir)] == ["preemption_notice"]
