"""Heartbeats, metrics and events to what a person sees."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import make_draft, marked_now

from homing.cloud.home import Home
from homing.cloud.launch import launch
from homing.cloud.ledger import RunRow
from homing.cloud.providers.base import Instance
from homing.cloud.providers.local import Local
from homing.cloud.signs import Signs, Tail
from homing.cloud.status import Status, look, progress_line
from homing.cloud.watch import check_interval, to_finish, watch
from homing.errors import StillBilling, StoreError, UsageError
from homing.store import FileStore
from homing.wire.control import Heartbeat
from homing.world import World


def test_one_line_has_everything_in_its_order_with_money_on_it() -> None:
    beat = Heartbeat(
        t=0.0,
        mark="m",
        attempt=1,
        state="training",
        started_at=0.0,
        rate_usd_per_hour="1",
        spend_usd="1.83",
        step=1200,
        num_steps=20000,
        loss=3.2141,
        tokens_per_s=412_000.0,
        mfu=0.41,
        eta_s=7800.0,
    )
    run = RunRow("moss-1", "moss", "running", 0.0, "file:/s", "", spend_limit_usd="12.00")
    status = Status(run, [], Signs(beat, None), Decimal("1.83"), 0.0)
    said = "step 1,200/20,000 | loss 3.214 | 412k tok/s | mfu 41% | $1.83 of $12.00 | eta 2h10m"
    assert progress_line(status, beat) == said
    assert progress_line(status, None) == "$1.83 of $12.00"
    bare = dataclasses.replace(beat, loss=None, mfu=None, tokens_per_s=None, eta_s=None)
    assert progress_line(status, bare) == "step 1,200/20,000 | $1.83 of $12.00"


def test_watch_tells_steps_events_samples_and_the_end(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=30, step_s=0.02), home)
    reports = list(watch(home, done.run, every_s=1))
    kinds = [report.kind for report in reports]
    assert {"line", "event", "sample", "end"} <= set(kinds)
    assert kinds[-1] == "end"
    assert reports[-1].text == "done: All steps are done."
    assert [report.text for report in reports if report.kind == "sample"] == ["once upon a time"] * 6
    events = [report.text for report in reports if report.kind == "event"]
    assert not any("once upon" in text for text in events)  # a sample is shown once, as a sample
    last = [report.text for report in reports if report.kind == "line"][-1]
    assert last.startswith("step 30/30 | loss 0.167 | 6.4k tok/s | mfu 41% | $")
    assert json.loads((home.path / "speed.json").read_text())["measured"][0]["tokens_per_s"] == 6400.0


def test_a_failed_poll_is_told_once_and_does_not_end_the_watch(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch(make_draft(home, tmp_path, steps=40, step_s=0.02), home)
    read, failures = FileStore.read, []

    def flaky(self: FileStore, key: str) -> bytes:
        if key.endswith("events.jsonl") and len(failures) < 3:
            failures.append(key)
            raise StoreError("The store is away.")
        return read(self, key)

    monkeypatch.setattr(FileStore, "read", flaky)
    reports = list(watch(home, done.run, every_s=1))
    assert [report.text for report in reports if report.kind == "problem"] == ["The store is away. Trying again."]
    assert reports[-1].text.startswith("done")


@pytest.mark.slow
def test_a_limit_ends_the_run_inside_it_and_is_told_apart(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance lives by the real clock, so the rate is made large: the limit is a minute away."""
    monkeypatch.setenv("HOMING_LOCAL_RATE", "36")
    monkeypatch.setattr("homing.cloud.meter.MARGIN_S", 1.0)
    done = launch(make_draft(home, tmp_path, limit="0.60", steps=100_000, step_s=0.02), home)
    reports = list(watch(home, home.ledger.find("moss"), every_s=1))
    row = home.ledger.find("moss")
    assert (row.state, row.exit_code) == ("stopped", 5)
    alert = next(report.text for report in reports if report.kind == "alert")
    assert alert.endswith("of the limit of $0.60 is spent.")
    seen = home.provider("local").describe(done.instance.id)
    assert seen.spend_usd is not None
    assert seen.spend_usd <= Decimal("0.60")
    assert to_finish(look(home, row), home) is not None


def test_when_nothing_of_ours_is_left_on_the_instance_the_watch_says_that_it_bills(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    while marked_now(home):
        for pid, _ in marked_now(home):
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(StillBilling, match="may still cost money") as caught:
        list(watch(home, done.run, every_s=1))
    assert "died" in caught.value.why


def test_past_the_limit_with_the_instance_still_there_the_watch_is_loud(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    home.ledger.update(home.ledger.lines()[0].mark, spend_usd="99")
    with pytest.raises(StillBilling) as caught:
        list(watch(home, done.run, every_s=1))
    assert "its limit has passed" in caught.value.why


def test_a_provider_that_cannot_be_asked_is_told_once(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch(make_draft(home, tmp_path, steps=60, step_s=0.05), home)
    monkeypatch.setattr("homing.cloud.watch._REFRESH_S", 0.2)
    real, asked = Local.list_owned, []

    def flaky(self: Local) -> list[Instance]:
        asked.append(1)
        if len(asked) < 8:
            raise OSError("no answer")
        return real(self)

    monkeypatch.setattr(Local, "list_owned", flaky)
    reports = list(watch(home, done.run, every_s=1))
    assert len([report for report in reports if report.kind == "problem"]) == 1
    assert reports[-1].kind == "end"


def test_a_run_that_ended_before_is_told_at_once(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=3), home)
    list(watch(home, done.run, every_s=1))
    again = list(watch(home, home.ledger.find("moss"), every_s=60))
    assert again[-1].kind == "end"


@pytest.mark.parametrize("every_s", [0, -3, 0.5, 100_000, float("nan")])
def test_a_bad_interval_is_refused(every_s: float) -> None:
    with pytest.raises(UsageError, match="interval"):
        check_interval(every_s)


class TestTail:
    @pytest.fixture
    def store(self, tmp_path: Path) -> FileStore:
        return FileStore(str(tmp_path / "store"), World())

    def test_each_line_is_given_out_once_and_half_a_line_waits(self, store: FileStore) -> None:
        tail = Tail(store, "log")
        store.put_bytes("other", b"")
        assert tail.lines() == []
        store.put_bytes("log", b"one\ntw")
        assert tail.lines() == ["one"]
        store.put_bytes("log", b"one\ntwo\n")
        assert tail.lines() == ["two"]
        assert tail.lines() == []

    def test_a_file_that_was_cut_or_replaced_is_read_from_its_beginning(self, store: FileStore) -> None:
        tail = Tail(store, "log")
        store.put_bytes("log", b"one\ntwo\n")
        assert tail.lines() == ["one", "two"]
        store.put_bytes("log", b"uno\n")
        assert tail.lines() == ["uno"]
        store.put_bytes("log", b"a much longer file\nwith other lines\n")
        assert tail.lines() == ["a much longer file", "with other lines"]

    def test_a_line_that_is_no_document_is_passed_over(self, store: FileStore) -> None:
        from homing.wire.event import Event

        tail = Tail(store, "events")
        good = json.dumps({"t": 1.0, "source": "agent", "kind": "k", "text": "t"})
        store.put_bytes("events", f"{good}\nnot json\n{good}\n".encode())
        assert len(tail.documents(Event)) == 2
