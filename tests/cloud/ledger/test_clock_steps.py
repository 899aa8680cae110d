"""Ages of instances do not change when this computer's clock is set."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doubles.toy_world import CloudWorld

from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine
from homing.cloud.ledger.meter import MOST_DRIFT_S, elapsed_s, follow_clock, stamp
from homing.doctor.computer import compare_clocks
from homing.world import HttpRequest, HttpResponse, World

HOUR = 3600.0


class Clock(CloudWorld):
    set_s = 0.0
    booted = "first"

    def now(self) -> float:
        return self.t + self.set_s

    def boot_id(self) -> str:
        return self.booted


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def home(tmp_path: Path, clock: Clock) -> Home:
    made = Home(tmp_path, clock)
    follow_clock(made)
    open_line(made, "old")
    return made


def open_line(home: Home, mark: str) -> None:
    line = LedgerLine(mark, "", "?", 1, "fake", "o", "1", None, home.world.now(), created_at=home.world.now())
    home.ledger.adopt(line)


def age_s(home: Home, mark: str) -> float:
    (line,) = (line for line in home.ledger.lines() if line.mark == mark)
    assert line.created_at is not None
    return home.world.now() - line.created_at


@pytest.mark.parametrize("step_s", [5 * HOUR, -5 * HOUR, 86400.0])
def test_open_lines_are_shifted_once_when_the_clock_is_set(home: Home, clock: Clock, step_s: float) -> None:
    clock.t += HOUR
    clock.set_s = step_s
    (said,) = follow_clock(home)
    assert "clock was set" in said
    assert age_s(home, "old") == HOUR
    assert follow_clock(home) == []
    assert age_s(home, "old") == HOUR


@pytest.mark.parametrize("step_s", [5 * HOUR, -5 * HOUR])
def test_the_time_of_a_destroy_request_is_shifted_when_the_clock_is_set(
    home: Home, clock: Clock, step_s: float
) -> None:
    """After an unanswered create call, the grace period counts from this time."""
    home.ledger.ask_destroy("old", clock.now())
    clock.t += 60
    clock.set_s = step_s
    follow_clock(home)
    asked_at = home.ledger.destroy_asked_at("old")
    assert asked_at is not None
    assert clock.now() - asked_at == 60


def test_a_line_made_after_the_clock_was_set_is_not_shifted(home: Home, clock: Clock) -> None:
    clock.set_s = 5 * HOUR
    open_line(home, "new")
    follow_clock(home)
    assert age_s(home, "new") == 0
    assert age_s(home, "old") == 0


def test_a_reboot_or_a_small_drift_shifts_nothing(home: Home, clock: Clock) -> None:
    clock.set_s = MOST_DRIFT_S
    assert follow_clock(home) == []
    clock.set_s, clock.booted = 5 * HOUR, "second"
    assert follow_clock(home) == []
    assert age_s(home, "old") == 5 * HOUR


def test_seconds_since_a_stamp_are_those_of_the_boot_clock(home: Home, clock: Clock) -> None:
    since = stamp(home)
    clock.t += 60
    clock.set_s = 5 * HOUR
    assert elapsed_s(home, since) == 60
    clock.booted = "second"
    assert elapsed_s(home, since) == 5 * HOUR + 60


class Answering(World):
    def now(self) -> float:
        return 1_800_000_000.0 + 5 * HOUR

    def http(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, {"date": "Fri, 15 Jan 2027 08:00:00 GMT"}, b"")


def test_the_difference_to_a_providers_clock_is_named() -> None:
    (found,) = compare_clocks(Answering(), ["https://api.example"])
    assert found.is_finding
    assert "5h" in found.text
    assert "ahead of" in found.text
