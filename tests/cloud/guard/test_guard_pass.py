"""The guard at home: limits, ends that did not happen, machines that went, and never twice."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import clear, forget, make_draft, marked_now, trainer_argv

from homing.cloud import destroy as destroying
from homing.cloud.ask_providers import ASK_S, NEAR_LIMIT_TIMEOUT_S
from homing.cloud.contact import action_log
from homing.cloud.contact.home_guard import is_on_duty
from homing.cloud.destroy import Problem
from homing.cloud.guard import guard_pass as guarding
from homing.cloud.guard import relaunch
from homing.cloud.guard.change_limit_or_stop import ask_to_stop, wait_for_stop
from homing.cloud.guard.guard_pass import DEAD_S, LAUNCH_S, STALE_S, Pass, guard_pass, wait_for_next
from homing.cloud.home import Home
from homing.cloud.launch import launch as launching
from homing.cloud.launch.launch import Launched, launch
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import ADOPTED, CUT_SHORT, LedgerLine, RunRow
from homing.cloud.ledger.run_lease import write_record
from homing.cloud.providers.base import Resource
from homing.cloud.providers.local.provider import Local
from homing.cloud.providers.ssh.provider import Ssh
from homing.cloud.reconcile import reconcile as reconciling
from homing.cloud.reconcile.adopt import adopt, propose
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.watch.follow import watch
from homing.errors import LimitReached, ProviderRefused, ProviderSilent, StoreError
from homing.store import FileStore, run_key
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat, Request
from homing.wire.event_lines import Outcome
from homing.wire.guard_timing import DEAD_MAN, END, GUARD, PROVIDER
from homing.wire.run_json import Limits
from homing.world import Database, World


class Later(World):
    """The real world with a clock that can be moved forward or set to another time of day."""

    def __init__(self) -> None:
        self.ahead_s = self.set_s = 0.0

    def now(self) -> float:
        return time.time() + self.ahead_s + self.set_s

    def boottime(self) -> float:
        return super().boottime() + self.ahead_s


@pytest.fixture
def home(homing_home: Path) -> Any:
    found = Home(homing_home, Later())
    yield found
    clear(homing_home)


def ahead(home: Home, seconds: float) -> None:
    assert isinstance(home.world, Later)
    home.world.ahead_s += seconds


def begin(home: Home, tmp_path: Path, **messages: Any) -> Launched:
    return launch(make_draft(home, tmp_path, **{"steps": 100_000, **messages}), home)


def kill_all(home: Home) -> None:
    """Kills every marked process, repeatedly, because the agent and the dead-man restart each other."""
    while marked_now(home):
        for pid, _ in marked_now(home):
            World().signal(pid, signal.SIGKILL)


def row(home: Home) -> RunRow:
    return home.ledger.find("moss")


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_healthy_run_is_left_alone_and_the_next_round_is_at_its_limit(home: Home, tmp_path: Path) -> None:
    begin(home, tmp_path)
    made = guard_pass(home, every_s=60)
    assert (made.done, made.alerts, made.problems, made.may_bill) == ([], [], [], [])
    line = home.ledger.lines()[-1]
    assert line.created_at is not None
    limit_s = 10_000  # a dollar at 36 cents an hour
    assert line.created_at + limit_s - 60 < made.next_at < line.created_at + limit_s
    assert row(home).state == "running"


@pytest.mark.acceptance(122)
def test_the_guard_destroys_a_run_just_before_its_spend_limit(home: Home, tmp_path: Path) -> None:
    done = begin(home, tmp_path)
    ahead(home, 10_000 - 90)  # leaves a slow computer some seconds; the guard acts at -29 s
    assert guard_pass(home).done == [], "agent and dead-man act first"
    ahead(home, 65)
    made = guard_pass(home)
    assert "ended the run at its limit: spent $0.99" in made.done[0]
    assert home.provider("local").describe(done.instance.id).state == "gone"
    assert (row(home).state, row(home).exit_code) == ("stopped", 5)
    assert Decimal(home.ledger.lines()[-1].spend_usd) <= 1
    assert action_log.read(home, done.run.id)[-1].kind == "guard_ends"
    assert guard_pass(home).done == []
    assert not row(home).is_live, "a run that reached its limit is not relaunched"


@pytest.mark.slow
def test_the_guard_destroys_a_run_at_its_time_limit(home: Home, tmp_path: Path) -> None:
    begin(home, tmp_path, limits=Limits(time_s=3600.0))
    ahead(home, 3600 - 10)
    assert "1h00m allowed" in guard_pass(home).done[0]
    assert not marked_now(home)


@pytest.mark.slow
def test_the_guard_uses_the_providers_spend_where_it_is_higher(home: Home, tmp_path: Path) -> None:
    begin(home, tmp_path)
    home.ledger.update(home.ledger.lines()[-1].mark, spend_usd="0.9999")
    assert "at its limit" in guard_pass(home).done[0]


@pytest.mark.slow
def test_the_cost_of_volumes_counts_towards_the_limit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path)
    line = home.ledger.lines()[-1]
    volume = Resource("volume", "v-1", line.mark, "local", Decimal("0.36"), line.created_at)
    monkeypatch.setattr(Local, "list_resources", lambda self: [volume])
    monkeypatch.setattr(Local, "destroy_resource", lambda self, each: None)
    ahead(home, 4900)
    assert guard_pass(home).done == []
    monkeypatch.setattr("homing.cloud.guard.limits_and_destroys.DESTROY_S", 0.1)
    ahead(home, 90)
    assert "still lists its volume v-1" in guard_pass(home).may_bill[0]
    assert marked_now(home) == []


def give_away(home: Home, tmp_path: Path) -> Home:
    """Another computer of the same person adopts moss; it has no guard."""
    other = Home(tmp_path / "other-home", World())
    store = home.store_of(row(home))
    adopt(propose(store, "moss", other), store, other)
    return other


def test_the_guard_ends_a_run_adopted_elsewhere_at_its_limit_without_taking_it_back(home: Home, tmp_path: Path) -> None:
    done = begin(home, tmp_path)
    other = give_away(home, tmp_path)
    made = guard_pass(home)
    assert (made.done, made.alerts, row(home).state) == ([], [], ADOPTED)
    line = home.ledger.lines()[-1]
    assert line.created_at is not None
    assert line.created_at + 10_000 - 60 < made.next_at < line.created_at + 10_000
    ahead(home, 10_000 - 25)
    assert "ended the run at its limit: spent $0.99" in guard_pass(home).done[0]
    assert marked_now(home) == []
    assert row(home).state == ADOPTED
    assert Decimal(home.ledger.lines()[-1].spend_usd) <= 1
    assert other.ledger.run(done.run.id) is not None
    assert guard_pass(home).done == []


@pytest.mark.slow
def test_the_new_owners_limit_applies_to_a_run_adopted_elsewhere(home: Home, tmp_path: Path) -> None:
    done = begin(home, tmp_path)
    other = give_away(home, tmp_path)
    other.ledger.set_run(done.run.id, spend_limit_usd="2.00")
    write_record(other, done.run.id, other.store_of(done.run))
    ahead(home, 10_000)
    assert guard_pass(home).done == []
    assert marked_now(home)
    ahead(home, 10_000 - 5)
    assert "of $2.00" in guard_pass(home).done[0]
    assert marked_now(home) == []


@pytest.mark.slow
def test_the_guard_ignores_silence_and_a_dead_agent_of_a_run_adopted_elsewhere(home: Home, tmp_path: Path) -> None:
    begin(home, tmp_path)
    give_away(home, tmp_path)
    kill_all(home)
    for _ in range(3):
        made = guard_pass(home)
        assert (made.done, made.alerts) == ([], [])
        ahead(home, DEAD_S + STALE_S)
    assert len(home.ledger.lines()) == 1
    assert home.ledger.lines()[-1].destroyed_at is None


@pytest.mark.slow
def test_the_last_known_limit_applies_if_the_new_owners_store_cannot_be_read(home: Home, tmp_path: Path) -> None:
    done = begin(home, tmp_path)
    give_away(home, tmp_path)
    guard_pass(home)
    kill_all(home)
    (tmp_path / "store").rename(tmp_path / "away")
    made = guard_pass(home)
    assert "Enforcing the last known limit: $1.00" in made.alerts[0]
    assert guard_pass(home).alerts == [], "said once an hour"
    ahead(home, 10_000)
    assert f"{done.run.id}: The local guard ended the run at its limit" in guard_pass(home).done[0]


def test_an_unconfirmed_destroy_is_reported_as_billing_and_retried(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path)
    ahead(home, 10_000)
    monkeypatch.setattr("homing.cloud.guard.limits_and_destroys.DESTROY_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(Local, "destroy", lambda *_: (_ for _ in ()).throw(ProviderRefused("No, says the provider.")))
        made = guard_pass(home)
        assert len(made.may_bill) == 1
        assert "No, says the provider" in made.may_bill[0]
    made = guard_pass(home)
    assert made.may_bill == []
    assert not marked_now(home)


@pytest.mark.slow
def test_the_limit_stays_in_force_while_the_provider_does_not_answer(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Local, "list_owned", lambda self: (_ for _ in ()).throw(OSError("no route")))
        made = guard_pass(home)
        assert "so its instances may be billing" in made.problems[0]
        assert made.done == []
        assert made.next_at < home.world.now() + 10_000


@pytest.mark.slow
def test_a_failed_destroy_of_one_run_does_not_stop_the_guard_for_the_others(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path)
    begin(home, tmp_path, name="fern")
    ahead(home, 10_000)
    real, monkey = Local.destroy, []

    def stubborn(self: Local, instance_id: str) -> None:
        if "fern" in instance_id:
            monkey.append(instance_id)
            raise OSError("reset")
        real(self, instance_id)

    monkeypatch.setattr("homing.cloud.guard.limits_and_destroys.DESTROY_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(Local, "destroy", stubborn)
        made = guard_pass(home)
    assert monkey
    assert [said.split(":")[0] for said in made.done] == [row(home).id]
    assert any("fern" in said for said in made.may_bill)


@pytest.mark.acceptance(124)
@pytest.mark.slow
def test_the_instance_of_an_ended_run_is_destroyed_after_a_margin(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = begin(home, tmp_path)
    kill_all(home)
    store = home.store_of(done.run)
    mark = home.ledger.lines()[-1].mark
    beat = Heartbeat(time.time(), mark, 1, "ending", 0.0, "0.36", "0.1", is_pushed=True)
    store.put_bytes(run_key(done.run.id, file_names.HEARTBEAT), codec.dumps(beat).encode())
    outcome = Outcome("done", "All steps are done.", 0, t=home.world.now(), is_final=True)
    store.put_bytes(run_key(done.run.id, file_names.OUTCOME), codec.dumps(outcome).encode())
    assert guard_pass(home).done == []
    assert row(home).state == "done"
    ahead(home, meter.MARGIN_S + 1)
    assert "still billing" in guard_pass(home).done[0]
    assert row(home).state == "done"
    assert home.provider("local").list_owned() == []


@pytest.mark.slow
def test_an_instance_kept_after_a_failure_is_destroyed_once_it_is_silent(home: Home, tmp_path: Path) -> None:
    done = begin(home, tmp_path)
    kill_all(home)
    store, mark = home.store_of(done.run), home.ledger.lines()[-1].mark

    def beat() -> None:
        kept = Heartbeat(home.world.now(), mark, 1, "kept", 0.0, "0.36", "0.1")
        store.put_bytes(run_key(done.run.id, file_names.HEARTBEAT), codec.dumps(kept).encode())

    outcome = Outcome("failed", "It broke.", 1, t=home.world.now())
    store.put_bytes(run_key(done.run.id, file_names.OUTCOME), codec.dumps(outcome).encode())
    for _ in range(3):
        ahead(home, meter.MARGIN_S)
        beat()
        assert guard_pass(home).done == []
    ahead(home, STALE_S + 1)
    assert "still billing" in guard_pass(home).done[0]


@pytest.mark.slow
@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_the_silence_of_a_kept_instance_is_measured_by_our_clock(home: Home, tmp_path: Path, off_s: float) -> None:
    done = begin(home, tmp_path)
    kill_all(home)
    store, mark = home.store_of(done.run), home.ledger.lines()[-1].mark
    outcome = Outcome("failed", "It broke.", 1, t=home.world.now() + off_s)
    store.put_bytes(run_key(done.run.id, file_names.OUTCOME), codec.dumps(outcome).encode())
    for _ in range(3):
        kept = Heartbeat(home.world.now() + off_s, mark, 1, "kept", 0.0, "0.36", "0.1")
        store.put_bytes(run_key(done.run.id, file_names.HEARTBEAT), codec.dumps(kept).encode())
        assert guard_pass(home).done == []
        ahead(home, meter.MARGIN_S)
    (tmp_path / "store").rename(tmp_path / "away")
    ahead(home, STALE_S)
    assert guard_pass(home).done == [], "an unreadable store does not count as a silent instance"
    (tmp_path / "away").rename(tmp_path / "store")
    assert "still billing" in guard_pass(home).done[0]


def silence(home: Home, done: Launched, *, with_heartbeat: bool) -> None:
    """No further heartbeat reaches the store; `_running` lets the provider still show the instance as running."""
    kill_all(home)
    store = home.store_of(done.run)
    if not with_heartbeat:  # as after a launch that was killed before the first heartbeat
        store.delete(run_key(done.run.id, file_names.HEARTBEAT))
        home.ledger.set_run(done.run.id, state="launching")


@pytest.fixture
def _running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider shows every instance as running, like most, which cannot see its processes."""
    real = Local.describe
    monkeypatch.setattr(Local, "describe", lambda self, i: dataclasses.replace(real(self, i), is_running=True))


@pytest.mark.slow
@pytest.mark.usefixtures("_running")
def test_a_silent_instance_is_alerted_once_then_more_urgently_and_not_destroyed(home: Home, tmp_path: Path) -> None:
    silence(home, begin(home, tmp_path), with_heartbeat=True)
    ahead(home, STALE_S + 10)
    assert "No heartbeat for 5m" in guard_pass(home).alerts[0]
    assert guard_pass(home).alerts == []
    ahead(home, 1800)
    assert "NO HEARTBEAT" in guard_pass(home).alerts[0]
    assert guard_pass(home).done == []
    assert row(home).is_live


@pytest.mark.slow
@pytest.mark.usefixtures("_running")
def test_an_instance_that_never_sent_a_heartbeat_is_destroyed_after_the_idle_limit(home: Home, tmp_path: Path) -> None:
    done = begin(home, tmp_path, limits=Limits(idle_s=600.0, relaunches=0))
    silence(home, done, with_heartbeat=False)
    ahead(home, 560)
    assert guard_pass(home).done == []
    ahead(home, 50)
    made = guard_pass(home)
    assert "sent no heartbeat" in made.done[0]
    assert home.provider("local").list_owned() == []


@pytest.mark.slow
@pytest.mark.usefixtures("_running")
def test_a_running_instance_with_a_lost_heartbeat_is_alerted_and_not_destroyed(home: Home, tmp_path: Path) -> None:
    done = begin(home, tmp_path, limits=Limits(idle_s=600.0))
    silence(home, done, with_heartbeat=False)
    home.ledger.set_run(done.run.id, state="running")
    ahead(home, 700)
    made = guard_pass(home)
    assert made.done == []
    assert "NO HEARTBEAT" in made.alerts[0]


@pytest.mark.slow
def test_a_long_last_push_is_not_interrupted(home: Home, tmp_path: Path) -> None:
    done = begin(home, tmp_path, limits=Limits(idle_s=1200.0))
    kill_all(home)
    store, mark = home.store_of(done.run), home.ledger.lines()[-1].mark
    beat = Heartbeat(home.world.now(), mark, 1, "pushing", 0.0, "0.36", "0.1")
    store.put_bytes(run_key(done.run.id, file_names.HEARTBEAT), codec.dumps(beat).encode())
    outcome = Outcome("failed", "The trainer failed.", 1, t=home.world.now(), is_final=True)
    store.put_bytes(run_key(done.run.id, file_names.OUTCOME), codec.dumps(outcome).encode())
    ahead(home, 3 * meter.MARGIN_S)
    assert guard_pass(home).done == []
    ahead(home, 1200)
    assert "still billing" in guard_pass(home).done[0]


@pytest.mark.slow
def test_an_old_observation_without_processes_does_not_end_an_instance(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = begin(home, tmp_path)
    real = Local.describe
    monkeypatch.setattr(Local, "describe", lambda self, i: dataclasses.replace(real(self, i), is_running=False))
    for _ in range(2):  # each time it is seen idle once and sends a heartbeat afterwards
        assert "The agent is no longer running" in guard_pass(home).alerts[0]
        spoken = time.time()
        wait_until(lambda spoken=spoken: beat_of(home, done).t > spoken + 1)
        ahead(home, DEAD_S + 1)
    assert row(home).is_live
    assert marked_now(home)


def beat_of(home: Home, done: Launched) -> Heartbeat:
    return codec.loads(Heartbeat, home.store_of(done.run).read(run_key(done.run.id, file_names.HEARTBEAT)))


@pytest.mark.slow
def test_the_guard_destroys_a_duplicate_instance_and_keeps_the_one_in_the_ledger(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = begin(home, tmp_path)
    real_list, real_destroy, real_describe, twins = Local.list_owned, Local.destroy, Local.describe, ["late"]

    def list_owned(self: Local) -> list[Any]:
        found = real_list(self)
        return found + [
            dataclasses.replace(each, id=duplicate, created_at=time.time()) for each in found for duplicate in twins
        ]

    def destroy(self: Local, instance_id: str) -> None:
        twins.remove(instance_id) if instance_id in twins else real_destroy(self, instance_id)

    def describe(self: Local, instance_id: str) -> Any:
        if instance_id != "late":
            return real_describe(self, instance_id)
        state = "ready" if twins else "gone"
        return dataclasses.replace(real_describe(self, done.instance.id), id=instance_id, state=state)

    monkeypatch.setattr(Local, "list_owned", list_owned)
    monkeypatch.setattr(Local, "destroy", destroy)
    monkeypatch.setattr(Local, "describe", describe)
    made = guard_pass(home)
    assert "both are being billed" in made.problems[0]
    assert "Destroyed late: another instance" in made.done[0]
    duplicate, line = home.ledger.lines(done.run.id)
    assert (duplicate.is_duplicate, duplicate.destroyed_at is None, Decimal(duplicate.spend_usd) > 0) == (
        True,
        False,
        True,
    )
    assert (line.instance_id, line.destroyed_at) == (done.instance.id, None)
    assert guard_pass(home).problems == []
    assert marked_now(home)


@pytest.mark.slow
def test_an_earlier_attempt_that_reappears_is_destroyed_and_the_run_continues(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_rig_trainer(monkeypatch, tmp_path, steps=100_000)
    done = begin(home, tmp_path)
    kill_all(home)
    guard_pass(home)
    ahead(home, DEAD_S + 1)
    guard_pass(home)
    assert row(home).state == "running"
    real_list, real_describe, real_destroy, back = Local.list_owned, Local.describe, Local.destroy, [done.instance.id]

    def describe(self: Local, instance_id: str) -> Any:
        found = real_describe(self, instance_id)
        is_back = instance_id in back
        return dataclasses.replace(found, state="ready", billing="yes", is_running=False) if is_back else found

    def destroy(self: Local, instance_id: str) -> None:
        real_destroy(self, instance_id)
        back.clear()

    monkeypatch.setattr(Local, "describe", describe)
    monkeypatch.setattr(Local, "destroy", destroy)
    monkeypatch.setattr(Local, "list_owned", lambda self: [*real_list(self), *(self.describe(i) for i in back)])
    ahead(home, DEAD_S + 1)
    made = guard_pass(home)
    assert "appeared again and was destroyed" in made.done[0]
    assert row(home).state == "running"
    assert [line.destroyed_at is None for line in home.ledger.lines()] == [False, True]
    assert marked_now(home)


@pytest.mark.slow
def test_a_guard_whose_terminal_is_closed_still_enforces_limits(home: Home, tmp_path: Path) -> None:
    def closed(text: str) -> None:
        raise OSError("input/output error")

    begin(home, tmp_path)
    ahead(home, 10_000)
    assert "at its limit" in guard_pass(home, notify=closed).done[0]
    assert marked_now(home) == []


@pytest.mark.slow
def test_a_guard_on_a_full_disk_still_enforces_limits(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path)
    ahead(home, 10_000)
    monkeypatch.setattr("homing.cloud.guard.limits_and_destroys.DESTROY_S", 0.1)
    real = Database.execute

    def full(self: Database, *statements: Any) -> Any:
        if any(sql.startswith("UPDATE") for sql, _ in statements):
            raise OSError("database or disk is full")
        return real(self, *statements)

    def fail_to_note(*_: object) -> bool:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "execute", full)
        patch.setattr(action_log, "note", fail_to_note)
        made = guard_pass(home)
        assert len(made.may_bill) == 1
        assert marked_now(home) == []
    assert guard_pass(home).may_bill == []
    assert home.ledger.lines()[-1].destroyed_at is not None


@pytest.mark.slow
@pytest.mark.usefixtures("_running")
def test_the_guard_does_not_end_an_instance_whose_launch_still_waits_for_it(home: Home, tmp_path: Path) -> None:
    done = begin(home, tmp_path, limits=Limits(idle_s=600.0))
    silence(home, done, with_heartbeat=False)
    lock = home.launch_lock(home.ledger.lines()[-1].mark)
    lock.parent.mkdir(exist_ok=True)
    code = f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(600)"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: World().is_locked(lock))
        ahead(home, 700)
        assert guard_pass(home).done == []
    finally:
        launcher.kill()
        launcher.wait()
    assert "sent no heartbeat" in guard_pass(home).done[0]


@pytest.mark.slow
@pytest.mark.usefixtures("_running")
def test_an_unreadable_store_does_not_count_as_a_silent_instance(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(home, begin(home, tmp_path), with_heartbeat=False)
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "read", lambda *_: (_ for _ in ()).throw(StoreError("The store is away.")))
        ahead(home, 5000)
        made = guard_pass(home)
        assert made.done == []
        assert "Its limit is still enforced locally." in made.alerts[0]
        ahead(home, 5000)
        assert "at its limit" in guard_pass(home).done[0]


@pytest.mark.usefixtures("_running")
def test_an_unresponsive_remote_store_does_not_delay_a_limit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reading such a store took minutes per live run, one after another, before the guard checked any limit.
    done, waited, ended = begin(home, tmp_path), list[str](), threading.Event()
    home.ledger.set_run(done.run.id, store="s3://far-away/moss")
    monkeypatch.setattr("homing.cloud.ask_providers.ASK_S", 0.2)
    real = Local.destroy

    class Silent(FileStore):
        def read(self, key: str) -> bytes:
            waited.append("in vain" if not ended.wait(20) else "until its end")
            raise StoreError("It did not answer.")

        def list(self, prefix: str) -> Any:
            return self.read(prefix)

    def destroy(local: Local, instance_id: str) -> None:
        ended.set()
        real(local, instance_id)

    monkeypatch.setattr(Home, "store_of", lambda self, run: Silent(str(tmp_path / "store"), World()))
    monkeypatch.setattr(Local, "destroy", destroy)
    made = guard_pass(home)
    assert made.done == []
    assert "did not answer" in made.alerts[0]
    ahead(home, 10_000 - 25)
    assert "ended the run at its limit" in guard_pass(home).done[0]
    assert "in vain" not in waited


class Mute(FileStore):
    """A remote store that does not answer until `ended` is set; `waited` records how each wait ended."""

    ended: threading.Event
    waited: list[str]

    def read(self, key: str) -> bytes:
        self.waited.append("in vain" if not self.ended.wait(20) else "until its end")
        raise StoreError("It did not answer.")

    def list(self, prefix: str) -> Any:
        return self.read(prefix)

    def put_bytes(self, key: str, data: bytes) -> Any:
        return self.read(key)


@pytest.fixture
def mute(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Mute]:
    """Makes every remote store a Mute one; destroying any instance wakes them."""
    real, near = Local.destroy, Home.store_of
    monkeypatch.setattr(Mute, "ended", threading.Event(), raising=False)
    monkeypatch.setattr(Mute, "waited", [], raising=False)
    monkeypatch.setattr("homing.cloud.ask_providers.ASK_S", 0.2)
    monkeypatch.setattr("homing.cloud.ask_providers.NEAR_LIMIT_TIMEOUT_S", 0.2)

    def destroy(local: Local, instance_id: str) -> None:
        Mute.ended.set()
        real(local, instance_id)

    monkeypatch.setattr(Local, "destroy", destroy)
    far = Mute(str(tmp_path / "store"), World())
    monkeypatch.setattr(Home, "store_of", lambda self, run: far if run.store.startswith("s3:") else near(self, run))
    return Mute


@pytest.mark.usefixtures("_running")
def test_an_unresponsive_remote_store_does_not_delay_a_limit_during_watch(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    done = begin(home, tmp_path)
    home.ledger.set_run(done.run.id, store="s3://far-away/moss")
    mute = request.getfixturevalue("mute")
    monkeypatch.setattr("homing.cloud.watch.follow._REFRESH_S", 0.0)
    reports = watch(home, row(home), every_s=1)
    assert "did not answer" in next(reports).text
    ahead(home, 10_000 - 25)
    assert any("ended the run at its limit" in report.text for report in itertools.islice(reports, 4))
    assert "in vain" not in mute.waited


@pytest.mark.usefixtures("_running")
def test_writing_the_record_of_an_ended_run_does_not_delay_a_limit(
    home: Home, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Its store hangs, and the guard has not read it in this round before it writes the record.
    over = RunRow("fern-1", "fern", "stopped", 1.0, "s3://far-away/fern", "f" * 64, "1.00", ended_at=home.world.now())
    home.ledger.adopt_run(over, [], [])
    home.world.mkdir(home.run_dir(over.id))
    home.world.write(home.run_dir(over.id) / "recorded", b"of an earlier day")
    begin(home, tmp_path)
    mute = request.getfixturevalue("mute")
    ahead(home, 10_000 - 25)
    made = guard_pass(home)
    assert "ended the run at its limit" in made.done[0]
    assert any("record of fern-1" in problem for problem in made.problems)
    assert "in vain" not in mute.waited


@pytest.mark.slow
def test_the_receipt_of_an_instance_that_ended_itself_does_not_delay_a_limit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # If the provider gives no end time, the receipt needs the last heartbeat from the store.
    first = begin(home, tmp_path, name="fern")
    begin(home, tmp_path)
    home.provider("local").destroy(first.instance.id)
    real = Local.describe
    without_end = {"ended_at": None, "spend_usd": None}
    monkeypatch.setattr(Local, "describe", lambda *given: dataclasses.replace(real(*given), **without_end))
    home.ledger.set_run(first.run.id, store="s3://far-away/fern")
    mute = request.getfixturevalue("mute")
    ahead(home, 10_000 - 25)
    assert "ended the run at its limit" in guard_pass(home, only=row(home).id).done[0]
    assert "in vain" not in mute.waited


def test_request_timeouts_end_before_the_guard_has_to_enforce_a_limit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a silent provider and store a round took a minute; the guard acts half a minute before the limit.
    begin(home, tmp_path)
    asked, real = list[float](), World.together

    def together(world: World, calls: Any, timeout_s: float) -> Any:
        asked.append(timeout_s)
        return real(world, calls, timeout_s)

    monkeypatch.setattr(World, "together", together)
    made = guard_pass(home)
    assert set(asked) == {ASK_S}
    asked.clear()
    ahead(home, made.next_at - home.world.now() - 12)
    guard_pass(home)
    assert asked
    assert all(NEAR_LIMIT_TIMEOUT_S <= timeout_s <= 12 for timeout_s in asked)
    asked.clear()
    monkeypatch.setattr("homing.cloud.guard.guard_pass._Round.is_within_limit", lambda self: True)
    ahead(home, 13)
    guard_pass(home)
    assert set(asked) == {NEAR_LIMIT_TIMEOUT_S}
    asked.clear()
    ahead(home, 3600)
    guard_pass(home)
    assert set(asked) == {ASK_S}, "a limit that passed long ago shortens no timeouts"


@pytest.mark.slow
def test_a_failing_destroy_does_not_delay_another_run_that_reached_its_limit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path)
    begin(home, tmp_path, name="fern")
    ahead(home, 10_000)
    real, tried = Local.destroy, list[str]()

    def stubborn(self: Local, instance_id: str) -> None:
        tried.append("fern" if "fern" in instance_id else "moss")
        if tried[-1] == "fern":
            raise OSError("reset")
        real(self, instance_id)

    monkeypatch.setattr("homing.cloud.guard.limits_and_destroys.DESTROY_S", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Local, "destroy", stubborn)
        made = guard_pass(home)
    assert sorted(tried[:2]) == ["fern", "moss"]
    assert tried.count("fern") > 1
    assert [said.split(":")[0] for said in made.done] == [row(home).id]
    assert ["fern" in said and "reset" in said for said in made.may_bill[:1]] == [True]
    assert home.ledger.find("fern").state == "stopped", "fern is stopped although its destroy is not confirmed"


@pytest.mark.slow
def test_a_hanging_destroy_does_not_delay_the_limit_of_another_run(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path)
    begin(home, tmp_path, name="fern", limit="0.90")
    ahead(
        home, guard_pass(home, only=row(home).id).next_at - home.world.now() - 1.0
    )  # just before the guard has to act for moss
    real, answers, waited = Local.destroy, threading.Event(), list[str]()

    def hang(self: Local, instance_id: str) -> None:
        if "fern" in instance_id:
            waited.append("in vain" if not answers.wait(60) else "until it was time")
        real(self, instance_id)

    monkeypatch.setattr("homing.cloud.destroy.NEAR_LIMIT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(Local, "destroy", hang)
    before = set(threading.enumerate())
    made = guard_pass(home)
    assert waited == []
    assert any("fern" in said for said in made.may_bill)
    wait_for_next(home, made, 60.0)
    assert [said.split(":")[0] for said in guard_pass(home, only=row(home).id).done] == [row(home).id]
    assert waited == []
    answers.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert "in vain" not in waited
    assert all(line.destroyed_at is not None for line in home.ledger.lines())
    refresh(home)
    assert home.ledger.find("fern").exit_code == LimitReached.exit_code, (
        "confirmed late, with the exit code of its limit"
    )


def test_a_limit_that_passed_long_ago_does_not_hide_the_next_one(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path, name="fern", limit="0.90")
    begin(home, tmp_path)
    monkeypatch.setattr(
        "homing.cloud.guard.guard_pass._Round.is_within_limit", lambda self: True
    )  # fern stays, past its limit
    due = guard_pass(home).by
    assert due == guarding._soonest(home, home.ledger.find("fern").id)
    assert due < guarding._soonest(home, row(home).id)
    ahead(home, guarding._soonest(home, row(home).id) - home.world.now() - 12)
    assert home.world.now() - due > 60
    assert 0 < guard_pass(home).by - home.world.now() <= 12


@pytest.mark.slow
def test_a_failed_destroy_is_retried_however_long_the_others_took(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path)
    begin(home, tmp_path, name="fern")
    ahead(home, 10_000)
    real, tried, passed_s = Local.destroy, list[str](), [0.0]

    def slow(self: Local, instance_id: str) -> None:
        tried.append("fern" if "fern" in instance_id else "moss")
        if tried == ["moss"]:
            raise OSError("reset")
        if tried == ["moss", "fern"]:
            passed_s[0] = 600.0  # longer than the time allowed for moss, if it counted from the first attempt
        real(self, instance_id)

    monkeypatch.setattr(Local, "destroy", slow)
    monkeypatch.setattr(home.world, "monotonic", lambda: time.monotonic() + passed_s[0])
    made = guard_pass(home)
    assert tried[:3] == ["moss", "fern", "moss"]
    assert made.may_bill == []


def test_resources_other_than_machines_are_listed_once_per_pass(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path)
    begin(home, tmp_path, name="fern")
    asked = list[str]()

    def note(self: Local) -> Any:
        asked.append("asked")
        raise ProviderSilent("local cannot be asked now.")

    monkeypatch.setattr(Local, "list_resources", note)
    made = guard_pass(home)
    assert asked == ["asked"]
    assert len([text for text in made.problems if "could not list its volumes" in text]) == 2


def test_instances_are_described_one_by_one_if_the_list_is_refused(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = begin(home, tmp_path)
    asked, real = list[str](), Local.describe

    def refuse(self: Local) -> Any:
        raise ProviderRefused("403 Forbidden")

    def note(self: Local, instance_id: str) -> Any:
        asked.append(instance_id)
        return real(self, instance_id)

    with monkeypatch.context() as patch:
        patch.setattr(Local, "list_owned", refuse)
        patch.setattr(Local, "describe", note)
        made = guard_pass(home)
    assert any("Could not query local" in text for text in made.problems)
    assert done.instance.id in asked, "a refusal is not silence: other requests are still sent"


def test_a_silent_provider_is_not_asked_about_each_instance(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each request takes two minutes there, and a run elsewhere may reach its limit meanwhile.
    begin(home, tmp_path)
    asked = list[str]()

    def silent(self: Local) -> Any:
        raise ProviderSilent("local cannot be asked now.")

    def note(*given: Any) -> Any:
        asked.append("asked")
        raise ProviderSilent("local cannot be asked now.")

    with monkeypatch.context() as patch:
        patch.setattr(Local, "list_owned", silent)
        for name in ("describe", "list_resources", "destroy"):
            patch.setattr(Local, name, note)
        made = guard_pass(home)
    assert any("Could not query local" in text for text in made.problems)
    assert asked == []


@pytest.mark.usefixtures("_running")
def test_a_remote_store_that_answers_after_the_deadline_changes_nothing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The late answer may describe an attempt that another one has replaced by then.
    done, answers, read = begin(home, tmp_path), threading.Event(), threading.Event()
    home.ledger.set_run(done.run.id, store="s3://far-away/moss")
    home.ledger.set_run(done.run.id, state="launching")
    monkeypatch.setattr("homing.cloud.ask_providers.ASK_S", 0.2)
    real = reconciling.read_reports

    def late(*given: Any) -> Any:
        answers.wait(20)
        try:
            return real(*given)
        finally:
            read.set()

    monkeypatch.setattr(reconciling, "read_reports", late)
    monkeypatch.setattr(Home, "store_of", lambda self, run: FileStore(str(tmp_path / "store"), World()))
    before = set(threading.enumerate())
    assert "Could not read the store" in refresh(home)[0]
    answers.set()
    assert read.wait(20)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert row(home).state == "launching"


def test_an_unresponsive_ssh_host_does_not_delay_a_limit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An SSH host that is off was queried last, for longer than a guard has before a limit.
    begin(home, tmp_path)
    answered, waited = threading.Event(), list[bool]()
    monkeypatch.setattr("homing.cloud.ask_providers.ASK_S", 0.2)
    monkeypatch.setattr("homing.cloud.reconcile.reconcile.providers_in_use", lambda at_home: ["local", "ssh"])
    monkeypatch.setattr(Ssh, "list_owned", lambda self: waited.append(answered.wait(20)) or [])
    ahead(home, 10_000 - 25)
    made = guard_pass(home, only=row(home).id)
    assert "ended the run at its limit" in made.done[0]
    assert any("Could not query ssh" in problem for problem in made.problems)
    assert waited == [], "the guard did not wait for the answer"
    answered.set()


def use_rig_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **messages: Any) -> None:
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), **messages),
    )


@pytest.mark.acceptance(74, 106)
@pytest.mark.slow
def test_a_run_resumes_elsewhere_from_its_checkpoint_after_its_machine_died(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_rig_trainer(monkeypatch, tmp_path, steps=40, step_s=0.02)
    done = begin(home, tmp_path, step_s=0.02)
    store = home.store_of(done.run)
    wait_until(
        lambda: any(e.key.endswith(file_names.MANIFEST) for e in store.list(run_key(done.run.id, "checkpoints")))
    )
    kill_all(home)
    assert "The agent is no longer running" in guard_pass(home).alerts[0]
    assert guard_pass(home).done == [], "one observation is not enough"
    ahead(home, DEAD_S + 1)
    made = guard_pass(home)
    assert "the agent is no longer running on its instance" in made.done[0]
    assert "Attempt 2 launches on local" in made.done[1]
    lines = home.ledger.lines(done.run.id)
    assert [line.attempt for line in lines] == [1, 2]
    assert lines[0].destroyed_at is not None

    def is_done() -> bool:
        guard_pass(home)
        return row(home).state == "done"

    wait_until(is_done)
    log = store.read(run_key(done.run.id, "logs", "trainer.log")).decode()
    assert "trainer begins at step 1\n" in log
    assert any(f"trainer begins at step {step}\n" in log for step in range(2, 41))
    assert meter.total_spend(home.ledger.lines(), home.world.now()) < 1


@pytest.mark.slow
def test_a_preempted_run_is_relaunched_and_a_manually_destroyed_one_is_not(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_and_lose(home, tmp_path, monkeypatch)
    made = guard_pass(home)
    assert "Attempt 2 launches" in made.done[0]
    assert row(home).state == "running"
    destroying.destroy_run(home, row(home))
    assert guard_pass(home).done == []
    assert row(home).reason == "destroyed manually"
    assert home.provider("local").list_owned() == []


def begin_and_lose(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches a run and preempts its instance, so that the next guard round relaunches it."""
    use_rig_trainer(monkeypatch, tmp_path, steps=100_000)
    begin(home, tmp_path)
    agent = next(pid for pid, _ in marked_now(home) if is_agent(pid))
    os.kill(agent, signal.SIGTERM)
    wait_until(lambda: not home.provider("local").list_owned())


def expect_it_stays_destroyed(home: Home) -> None:
    assert guard_pass(home).done == []
    assert row(home).reason == "destroyed manually"
    assert [line.attempt for line in home.ledger.lines()] == [1]


@pytest.mark.slow
def test_a_run_destroyed_during_its_relaunch_stays_destroyed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_and_lose(home, tmp_path, monkeypatch)
    real = Local.create

    def create(local: Local, request: Any) -> Any:
        destroying.destroy_run(Home(home.path, World()), row(home))
        return real(local, request)

    monkeypatch.setattr(Local, "create", create)
    guard_pass(home)
    monkeypatch.setattr(Local, "create", real)
    assert guard_pass(home).done == []
    assert [line.attempt for line in home.ledger.lines()] == [1, 2]
    assert home.provider("local").list_owned() == []


@pytest.mark.slow
def test_a_run_destroyed_while_a_guard_looks_for_offers_is_not_relaunched(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_and_lose(home, tmp_path, monkeypatch)
    real = relaunch.make_plan

    def slow(run: Any, at_home: Home) -> Any:
        destroying.destroy_run(Home(home.path, World()), row(home))
        return real(run, at_home)

    monkeypatch.setattr(relaunch, "make_plan", slow)
    assert guard_pass(home).done == []
    assert row(home).reason == "destroyed manually"
    assert home.provider("local").list_owned() == []


@pytest.mark.slow
def test_a_run_destroyed_while_a_guard_checks_its_inputs_is_not_relaunched(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_and_lose(home, tmp_path, monkeypatch)
    monkeypatch.setattr(
        "homing.cloud.launch.launch.check_hub",
        lambda run, world: destroying.destroy_run(Home(home.path, World()), row(home)),
    )
    expect_it_stays_destroyed(home)


@pytest.mark.slow
def test_a_run_destroyed_just_before_the_intent_is_not_relaunched(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_and_lose(home, tmp_path, monkeypatch)
    real = launching.hold_lock

    def hold(*given: Any) -> None:
        real(*given)
        destroying.destroy_run(Home(home.path, World()), row(home))

    monkeypatch.setattr(launching, "hold_lock", hold)
    expect_it_stays_destroyed(home)


@pytest.mark.slow
def test_destroy_also_ends_an_attempt_that_a_guard_launches_meanwhile(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # When destroy starts nothing bills; it used to leave the guard's new instance running.
    begin_and_lose(home, tmp_path, monkeypatch)
    guard_pass(home, only="no-such-run")
    real = destroying.refresh

    def look(at_home: Home) -> list[str]:
        monkeypatch.setattr(destroying, "refresh", real)
        assert len(guard_pass(Home(home.path, World())).done) == 1
        return real(at_home)

    monkeypatch.setattr(destroying, "refresh", look)
    done = destroying.destroy_run(home, row(home))
    assert [line.attempt for line in done.lines] == [2]
    assert home.provider("local").list_owned() == []
    assert row(home).reason == "destroyed manually"
    assert guard_pass(home).done == []


@pytest.mark.slow
def test_a_failed_relaunch_does_not_overwrite_a_destroy_made_meanwhile(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A failed launch used to restore the state before it, over "destroyed manually", and the next round rented again.
    begin_and_lose(home, tmp_path, monkeypatch)
    real = launching.preflight

    def hang(*given: Any, **settings: Any) -> Any:
        monkeypatch.setattr(launching, "preflight", real)
        destroying.destroy_run(Home(home.path, World()), row(home))
        raise StoreError("It did not answer.")

    monkeypatch.setattr(launching, "preflight", hang)
    assert guard_pass(home).done == []
    assert row(home).reason == "destroyed manually"
    assert guard_pass(home).done == []
    assert [line.attempt for line in home.ledger.lines()] == [1]


@pytest.mark.slow
def test_a_report_of_an_earlier_attempt_is_not_recorded_for_the_next_one(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second guard relaunched the run during a slow store read: the old report marked the new attempt preempted.
    begin_and_lose(home, tmp_path, monkeypatch)
    real = reconciling._note_run

    def late(*given: Any) -> None:
        monkeypatch.setattr(reconciling, "_note_run", real)
        assert len(guard_pass(Home(home.path, World())).done) == 1
        real(*given)

    monkeypatch.setattr(reconciling, "_note_run", late)
    refresh(home)
    assert row(home).is_live
    assert [line.attempt for line in home.ledger.lines()] == [1, 2]


def unknown_word(*given: Any, **settings: Any) -> Any:
    raise TypeError("no such word")


def test_an_unreadable_volume_list_leaves_the_limit_in_force(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(home, tmp_path)
    monkeypatch.setattr(Local, "list_resources", unknown_word)
    made = guard_pass(home)
    assert any("could not list its volumes: TypeError: no such word" in text for text in made.problems)
    assert made.next_at < float("inf")


def test_a_malformed_answer_to_destroy_does_not_end_the_guard(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, now = f"homing-{home.owner}-heather-1", home.world.now()
    home.ledger.adopt(LedgerLine(mark, "", "heather", 1, "runpod", "o", "2.49", "1", now, "p-1", now))
    home.ledger.ask_destroy(mark, now)
    monkeypatch.setattr("homing.cloud.guard.limits_and_destroys.end_each", unknown_word)
    assert f"{mark}: TypeError: no such word" in guard_pass(home).may_bill


def test_a_malformed_list_of_instances_does_not_end_the_guard(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, real = begin(home, tmp_path), Local.list_owned

    def odd(local: Local) -> Any:
        monkeypatch.setattr(Local, "list_owned", real)
        raise KeyError("status")

    monkeypatch.setattr(Local, "list_owned", odd)
    ahead(home, 10_000 - 25)
    made = guard_pass(home)
    assert "KeyError: 'status'" in made.problems[0]
    assert "ended the run at its limit" in made.done[0]
    assert home.provider("local").describe(done.instance.id).state == "gone"


@pytest.mark.slow
def test_malformed_offers_do_not_end_the_guard(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_and_lose(home, tmp_path, monkeypatch)

    def odd(local: Local, needs: Any) -> Any:
        return {"gpus": []}["gpuTypes"]

    monkeypatch.setattr(Local, "offers", odd)
    (problem,) = guard_pass(home).problems
    assert "KeyError: 'gpuTypes'" in problem


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_is_not_relaunched_after_its_agent_died(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_rig_trainer(monkeypatch, tmp_path, steps=100_000)
    done = begin(home, tmp_path)
    kill_all(home)
    control_request = Request(serial=1, stop=True, reason="A stop was requested.")
    home.store_of(done.run).put_bytes(run_key(done.run.id, file_names.REQUEST), codec.dumps(control_request).encode())
    guard_pass(home)
    ahead(home, DEAD_S + 1)
    assert "Not relaunched: A stop was requested" in guard_pass(home).done[-1]
    assert len(home.ledger.lines()) == 1


@pytest.mark.slow
def test_a_run_waiting_for_its_relaunch_can_be_stopped(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `homing stop` used to answer that the run is not running, and the guard then rented the next instance.
    begin_and_lose(home, tmp_path, monkeypatch)
    guard_pass(home, only="no-such-run")
    assert row(home).may_go_on
    ask_to_stop(home, row(home))
    assert (row(home).state, row(home).reason) == ("stopped", "A stop was requested.")
    assert wait_for_stop(home, row(home), timeout_s=0.0).run.state == "stopped"
    assert guard_pass(home).done == []
    assert [line.attempt for line in home.ledger.lines()] == [1]


@pytest.mark.slow
def test_a_stop_request_during_a_relaunch_is_obeyed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A new attempt used to withdraw every control request, even one newer than the guard's last check for it.
    begin_and_lose(home, tmp_path, monkeypatch)
    real = launching._take_lease

    def take(draft: Any, at_home: Home, store: Any) -> Any:
        ask_to_stop(Home(home.path, World()), row(home))
        return real(draft, at_home, store)

    monkeypatch.setattr(launching, "_take_lease", take)
    assert guard_pass(home).done == []
    assert home.provider("local").list_owned() == []
    assert [line.created_at is None for line in home.ledger.lines()] == [False, True]
    assert guard_pass(home).done == [], "nor in the next round"


@pytest.mark.slow
def test_a_run_stays_destroyed_if_its_relaunch_died_with_the_guard(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_and_lose(home, tmp_path, monkeypatch)

    def die(draft: Any, at_home: Home, notify: Any) -> None:
        at_home.world.remove(at_home.launch_lock(draft.mark))  # as if its process had exited
        raise SystemExit

    with monkeypatch.context() as killed:
        killed.setattr(launching, "_prepare", die)
        killed.setattr(launching, "_undo", lambda *_: None)
        with pytest.raises(SystemExit):
            guard_pass(home)
    refresh(home)
    assert row(home).reason == CUT_SHORT
    destroying.destroy_run(home, row(home))
    assert guard_pass(home).done == []
    assert row(home).reason == "destroyed manually"
    assert home.provider("local").list_owned() == []


def is_agent(pid: int) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"agent.zip" in line and b"--dead-man" not in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "on_preempt", "said"),
    [(Limits(relaunches=0), "relaunch", "limits.relaunches is 0"), (Limits(), "stop", "cloud.on_preempt is stop")],
)
def test_the_run_file_can_forbid_relaunches(
    home: Home, tmp_path: Path, limits: Limits, on_preempt: str, said: str
) -> None:
    ready = make_draft(home, tmp_path, steps=100_000, limits=limits)
    cloud = dataclasses.replace(ready.run.cloud, on_preempt=on_preempt)
    launch(dataclasses.replace(ready, run=dataclasses.replace(ready.run, cloud=cloud)), home)
    kill_all(home)
    guard_pass(home)
    ahead(home, DEAD_S + 1)
    made = guard_pass(home)
    assert any(said in text for text in made.done)
    assert guard_pass(home).done == [], "reported once"
    assert len(home.ledger.lines()) == 1


@pytest.mark.slow
def test_a_run_with_too_little_budget_left_is_not_relaunched_and_alerted_once(home: Home, tmp_path: Path) -> None:
    begin(home, tmp_path)
    kill_all(home)
    guard_pass(home)
    ahead(home, 9_955)  # too little for a relaunch, and still before the guard enforces the limit
    made = guard_pass(home)
    assert "the agent is no longer running" in made.done[0]
    assert "Could not relaunch it yet" in made.alerts[0]
    assert guard_pass(home).alerts == []
    assert len(home.ledger.lines()) == 1


@pytest.mark.slow
def test_a_relaunch_waits_while_the_limit_of_another_run_is_near(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_rig_trainer(monkeypatch, tmp_path, steps=100_000)
    begin(home, tmp_path)
    kill_all(home)
    begin(home, tmp_path, name="fern", limits=Limits(time_s=LAUNCH_S))
    guard_pass(home)
    ahead(home, DEAD_S + 1)
    made = guard_pass(home)
    assert "needs this guard first" in made.alerts[0]
    assert len(home.ledger.lines()) == 2
    ahead(home, LAUNCH_S)
    made = guard_pass(home)
    assert [text.split(": ")[1] for text in made.done][:1] == ["The local guard ended the run at its limit"]
    assert "Attempt 2 launches" in made.done[1]


@pytest.mark.slow
def test_two_concurrent_guards_launch_one_attempt(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_rig_trainer(monkeypatch, tmp_path, steps=100_000)
    begin(home, tmp_path)
    kill_all(home)
    guard_pass(home)
    ahead(home, DEAD_S + 1)
    made: list[Pass] = []
    other = Home(home.path, home.world)
    threads = [threading.Thread(target=lambda h=h: made.append(guard_pass(h))) for h in (home, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(made) == 2
    attempts = [line.attempt for line in home.ledger.lines()]
    assert attempts == [1, 2]
    assert len(home.provider("local").list_owned()) == 1
    assert sum("Attempt 2" in text for each in made for text in each.done) == 1


@pytest.mark.slow
def test_an_instance_without_a_run_is_reported_and_not_destroyed(home: Home, tmp_path: Path) -> None:
    done = begin(home, tmp_path)
    forget(home.path)
    home = Home(home.path, home.world)
    made = guard_pass(home)
    assert "belongs to no known run. Resolve it: homing reconcile" in made.may_bill[0]
    assert home.provider("local").describe(done.instance.id).state == "ready"


def test_a_periodic_guard_is_on_duty_until_its_next_round_is_overdue(home: Home) -> None:
    assert not is_on_duty(home)
    guard_pass(home)
    assert not is_on_duty(home), "a single pass, as by `watch`, is no guard on duty"
    guard_pass(home, every_s=60)
    assert is_on_duty(home)
    ahead(home, 200)
    assert not is_on_duty(home)


def test_a_guard_run_once_is_on_duty_only_after_a_second_regular_round(home: Home) -> None:
    guard_pass(home, every_s=60, is_once=True)
    assert not is_on_duty(home)
    ahead(home, 60)
    guard_pass(home, every_s=60, is_once=True)
    assert is_on_duty(home)
    ahead(home, 600)
    guard_pass(home, every_s=60, is_once=True)
    assert not is_on_duty(home)


def test_the_guard_sleeps_no_longer_than_until_the_next_limit(home: Home) -> None:
    slept: list[float] = []
    home.world.sleep = slept.append  # type: ignore[method-assign]
    wait_for_next(home, Pass(next_at=home.world.now() + 7), 60)
    wait_for_next(home, Pass(next_at=home.world.now() + 700), 60)
    wait_for_next(home, Pass(next_at=home.world.now() - 5), 60)
    assert [round(seconds) for seconds in slept] == [7, 60, 0]


def test_retried_destroys_do_not_delay_a_limit(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each attempt at a silent provider takes minutes, in which a run elsewhere reached its limit.
    begin(home, tmp_path)
    now, tried = home.world.now(), list[str]()
    for number in range(3):
        mark = f"homing-{home.owner}-heather-{number + 1}"
        line = LedgerLine(mark, "", "heather", 1, "runpod", "o", "2.49", "1", now, f"p-{number}", now)
        home.ledger.adopt(line)
        home.ledger.ask_destroy(mark, now)

    def stubborn(at_home: Home, lines: list[LedgerLine], **given: float) -> Any:
        tried.append(lines[0].mark)
        ahead(home, 200)
        return {line.mark: Problem("It is still shown.") for line in lines}

    monkeypatch.setattr("homing.cloud.guard.limits_and_destroys.end_each", stubborn)
    ahead(home, 10_000 - 130)
    made = guard_pass(home)
    assert len(tried) == 1
    assert len(made.may_bill) == 3, "the other two are reported as well"
    wait_for_next(home, made, 60)
    guard_pass(home)
    assert tried[1] == home.ledger.lines(row(home).id)[-1].mark, "the limit first"


class Lid(World):
    """A laptop whose lid is closed during its first sleep: the wall clock advances, the monotonic clock does not."""

    def __init__(self, closed_s: float) -> None:
        self.wall, self.mono, self.closed_s = 1_000_000.0, 0.0, closed_s

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.mono

    def sleep(self, seconds: float) -> None:
        self.mono += seconds
        self.wall += seconds + self.closed_s
        self.closed_s = 0.0


@pytest.mark.parametrize("closed_s", [2500.0, 0.0, -86400.0])
def test_a_closed_lid_or_a_changed_clock_does_not_delay_a_guard_round(homing_home: Path, closed_s: float) -> None:
    # After the laptop woke, an hourly guard used to sleep the rest of its hour, past the limit.
    lid = Lid(closed_s)
    wait_for_next(Home(homing_home, lid), Pass(next_at=lid.wall + 3000), 3600)
    assert lid.mono <= 3600, "a clock that is set back does not delay the round beyond the interval"
    assert lid.wall <= 1_003_060


def test_agent_dead_man_guard_and_provider_act_in_this_order_before_a_spend_limit() -> None:
    line = LedgerLine("m", "r", "r", 1, "local", "o", "3.60", "1", 0.0, created_at=1000.0)
    before = LedgerLine("b", "r", "r", 1, "local", "o", "3.60", "1", 0.0, destroyed_at=900.0, spend_usd="0.50")
    moments = [
        meter.moment(share, [before, line], Decimal(1), 0.0, 1100.0) for share in (END, DEAD_MAN, GUARD, PROVIDER)
    ]
    assert moments == sorted(moments)
    assert moments[-1] < 1500  # half a dollar at 3.60 an hour is 500 s
    assert meter.moment(GUARD, [before], Decimal(1), 0.0, 1100.0) == float("inf")
    with_volume = meter.moment(GUARD, [before, line], Decimal(1), 0.0, 1100.0, Decimal("3.60"))
    assert with_volume < 1300
