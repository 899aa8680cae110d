"""An instance that cannot end its own billing: its time limit, the guards that count, and what destroys it."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import make_draft, make_run, marked_now

from homing.api.lookup.list_runs import run_row
from homing.cloud.contact.home_guard import sign_in
from homing.cloud.guard import relaunch
from homing.cloud.guard.change_limit_or_stop import ask_to_stop, change_limit, propose, wait_for_stop
from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch.armed_guards import armed, check_armed, count_alive, guards
from homing.cloud.launch.draft import without_time
from homing.cloud.launch.launch import Draft, LaunchOrder, draft, launch
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.meter import show_usd
from homing.cloud.providers.base import Needs, wait_until
from homing.cloud.providers.local.provider import Local
from homing.cloud.reconcile.run_status import guards_on_instance, look
from homing.cloud.watch.progress import progress_line
from homing.errors import UsageError
from homing.store import run_key
from homing.wire import file_names
from homing.wire.boot_json import EndBilling
from homing.wire.codec import dumps
from homing.wire.control_files import Heartbeat
from homing.wire.run_json import Limits


@pytest.fixture
def helpless(monkeypatch: pytest.MonkeyPatch) -> None:
    """`local` as a cloud whose instances have no API key to end themselves, with a guard of its own."""
    cannot = {**Local.cannot, "end_itself": "It cannot end itself."}
    cannot.pop("native_spend_limit", None)
    monkeypatch.setattr(Local, "cannot", cannot)
    monkeypatch.setattr(Local, "guard", "It ends by itself at the limit.")
    real = Local.place

    def place(self: Local, mark: str) -> object:
        return dataclasses.replace(real(self, mark), end_billing=EndBilling(kind="command", argv=["echo", "no key"]))

    monkeypatch.setattr(Local, "place", place)


def planned(home: Home, tmp_path: Path, limits: Limits | None = None, limit: str = "1.00") -> Draft:
    offer = home.provider("local").offers(Needs())[0]
    run = make_run(tmp_path, limits=limits)
    return draft(LaunchOrder(run, "", is_prepared=True, offer=offer, spend_limit_usd=Decimal(limit)), home)


def test_it_gets_a_time_limit_from_the_plan_which_bounds_the_worst_case(
    home: Home, tmp_path: Path, helpless: None
) -> None:
    made = planned(home, tmp_path)
    assert made.run.limits.time_s == made.timing.enough_s(made.run) > made.timing.whole_s(made.run)
    assert made.worst_case_usd < Decimal("1.00")
    assert "cannot end its own billing" in made.run.origin["limits.time_s"]
    said = " ".join(guards(made, home))
    assert "not armed: It cannot end itself." in said
    assert "If the run finishes while this computer is off, its instance keeps billing until" in said


def test_runs_and_status_show_what_can_really_be_spent_and_which_guards_can_end_billing(
    home: Home, tmp_path: Path, helpless: None
) -> None:
    made = planned(home, tmp_path)
    line = LedgerLine(made.mark, made.run.id, "moss", 1, "local", "o", "0.36", "1.00", 0.0, created_at=0.0)
    row = RunRow(made.run.id, "moss", "running", 0.0, "file:/nowhere", "f" * 64, "1.00")
    home.world.mkdir(home.run_dir(row.id))
    home.world.write(home.run_dir(row.id) / "run.json", dumps(made.run).encode())
    status = look(home, row, [line])
    assert status.most_usd == made.worst_case_usd < Decimal("1.00")
    assert run_row(status, 0.0)[4] == f"{show_usd(made.worst_case_usd)} by time"
    assert status.to_dict()["most_usd"] == str(made.worst_case_usd)
    assert "of $1.00" not in progress_line(status, None, None, None)
    between = look(home, row, [dataclasses.replace(line, destroyed_at=60.0, spend_usd="0.30")])
    assert between.most_usd == Decimal("1.00"), "the next instance has a time limit of its own"
    beat = Heartbeat(20.0, made.mark, 1, "training", 0.0, "0.36", "1", has_dead_man=True)
    said = guards_on_instance(home, line, beat)
    assert said == (
        "agent and dead-man save and push within the limit, but cannot end billing."
        " local's own limit and a local guard can."
    )


def test_a_nearer_or_user_defined_limit_is_kept(home: Home, tmp_path: Path, helpless: None) -> None:
    assert planned(home, tmp_path, Limits(time_s=5000.0)).run.limits.time_s == 5000.0
    enough_s = planned(home, tmp_path).run.limits.time_s
    little = str(round(Decimal(str(enough_s)) * Decimal("0.36") / 3600 * Decimal("0.9"), 4))
    assert planned(home, tmp_path, limit=little).run.limits.time_s == 0.0, "the spend limit is reached first"


def test_an_instance_that_can_end_itself_gets_no_time_limit(home: Home, tmp_path: Path) -> None:
    assert planned(home, tmp_path).run.limits.time_s == 0.0


def test_a_derived_time_limit_is_not_reused_for_the_next_attempt(home: Home, tmp_path: Path, helpless: None) -> None:
    made = planned(home, tmp_path)
    assert without_time(made.run).limits.time_s == 0.0
    assert "limits.time_s" not in without_time(made.run).origin
    named = dataclasses.replace(made.run, origin={})
    assert without_time(named) == named


def test_a_launch_with_only_the_providers_guard_is_refused_before_renting(
    home: Home, tmp_path: Path, helpless: None
) -> None:
    made = planned(home, tmp_path)
    assert armed(made, home) == ["provider"]
    with pytest.raises(UsageError, match="Only one guard would watch") as caught:
        launch(made, home)
    assert "--one-guard" in caught.value.fix
    assert home.ledger.lines() == []
    check_armed(dataclasses.replace(made, order=dataclasses.replace(made.order, is_one_guard_enough=True)), home)
    sign_in(home, 60, reached=["local"])
    assert armed(made, home) == ["provider", "home"]
    check_armed(made, home)


@pytest.mark.slow
def test_the_guard_destroys_the_finished_instance_and_a_set_time_limit_is_kept(
    home: Home, tmp_path: Path, helpless: None
) -> None:
    sign_in(home, 60, reached=["local"])
    done = launch(make_draft(home, tmp_path, steps=40, step_s=0.05), home)
    assert count_alive(planned_of(home, tmp_path), home, done.heartbeat) == 2
    row = home.ledger.find("moss")
    change_limit(home, propose(home, row, None, 7000.0), confirm_s=30.0)
    assert without_time(relaunch.load_documents(home, row).run).limits.time_s == 7000.0, (
        "a limit set by a person is kept"
    )
    store, beat = home.store_of(row), run_key(row.id, file_names.HEARTBEAT)
    assert wait_until(lambda: b'"ended"' in store.read(beat), timeout_s=120, every_s=0.2, world=home.world)
    assert marked_now(home), "its instance still exists"
    made = guard_pass(home)
    assert any("still billing" in said for said in made.done), made
    assert marked_now(home) == []
    assert home.ledger.find("moss").state == "done"


@pytest.mark.slow
def test_stop_destroys_it_after_its_last_heartbeat(home: Home, tmp_path: Path, helpless: None) -> None:
    sign_in(home, 60, reached=["local"])
    done = launch(make_draft(home, tmp_path, steps=1_000_000), home)
    ask_to_stop(home, done.run)
    said: list[str] = []
    status = wait_for_stop(home, done.run, timeout_s=120.0, notify=said.append)
    assert any("cannot end its own billing; destroying it" in text for text in said)
    assert (status.run.state, status.is_billing) == ("stopped", False)
    assert marked_now(home) == []


def planned_of(home: Home, tmp_path: Path) -> Draft:
    """The same offer under another name: moss is live."""
    offer = home.provider("local").offers(Needs())[0]
    run = make_run(tmp_path, "fern")
    return draft(LaunchOrder(run, "", is_prepared=True, offer=offer, spend_limit_usd=Decimal("1.00")), home)
