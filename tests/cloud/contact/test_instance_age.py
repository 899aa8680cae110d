"""Home sends the billed time to an agent that counts too little of it, and nothing to one that counts right."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from homing.cloud.contact.control_request import send_age
from homing.cloud.home import Home
from homing.store import FileStore, run_key
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, EndBilling
from homing.wire.control_files import Heartbeat, Request
from homing.world import World

RATE = "3.6"


class Clock(World):
    def __init__(self) -> None:
        self.t = 1000.0

    def now(self) -> float:
        return self.t

    def boottime(self) -> float:
        return self.t

    def monotonic(self) -> float:
        return self.t


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    made = FileStore(str(tmp_path / "store"), World())
    made.put_bytes("objects/x", b"x")
    return made


def boot() -> Boot:
    messages = {
        "run_id": "moss-1",
        "run_name": "moss",
        "mark": "m-1",
        "attempt": 1,
        "work_dir": "/w",
        "store": "file:/s",
    }
    limits = {"time_limit_s": 0.0, "idle_limit_s": 0.0, "stall_factor": 0.0, "spend_limit_usd": "1"}
    end = EndBilling(kind="command", argv=["true"])
    money = {"rate_usd_per_hour": RATE, "spent_before_usd": "0.1", "started_at": 1000.0, "end_billing": end}
    return Boot(**messages, **limits, **money, inputs=[], trainer_argv=[], sync_argv=[])  # type: ignore[arg-type]


def beat(counted_s: float) -> Heartbeat:
    return Heartbeat(0.0, "m-1", 1, "booting", 1000.0, RATE, f"{0.1 + counted_s * 0.001:.6f}")


def asked(store: FileStore) -> Request | None:
    key = run_key("moss-1", file_names.REQUEST)
    return codec.loads(Request, store.read(key)) if store.exists(key) else None


def test_no_age_is_sent_to_an_agent_that_counts_right(store: FileStore, tmp_path: Path) -> None:
    clock = Clock()
    clock.t += 60.0
    assert not send_age(Home(tmp_path, clock), store, boot(), beat(57.0), 1000.0)
    assert asked(store) is None


def test_an_agent_that_missed_its_boot_time_is_sent_an_age_rounded_up(store: FileStore, tmp_path: Path) -> None:
    clock = Clock()
    clock.t += 60.0
    assert send_age(Home(tmp_path, clock), store, boot(), beat(2.0), 1000.0)
    request = asked(store)
    assert request is not None
    assert request.age_s is not None
    assert 60.0 <= request.age_s <= 75.0


def test_sending_the_age_keeps_earlier_control_requests(store: FileStore, tmp_path: Path) -> None:
    clock = Clock()
    clock.t += 60.0
    before = Request(serial=4, stop=True, reason="enough", spend_limit_usd="2", t=0.0)
    store.put_bytes(run_key("moss-1", file_names.REQUEST), codec.dumps(before).encode())
    assert send_age(Home(tmp_path, clock), store, boot(), beat(0.0), 1000.0)
    request = asked(store)
    assert request is not None
    assert (request.serial, request.stop, request.reason, request.spend_limit_usd) == (5, True, "enough", "2")


@pytest.mark.parametrize("spend", ["NaN", "sNaN", "Infinity", "1e999999999", "-1e999999999", "lots", "9" * 5000])
def test_an_agent_whose_count_is_absurd_is_sent_its_age(store: FileStore, tmp_path: Path, spend: str) -> None:
    clock = Clock()
    clock.t += 60.0
    absurd = dataclasses.replace(beat(57.0), spend_usd=spend)
    assert send_age(Home(tmp_path, clock), store, boot(), absurd, 1000.0)
    request = asked(store)
    assert request is not None
    assert request.age_s is not None
    assert request.age_s >= 60.0
