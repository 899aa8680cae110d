"""After a change of API key, instances of the other account are unknown and may bill: refresh, destroy and resume."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.guard.test_guard_pass import is_agent
from tests.cloud.rig import Said, clear, homing, look_more_often, make_draft, marked_now, trainer_argv

from homing.cloud.destroy import destroy_lines, destroy_run
from homing.cloud.guard.change_limit_or_stop import change_limit
from homing.cloud.guard.change_limit_or_stop import propose as propose_limit
from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.ledger import LedgerLine
from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import Instance, Request, wait_until
from homing.cloud.providers.local.provider import Local
from homing.cloud.reconcile.adopt import propose
from homing.cloud.reconcile.inventory import survey
from homing.cloud.reconcile.receipt import most_usd
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.renting_account import is_elsewhere
from homing.errors import OtherAccount, ProviderSilent, StillBilling, UsageError
from homing.store import open_store
from homing.wire.guard_timing import GUARD, allowed_s, reserve_s
from homing.world import World

ENDLESS = 100_000


class Wallets:
    """`local` with accounts: a key lists, describes and destroys only the instances of its own account."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.key, self.is_silent, self.asked = "mine", False, 0
        self.rented: dict[str, str] = {}  # mark, which is the id -> account
        real_create, real_list, real_describe = Local.create, Local.list_owned, Local.describe
        real_destroy = Local.destroy

        def create(local: Local, request: Request) -> Instance:
            self.rented[request.mark] = self.key
            return real_create(local, request)

        def list_owned(local: Local) -> list[Instance]:
            return [each for each in real_list(local) if self.is_shown(each.mark)]

        def describe(local: Local, instance_id: str) -> Instance:
            if self.is_shown(instance_id):
                return real_describe(local, instance_id)
            return Instance(instance_id, "", "local", "gone", "no", Decimal(0), detail="not known")

        def destroy(local: Local, instance_id: str) -> None:
            if self.is_shown(instance_id):
                real_destroy(local, instance_id)

        for method in (create, list_owned, describe, destroy):
            monkeypatch.setattr(Local, method.__name__, method)
        monkeypatch.setattr(Local, "account", lambda local: self.account())

    def is_shown(self, mark: str) -> bool:
        return self.rented.get(mark, self.key) == self.key

    def account(self) -> str:
        self.asked += 1
        if self.is_silent:
            raise ProviderSilent("local cannot identify the account of this key now.")
        return self.key


@pytest.fixture
def wallets(monkeypatch: pytest.MonkeyPatch) -> Wallets:
    monkeypatch.setattr("homing.cloud.ledger.meter.FREE_PROVIDERS", frozenset())  # local stands in for a paid provider
    return Wallets(monkeypatch)


@pytest.fixture
def home(homing_home: Path, wallets: Wallets) -> Iterator[Home]:
    yield Home(homing_home, World())
    wallets.rented.clear()  # every key sees every instance again
    clear(homing_home)


def end_the_machine(home: Home) -> None:
    """Kills every process of the instance, repeatedly, because agent and dead-man restart each other."""

    def is_gone() -> bool:
        for pid, _ in marked_now(home):
            World().signal(pid, signal.SIGKILL)
        return not marked_now(home)

    assert wait_until(is_gone, timeout_s=60, every_s=0.05, world=World())


# --- recording the account ---


def test_the_account_is_in_the_ledger_before_the_create_call_and_in_the_record(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    real = Local.create

    def create(local: Local, request: Request) -> Instance:
        seen.append(home.ledger.lines()[-1].account)
        return real(local, request)

    monkeypatch.setattr(Local, "create", create)
    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    assert seen == ["mine"]
    store = open_store(f"file:{tmp_path}/store", World())
    (adopted,) = propose(store, "moss", Home(tmp_path / "other", World())).lines
    assert adopted.account == "mine"


def test_a_launch_fails_before_renting_if_the_account_cannot_be_identified(
    home: Home, tmp_path: Path, wallets: Wallets
) -> None:
    ready = make_draft(home, tmp_path)
    wallets.is_silent = True
    with pytest.raises(ProviderSilent):
        launch(ready, home)
    assert home.ledger.lines() == []
    assert marked_now(home) == []


# --- refresh and destroy ---


def test_an_instance_of_another_account_stays_open_until_its_key_is_used_again(
    home: Home, tmp_path: Path, wallets: Wallets
) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    wallets.key = "team"
    for _ in range(3):
        (problem,) = refresh(home)
        assert "a key from mine" in problem
        assert "a key from team" in problem
        assert f"homing destroy {done.run.id} --same-account" in problem
    (line,) = home.ledger.lines()
    assert (line.destroyed_at, line.state, line.billing) == (None, "unknown", "maybe")
    assert home.ledger.find("moss").is_live
    assert survey(home).is_blind
    with pytest.raises(StillBilling) as caught:
        destroy_run(home, done.run)
    assert "--same-account" in caught.value.fix
    assert caught.value.exit_code == 6
    assert marked_now(home), "this key could not destroy it"
    wallets.key = "mine"
    assert refresh(home) == []
    assert home.ledger.lines()[0].billing == "yes"
    destroy_run(home, done.run)
    assert home.ledger.lines()[0].state == "gone"
    assert marked_now(home) == []


@pytest.mark.slow
def test_destroy_ends_the_others_although_one_instance_is_in_another_account(
    home: Home, tmp_path: Path, wallets: Wallets
) -> None:
    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    wallets.key = "team"
    launch(make_draft(home, tmp_path, name="fern", steps=ENDLESS), home)
    with pytest.raises(StillBilling, match="1 instance may"):
        destroy_lines(home, home.ledger.lines())
    assert [(line.run_name, line.state) for line in home.ledger.lines()] == [("moss", "unknown"), ("fern", "gone")]


def test_a_line_without_an_account_gets_the_account_of_the_current_key(
    home: Home, tmp_path: Path, wallets: Wallets
) -> None:
    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    mark = home.ledger.lines()[0].mark
    home.ledger.update(mark, account=None)
    assert refresh(home) == []
    assert home.ledger.account(mark) == "mine", "an instance that a key lists is in its account"
    home.ledger.update(mark, account=None)
    end_the_machine(home)
    wallets.key = "team"
    refresh(home)
    assert home.ledger.lines()[0].destroyed_at is not None


def test_a_line_takes_the_account_of_the_key_that_shows_its_instance(
    home: Home, tmp_path: Path, wallets: Wallets
) -> None:
    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    wallets.key, wallets.rented = "renamed", {}
    (line,) = home.ledger.lines()
    assert not is_elsewhere(home, line)
    assert home.ledger.account(line.mark) == "renamed"


def test_an_unidentified_account_does_not_count_as_another_account(
    home: Home, tmp_path: Path, wallets: Wallets
) -> None:
    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    wallets.key, wallets.is_silent = "team", True
    (line,) = home.ledger.lines()
    assert not is_elsewhere(home, line)
    (problem,) = refresh(home)
    assert "cannot identify the account of this key now" in problem
    assert home.ledger.lines()[0].destroyed_at is None
    with pytest.raises(StillBilling) as caught:
        destroy_lines(home, [line], deadline_s=0.1)
    assert "cannot identify the account of this key now" in caught.value.why
    assert "--same-account" not in caught.value.fix


def test_a_refresh_of_listed_instances_does_not_query_the_account(home: Home, tmp_path: Path, wallets: Wallets) -> None:
    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    wallets.asked = 0
    for _ in range(3):
        assert refresh(home) == []
    assert wallets.asked == 0


def test_a_limit_change_fails_if_the_instance_is_in_another_account(
    home: Home, tmp_path: Path, wallets: Wallets
) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    change = propose_limit(home, home.ledger.find("moss"), Decimal("2.00"), None)
    wallets.key = "team"
    with pytest.raises(OtherAccount):
        change_limit(home, change, confirm_s=0.1)
    assert home.ledger.find(done.run.id).spend_limit_usd == "1.00"


# --- --same-account ---


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    look_more_often(monkeypatch)

    def typed(*argv: str) -> Said:
        return homing(capsys, monkeypatch, *argv)

    return typed


def test_destroy_suggests_same_account_and_accepts_it(home: Home, tmp_path: Path, wallets: Wallets, say: Any) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    end_the_machine(home)
    wallets.key = "rotated"
    refused = say("destroy", done.run.id, "--yes")
    assert refused.code == 6
    assert f"homing destroy {done.run.id} --same-account" in refused.err
    taken = say("destroy", done.run.id, "--yes", "--same-account")
    assert taken.code == 0, taken.err
    assert "was rented by mine" in taken.err
    (line,) = home.ledger.lines()
    assert (line.state, line.account) == ("gone", "rotated")
    assert not home.ledger.find("moss").is_live


def test_same_account_reports_that_it_could_not_be_recorded(
    home: Home, tmp_path: Path, wallets: Wallets, say: Any
) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    (line,) = home.ledger.lines()
    wallets.is_silent = True
    taken = say("destroy", done.run.id, "--yes", "--same-account")
    assert (
        f"Could not record that {line.mark} is in the current key's account:"
        " local cannot identify the account of this key now." in taken.err
    )


def test_same_account_is_refused_for_all_runs_at_once(home: Home, say: Any) -> None:
    refused = say("destroy", "--all", "--yes", "--same-account")
    assert refused.code == 2
    assert "--same-account needs one run" in refused.err


# --- relaunch and resume ---


@pytest.mark.slow
def test_a_guard_relaunches_only_in_the_account_of_the_run(
    home: Home, tmp_path: Path, wallets: Wallets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=ENDLESS),
    )
    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    os.kill(next(pid for pid, _ in marked_now(home) if is_agent(pid)), signal.SIGTERM)  # as at a preemption
    assert wait_until(lambda: not home.provider("local").list_owned(), timeout_s=60, every_s=0.1, world=World())
    assert refresh(home) == []
    wallets.key = "team"
    made = guard_pass(home)
    assert made.done == []
    assert "does not belong to the account that moss" in made.alerts[0]
    assert [line.attempt for line in home.ledger.lines()] == [1]
    wallets.key = "mine"
    assert "Attempt 2 launches" in guard_pass(home).done[0]


@pytest.fixture
def provider_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`local` as a provider that destroys an instance at its limit by itself."""
    cannot = {name: text for name, text in Local.cannot.items() if not name.startswith("native")}
    monkeypatch.setattr(Local, "guard", "local itself ends it at the limit.")
    monkeypatch.setattr(Local, "cannot", cannot)


def leave_in_another_account(home: Home, tmp_path: Path, wallets: Wallets) -> LedgerLine:
    """Launches a first attempt in the account `mine` with a limit of $1, marks it lost, and sets the key of `team`."""
    done = launch(make_draft(home, tmp_path, steps=ENDLESS, limit="1.00"), home)
    for pid, _ in marked_now(home):  # else it would notice the next attempt and end itself
        os.kill(pid, signal.SIGSTOP)
    home.ledger.set_run(done.run.id, state="failed", reason="lost: its line was cut", ended_at=home.world.now())
    wallets.key = "team"
    return home.ledger.lines()[0]


def hours_later(monkeypatch: pytest.MonkeyPatch, num_s: float) -> None:
    for name in ("now", "boottime"):
        real = getattr(World, name, None)
        monkeypatch.setattr(World, name, lambda world, real=real: real(world) + num_s, raising=False)


def test_a_resume_is_refused_while_an_unlimited_instance_is_in_another_account(
    home: Home, tmp_path: Path, wallets: Wallets
) -> None:
    first = leave_in_another_account(home, tmp_path, wallets)
    with pytest.raises(OtherAccount, match="without a limit") as caught:
        make_draft(home, tmp_path, resume=True, limit="3.00")
    assert "Use the key of that account again" in caught.value.fix
    assert f"homing destroy {first.run_id} --same-account" in caught.value.fix
    wallets.key = "mine"
    with pytest.raises(UsageError, match="still has an instance that may be billing"):
        make_draft(home, tmp_path, resume=True, limit="3.00")


@pytest.mark.usefixtures("provider_ends")
def test_an_instance_in_another_account_counts_at_its_maximum_cost(
    home: Home, tmp_path: Path, wallets: Wallets, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_in_another_account(home, tmp_path, wallets)
    with pytest.raises(UsageError, match=r"limit of \$1\.00 is too low") as caught:
        make_draft(home, tmp_path, resume=True, limit="1.00")
    assert "at most $1.00 is already spent" in caught.value.why
    assert make_draft(home, tmp_path, resume=True, limit="3.00").spent_before_usd == Decimal("1.00")
    hours_later(monkeypatch, 5 * 86400.0)
    assert make_draft(home, tmp_path, resume=True, limit="3.00").spent_before_usd == Decimal("1.00")


@pytest.mark.slow
@pytest.mark.usefixtures("provider_ends")
def test_the_guard_counts_another_account_at_its_maximum_and_ends_the_reachable_instance(
    home: Home, tmp_path: Path, wallets: Wallets, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = leave_in_another_account(home, tmp_path, wallets)
    again = launch(make_draft(home, tmp_path, resume=True, steps=ENDLESS, limit="3.00"), home)
    second = home.ledger.lines()[1]
    assert second.created_at is not None
    made = guard_pass(home)
    allowed = allowed_s(Decimal(second.rate_usd_per_hour), Decimal("3.00"), Decimal("1.00"), 0)
    left_s = reserve_s(GUARD, allowed)
    assert made.due[again.run.id] == pytest.approx(second.created_at + allowed - left_s, abs=5), (
        "within the guard's reserve before the limit"
    )
    (messages,) = made.alerts
    assert "It counts as $1.00, the most it can cost" in messages
    assert guard_pass(home).alerts == [], "alerted once"
    wallets.is_silent = True
    monkeypatch.setattr("homing.cloud.guard.limits_and_destroys.DESTROY_S", 0.1)
    assert guard_pass(home).due[again.run.id] == pytest.approx(made.due[again.run.id], abs=5), (
        "the same without an answer"
    )
    wallets.is_silent = False
    hours_later(monkeypatch, made.due[again.run.id] - home.world.now() + 5)
    made = guard_pass(home)
    assert f"{again.run.id}: The local guard ended the run at its limit" in made.done[0]
    assert made.may_bill == [f"{again.run.id}: {first.mark} is in another account, mine, and may be billing."]
    run = home.ledger.run(again.run.id)
    assert run is not None
    assert (run.state, run.exit_code) == ("stopped", 5)
    assert [(line.destroyed_at is None, line.state) for line in home.ledger.lines()] == [
        (True, "unknown"),
        (False, "gone"),
    ]
    made = guard_pass(home)
    assert (made.done, len(made.may_bill)) == ([], 1), "reported again, destroyed once"


@pytest.mark.slow
@pytest.mark.usefixtures("provider_ends")
def test_a_guard_with_the_first_key_destroys_the_first_instance_only(
    home: Home, tmp_path: Path, wallets: Wallets
) -> None:
    first = leave_in_another_account(home, tmp_path, wallets)
    again = launch(make_draft(home, tmp_path, resume=True, steps=ENDLESS, limit="3.00"), home)
    wallets.key = "mine"
    made = guard_pass(home)
    assert made.done == [f"{again.run.id}: {first.mark} appeared again and was destroyed."]
    assert home.ledger.find("moss").is_live
    assert home.ledger.lines()[1].destroyed_at is None
    wallets.key = "team"
    assert guard_pass(home).may_bill == []
    assert home.ledger.lines()[1].state == "ready"


def test_a_run_in_another_account_is_marked_stopped_at_its_limit_and_may_bill(
    home: Home, tmp_path: Path, wallets: Wallets, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS, limit="1.00"), home)
    wallets.key = "team"
    hours_later(monkeypatch, 5 * 86400.0)
    made = guard_pass(home)
    assert "only a key of that account can end it" in made.done[0]
    assert len(made.may_bill) == 1
    assert home.ledger.find("moss").state == "stopped"
    made = guard_pass(home)
    assert (made.done, len(made.may_bill)) == ([], 1)
    wallets.key = "mine"
    assert "ended the run at its limit" in guard_pass(home).done[0]
    assert home.ledger.lines(done.run.id)[0].state == "gone"


@pytest.mark.slow
@pytest.mark.usefixtures("provider_ends")
@pytest.mark.parametrize("new", ["4.00", "2.00"])
def test_a_limit_change_names_the_instance_in_another_account_that_it_cannot_reach(
    home: Home, tmp_path: Path, wallets: Wallets, monkeypatch: pytest.MonkeyPatch, new: str
) -> None:
    first = leave_in_another_account(home, tmp_path, wallets)
    launch(make_draft(home, tmp_path, resume=True, steps=ENDLESS, limit="3.00"), home)
    second, seen = home.ledger.lines()[1], list[tuple[str, Decimal]]()
    monkeypatch.setattr(Local, "set_guard", lambda local, name, usd, by: seen.append((name, usd)))
    change = propose_limit(home, home.ledger.find("moss"), Decimal(new), None)
    with pytest.raises(OtherAccount) as caught:
        change_limit(home, change, confirm_s=20)
    assert f"is now ${new}" in caught.value.what
    assert first.mark in caught.value.what
    assert seen == [(second.instance_id, Decimal(new) - Decimal("1.00"))]
    assert home.ledger.find("moss").spend_limit_usd == new
    lines = home.ledger.lines()
    assert [line.limit_usd for line in lines] == ["1.00", max(new, "3.00")]
    assert [most_usd(home, line) for line in lines] == [Decimal("1.00"), Decimal(max(new, "3.00"))]
    with pytest.raises(UsageError, match=r"has already spent: at most \$1\.0"):
        propose_limit(home, home.ledger.find("moss"), Decimal("0.90"), None)


@pytest.mark.slow
@pytest.mark.usefixtures("provider_ends")
def test_a_guard_relaunches_while_an_instance_in_another_account_counts_at_its_maximum(
    home: Home, tmp_path: Path, wallets: Wallets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=ENDLESS),
    )
    first = leave_in_another_account(home, tmp_path, wallets)
    end_the_machine(home)
    launch(make_draft(home, tmp_path, resume=True, steps=ENDLESS, limit="3.00"), home)
    os.kill(next(pid for pid, _ in marked_now(home) if is_agent(pid)), signal.SIGTERM)
    assert wait_until(lambda: not marked_now(home), timeout_s=60, every_s=0.1, world=World())
    made = guard_pass(home)
    assert any("Attempt 3 launches" in text for text in made.done), made
    assert home.ledger.lines()[0].destroyed_at is None
    assert any(first.mark in text for text in made.problems + made.may_bill)


@pytest.mark.slow
@pytest.mark.usefixtures("provider_ends")
def test_a_resume_in_another_account_warns_of_the_instance_left_open(
    home: Home, tmp_path: Path, wallets: Wallets
) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    home.ledger.set_run(done.run.id, state="failed", reason="lost: its line was cut", ended_at=home.world.now())
    wallets.key = "team"
    said: list[str] = []
    again = launch(make_draft(home, tmp_path, resume=True, steps=ENDLESS, limit="3.00"), home, notify=said.append)
    first, second = home.ledger.lines()
    assert (first.account, first.destroyed_at, second.account) == ("mine", None, "team")
    assert again.run.id == done.run.id
    (messages,) = [text for text in said if "Could not confirm that" in text]
    assert "another account, mine" in messages
    assert f"homing destroy {first.mark}" in messages
    made = guard_pass(home)
    assert any(first.mark in text for text in made.may_bill)
    assert home.ledger.lines()[1].state == "ready", "the guard has checked the current attempt"
    wallets.key = "mine"
    destroy_lines(home, [first])
    assert home.ledger.lines()[0].state == "gone"
    wallets.key = "team"


def test_the_suggested_destroy_command_uses_the_mark_if_the_run_is_unknown(
    home: Home, wallets: Wallets, tmp_path: Path
) -> None:
    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    (line,) = home.ledger.lines()
    lost = dataclasses.replace(
        line, mark=make_mark(home.owner, "fern-20260101-000000-abcd", 1), run_id="", run_name="?"
    )
    wallets.rented[lost.mark] = "mine"
    home.ledger.adopt(dataclasses.replace(lost, instance_id=lost.mark))
    wallets.key = "team"
    assert any(f"homing destroy {lost.mark} --same-account" in problem for problem in refresh(home))
