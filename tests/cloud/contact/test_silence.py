"""A machine's silence is measured on this computer's clock, whatever the machine's own says."""

from __future__ import annotations

from pathlib import Path

import pytest

from homing.cloud.contact.heartbeats import age_s, last_word, quiet_s
from homing.cloud.home import Home
from homing.wire.control_files import Heartbeat
from homing.world import World


class Clock(World):
    t = 1000.0

    def now(self) -> float:
        return self.t

    def boottime(self) -> float:
        return self.t


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def home(tmp_path: Path, clock: Clock) -> Home:
    return Home(tmp_path, clock)


def beat(t: float, mark: str = "m-1", state: str = "kept") -> Heartbeat:
    return Heartbeat(t, mark, 1, state, 0.0, "0.36", "0.1")


@pytest.mark.parametrize("off_s", [-4000.0, 0.0, 4000.0])
def test_silence_is_counted_from_when_a_heartbeat_was_first_seen_here(home: Home, clock: Clock, off_s: float) -> None:
    assert quiet_s(home, "moss", beat(clock.t + off_s)) is None
    first = beat(clock.t + off_s)
    clock.t += 70
    assert quiet_s(home, "moss", first) == 70
    clock.t += 30
    assert quiet_s(home, "moss", first) == 100
    assert quiet_s(home, "moss", beat(first.t + 5)) is None, "a new heartbeat"


def test_a_heartbeat_of_another_attempt_starts_the_count_anew(home: Home, clock: Clock) -> None:
    quiet_s(home, "moss", beat(1.0))
    clock.t += 70
    assert quiet_s(home, "moss", beat(1.0, "m-2")) is None
    assert last_word(home, "moss", "m-1") == ("", 0.0)


def test_a_home_clock_that_is_set_back_starts_the_count_anew(home: Home, clock: Clock) -> None:
    quiet_s(home, "moss", beat(1.0))
    clock.t -= 500
    assert quiet_s(home, "moss", beat(1.0)) is None
    clock.t += 20
    assert quiet_s(home, "moss", beat(1.0)) == 20


def test_the_last_heartbeat_state_is_remembered_while_the_store_is_unreadable(home: Home, clock: Clock) -> None:
    assert last_word(home, "moss", "m-1") == ("", 0.0)
    quiet_s(home, "moss", beat(1.0, state="pushing"))
    clock.t += 70
    assert last_word(home, "moss", "m-1") == ("pushing", 70)


@pytest.mark.parametrize("off_s", [-4000.0, 4000.0])
def test_the_displayed_age_is_corrected_by_the_heartbeats_seen_here(home: Home, clock: Clock, off_s: float) -> None:
    first = beat(clock.t + off_s)
    assert age_s(home, "moss", first) == max(0.0, -off_s), "no correction is known yet"
    quiet_s(home, "moss", first)
    clock.t += 70
    assert age_s(home, "moss", first) == 70
    assert age_s(home, "moss", beat(first.t + 60)) <= 70
    assert age_s(home, "moss", beat(clock.t - 5, "m-2")) == 5, "no heartbeat of the other attempt was seen"


def test_a_damaged_note_is_ignored_and_on_a_full_disk_the_heartbeat_time_counts(
    home: Home, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet_s(home, "moss", beat(1.0))
    (home.run_dir("moss") / "heard.json").write_bytes(b'{"word": 3}')
    assert last_word(home, "moss", "m-1") == ("", 0.0)
    monkeypatch.setattr(clock, "write", lambda *_: (_ for _ in ()).throw(OSError("no space left on device")))
    assert quiet_s(home, "moss", beat(clock.t - 40)) == 40
