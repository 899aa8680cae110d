"""What the ledger says against what the provider and the store say."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cloud.rig import forget, make_draft, marked_now

from homing.cloud.destroy import destroy_lines, destroy_run, open_lines, would_be_lost
from homing.cloud.home import Home
from homing.cloud.launch import launch as launching
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.ledger import Ledger
from homing.cloud.ledger.meter import MARGIN_S, billing_lines, cost
from homing.cloud.providers.base import Instance, Request, wait_until
from homing.cloud.reconcile.reconcile import CREATE_GRACE_S, refresh
from homing.cloud.reconcile.run_status import look
from homing.cloud.try_offers import launch_any
from homing.errors import (
    EndedElsewhere,
    HomingError,
    IntegrityError,
    ProviderRefused,
    StartTimeout,
    StillBilling,
)
from homing.wire import codec
from homing.world import World


def wait_until_gone(home: Home) -> None:
    assert wait_until(lambda: not home.provider("local").list_owned(), timeout_s=60, every_s=0.1, world=home.world)


@pytest.mark.slow
def test_an_instance_that_ended_itself_gets_its_receipt_on_the_next_refresh(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=3), home)
    wait_until_gone(home)
    assert home.ledger.lines()[0].destroyed_at is None
    assert refresh(home) == []
    (line,) = home.ledger.lines()
    seen = home.provider("local").describe(done.instance.id)
    assert line.destroyed_at == seen.ended_at
    assert Decimal(line.spend_usd) >= (seen.spend_usd or 0)
    assert home.ledger.find("moss").state == "done"


@pytest.mark.acceptance(120)
@pytest.mark.slow
def test_a_failed_run_is_recorded_as_failed_after_its_instance_is_gone(home: Home, tmp_path: Path) -> None:
    launch(make_draft(home, tmp_path, how="fail"), home)
    wait_until_gone(home)
    refresh(home)
    row = home.ledger.find("moss")
    assert (row.state, row.exit_code) == ("failed", 1)
    assert "not finite" in row.reason


@pytest.mark.slow
def test_instances_of_an_unreachable_provider_may_be_billing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(make_draft(home, tmp_path, steps=100_000), home)

    def away() -> list[Instance]:
        raise ProviderRefused("the provider is away")

    monkeypatch.setattr(home.provider("local"), "list_owned", away)
    (problem,) = refresh(home)
    assert "away" in problem
    (line,) = billing_lines(home.ledger.lines())
    assert (line.state, line.billing) == ("unknown", "maybe")
    assert home.ledger.find("moss").state == "running"
    monkeypatch.undo()
    assert refresh(home) == []
    assert home.ledger.lines()[0].billing == "yes"


@pytest.mark.slow
def test_an_unreadable_store_is_reported_and_leaves_the_run_unchanged(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    assert any("Could not read the store" in problem for problem in refresh(home))
    assert home.ledger.find("moss").state == "running"
    assert look(home, done.run).problem
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    assert refresh(home) == []


@pytest.mark.acceptance("X20")
@pytest.mark.slow
def test_an_instance_missing_from_the_ledger_is_found_and_destroyed(home: Home, tmp_path: Path) -> None:
    launch(make_draft(home, tmp_path, steps=100_000), home)
    forget(home.path)
    fresh = Home(home.path, World())
    refresh(fresh)
    (line,) = billing_lines(fresh.ledger.lines())
    assert (line.run_id, line.run_name) == ("", "?")
    destroy_lines(fresh, open_lines(fresh, None))
    assert marked_now(home) == []
    assert Decimal(fresh.ledger.lines()[0].spend_usd) > 0


@pytest.mark.slow
def test_a_line_closed_too_early_is_reopened(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    home.ledger.close(done.instance.mark, at=1.0, spend_usd=Decimal(0), note="wrong")
    refresh(home)
    (line,) = billing_lines(home.ledger.lines())
    assert line.billing == "yes"


def test_an_unanswered_create_may_be_billing_until_the_grace_period_ends(home: Home, tmp_path: Path) -> None:
    ready = make_draft(home, tmp_path)
    from homing.cloud.launch.run_documents import line_of, row_of

    home.ledger.intend(row_of(ready, home), line_of(ready, home, None))
    home.ledger.begin_create(ready.mark, home.world.now())
    (tmp_path / "store").mkdir()
    refresh(home)
    assert [line.billing for line in billing_lines(home.ledger.lines())] == ["maybe"]

    class Later(World):
        def now(self) -> float:
            return super().now() + CREATE_GRACE_S + 1

        def boottime(self) -> float:
            return super().boottime() + CREATE_GRACE_S + 1

    refresh(Home(home.path, Later()))
    (line,) = home.ledger.lines()
    assert (line.billing, line.note, line.spend_usd) == ("no", "never seen at the provider", "0")
    assert home.ledger.find("moss").state == "failed"


class DaysLater(World):
    def now(self) -> float:
        return super().now() + 3 * 86400

    def boottime(self) -> float:
        return super().boottime() + 3 * 86400


def later_without_an_end(home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    """This home three days later, at a provider that reports an end without its time, like RunPod and Modal."""
    later = Home(home.path, DaysLater())
    provider = later.provider("local")
    describe = provider.describe
    monkeypatch.setattr(
        provider,
        "describe",
        lambda instance_id: dataclasses.replace(describe(instance_id), ended_at=None, spend_usd=None),
    )
    return later


@pytest.mark.slow
def test_an_instance_that_ended_itself_costs_what_its_agent_counted(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(make_draft(home, tmp_path, steps=3), home)
    wait_until_gone(home)
    assert refresh(later_without_an_end(home, monkeypatch)) == []
    (line,) = home.ledger.lines()
    assert line.destroyed_at is not None
    assert line.created_at is not None
    assert MARGIN_S < line.destroyed_at - line.created_at < MARGIN_S + 60
    assert Decimal(line.spend_usd) == cost(Decimal(line.rate_usd_per_hour), line.destroyed_at - line.created_at)


def test_an_instance_lost_without_a_last_heartbeat_costs_until_it_was_seen_gone(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(make_draft(home, tmp_path, steps=100_000), home)
    home.provider("local").destroy(home.ledger.lines()[0].instance_id or "")
    beat = tmp_path / "store" / "runs" / home.ledger.find("moss").id / "heartbeat.json"
    beat.write_bytes(beat.read_bytes().replace(b'"state": "ended"', b'"state": "training"'))
    later = later_without_an_end(home, monkeypatch)
    refresh(later)
    (line,) = home.ledger.lines()
    assert Decimal(line.spend_usd) >= cost(Decimal(line.rate_usd_per_hour), 3 * 86400)


@pytest.mark.slow
@pytest.mark.parametrize("amount", ["soon", "NaN"])
def test_an_invalid_amount_in_a_heartbeat_does_not_stop_a_refresh(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amount: str
) -> None:
    done = launch(make_draft(home, tmp_path, steps=3), home)
    wait_until_gone(home)
    beat = dataclasses.replace(done.heartbeat, state="ended", spend_usd=amount)
    (tmp_path / "store" / "runs" / done.run.id / "heartbeat.json").write_text(codec.dumps(beat))
    assert refresh(later_without_an_end(home, monkeypatch)) == []
    (line,) = home.ledger.lines()
    assert line.destroyed_at is not None
    assert Decimal(line.spend_usd) > 0


def test_an_ended_heartbeat_is_ignored_if_the_instance_was_listed_afterwards(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destroying failed after the agent's last heartbeat, and that report did not reach the store."""
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    later = later_without_an_end(home, monkeypatch)
    provider, shown = later.provider("local"), later.provider("local").list_owned()
    lists = iter([shown, shown])  # the first attempt still finds it
    monkeypatch.setattr(provider, "list_owned", lambda: next(lists, []))
    said = dataclasses.replace(done.heartbeat, state="ended")
    monkeypatch.setattr("homing.cloud.reconcile.receipt.last_beat", lambda home, line: said)
    destroy_lines(later, later.ledger.lines())
    (line,) = home.ledger.lines()
    assert Decimal(line.spend_usd) >= cost(Decimal(line.rate_usd_per_hour), 3 * 86400)


@pytest.mark.slow
def test_a_home_clock_set_back_does_not_lower_the_cost_below_the_agents_count(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(make_draft(home, tmp_path, steps=3), home)
    wait_until_gone(home)
    counted = Decimal(look(home, home.ledger.find("moss")).reports.heartbeat.spend_usd)  # type: ignore[union-attr]
    assert counted > 0
    monkeypatch.setattr(DaysLater, "now", lambda self: World.now(self) - 86400)
    assert refresh(later_without_an_end(home, monkeypatch)) == []
    assert Decimal(home.ledger.lines()[0].spend_usd) > counted


class NotRemembering:
    """Stands in for `Remembering`; no provider is an instance of it."""


@pytest.mark.slow
def test_an_instance_without_a_recorded_id_costs_what_the_provider_remembers(home: Home, tmp_path: Path) -> None:
    launch(make_draft(home, tmp_path, steps=3), home)
    wait_until_gone(home)
    (line,) = home.ledger.lines()
    home.ledger.update(line.mark, instance_id=None)
    assert refresh(Home(home.path, DaysLater())) == []
    kept = home.provider("local").describe(line.mark)
    (line,) = home.ledger.lines()
    assert (line.destroyed_at, line.is_at_most) == (kept.ended_at, False)
    assert Decimal(line.spend_usd) >= (kept.spend_usd or 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("is_destroyed", [False, True])
def test_an_instance_without_a_recorded_id_costs_what_its_agent_counted(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_destroyed: bool
) -> None:
    """A launch was killed between the create call and the ledger update; the run finished without being observed."""
    monkeypatch.setattr("homing.cloud.reconcile.receipt.Remembering", NotRemembering)
    launch(make_draft(home, tmp_path, steps=3), home)
    wait_until_gone(home)
    home.ledger.update(home.ledger.lines()[0].mark, instance_id=None)
    later = Home(home.path, DaysLater())
    if is_destroyed:
        destroy_run(later, later.ledger.find("moss"))
    else:
        assert refresh(later) == []
    (line,) = home.ledger.lines()
    lived_s = float(Decimal(line.spend_usd) / Decimal(line.rate_usd_per_hour) * 3600)
    assert MARGIN_S < lived_s < MARGIN_S + 60
    assert home.ledger.find("moss").state == "done"


@pytest.mark.acceptance(127)
@pytest.mark.slow
def test_an_instance_whose_agent_was_killed_is_shown_as_billing(home: Home, tmp_path: Path) -> None:
    launch(make_draft(home, tmp_path, steps=100_000), home)
    while marked_now(home):
        for pid, _ in marked_now(home):
            os.kill(pid, signal.SIGKILL)
    refresh(home)
    (line,) = billing_lines(home.ledger.lines())
    assert line.billing == "yes"
    assert "have exited" in line.note
    destroy_run(home, home.ledger.find("moss"))
    assert billing_lines(home.ledger.lines()) == []


@pytest.mark.slow
def test_destroy_asks_only_when_something_would_be_lost(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    assert "not pushed" in would_be_lost(home, done.run)
    destroy_run(home, done.run)
    assert would_be_lost(home, done.run) == ""


@pytest.mark.slow
def test_a_second_destroy_succeeds_and_the_reason_is_destroyed_manually(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    # Suspended, so that the agent cannot push an outcome of its own between SIGTERM and SIGKILL.
    for pid, _ in marked_now(home):
        os.kill(pid, signal.SIGSTOP)
    first = destroy_run(home, done.run)
    assert [line.billing for line in first.lines] == ["no"]
    assert first.spend_usd > 0
    assert destroy_run(home, done.run).lines == []
    row = home.ledger.find("moss")
    assert (row.state, row.reason) == ("stopped", "destroyed manually")


@pytest.mark.acceptance(137)
@pytest.mark.slow
def test_destroy_is_retried_until_the_provider_shows_it_absent(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    provider = home.provider("local")
    really, tries = provider.destroy, []

    def late(instance_id: str) -> None:
        tries.append(instance_id)
        if len(tries) == 1:
            raise HomingError("500")
        if len(tries) == 3:
            really(instance_id)

    monkeypatch.setattr(provider, "destroy", late)
    destroy_run(home, done.run)
    assert len(tries) == 3
    assert marked_now(home) == []


@pytest.mark.acceptance("X20")
def test_a_destroy_not_confirmed_in_time_raises_still_billing_and_is_remembered(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    monkeypatch.setattr(home.provider("local"), "destroy", lambda instance_id: None)
    with pytest.raises(StillBilling) as caught:
        destroy_run(home, done.run, deadline_s=0.1)
    assert caught.value.exit_code == 6
    assert done.instance.id in caught.value.why
    assert caught.value.fix == f"homing destroy {done.run.id}"
    assert [line.mark for line in home.ledger.unconfirmed()] == [done.instance.mark]
    refresh(home)
    assert home.ledger.unconfirmed()


def test_a_destroy_refused_by_the_provider_raises_still_billing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)

    def refuse(instance_id: str) -> None:
        raise HomingError("500")

    monkeypatch.setattr(home.provider("local"), "destroy", refuse)
    with pytest.raises(StillBilling, match="500"):
        destroy_run(home, done.run, deadline_s=0.1)
    assert [line.mark for line in home.ledger.unconfirmed()] == [done.instance.mark]


@pytest.mark.slow
def test_all_instances_are_destroyed_before_a_failure_is_raised(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = launch(make_draft(home, tmp_path, name="stuck", steps=100_000), home)
    launch(make_draft(home, tmp_path, name="moss", steps=100_000), home)
    provider = home.provider("local")
    really = provider.destroy
    monkeypatch.setattr(provider, "destroy", lambda id_: None if id_ == stuck.instance.id else really(id_))
    with pytest.raises(StillBilling):
        destroy_lines(home, open_lines(home, None), deadline_s=0.1)
    assert [line.run_name for line in billing_lines(home.ledger.lines())] == ["stuck"]


def test_a_launch_destroyed_before_its_create_call_creates_nothing(home: Home, tmp_path: Path) -> None:
    ready = make_draft(home, tmp_path)

    class Meddler(World):
        def walk(self, path: object) -> list[str]:
            # While the launcher builds the agent's zip, another process destroys the run.
            if str(path).endswith("agent") and not done:
                done.append(True)
                destroy_run(home, home.ledger.find("moss"))
            return super().walk(path)  # type: ignore[arg-type]

    done: list[bool] = []
    with pytest.raises(HomingError, match="destroyed before"):
        launch(ready, Home(home.path, Meddler()))
    assert done
    assert home.provider("local").list_owned() == []


@pytest.mark.slow
def test_destroy_ends_the_others_although_one_line_cannot_be_closed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(make_draft(home, tmp_path, steps=100_000), home)
    (line,) = home.ledger.lines()
    unborn = dataclasses.replace(line, mark=f"{line.mark}0", attempt=10, created_at=None, instance_id=None, intent_at=1)
    home.ledger.adopt(unborn)
    real = Ledger.close

    def close(self: Ledger, mark: str, **messages: Any) -> None:
        if mark == unborn.mark:
            raise IntegrityError("The ledger cannot be used.")
        real(self, mark, **messages)

    monkeypatch.setattr(Ledger, "close", close)
    monkeypatch.setattr("homing.cloud.ledger.meter.FREE_PROVIDERS", frozenset())  # local stands in for a paid provider
    with pytest.raises(StillBilling, match="1 instance may"):
        destroy_lines(home, home.ledger.lines(), deadline_s=5)
    assert marked_now(home) == []


def before_create(home: Home, deed: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `deed` during the create call of a launch, before the instance exists."""
    provider = home.provider("local")
    create = provider.create

    def slow(request: Request) -> Instance:
        deed()
        return create(request)

    monkeypatch.setattr(provider, "create", slow)


def test_a_launch_destroyed_during_its_create_call_destroys_its_instance(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = make_draft(home, tmp_path)
    before_create(home, lambda: destroy_run(Home(home.path, World()), home.ledger.find("moss")), monkeypatch)
    with pytest.raises(HomingError, match="destroyed while"):
        launch(ready, home)
    assert marked_now(home) == []
    assert billing_lines(home.ledger.lines()) == []


def test_a_launch_aborts_if_a_destroy_was_requested_during_its_create_call(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `homing destroy` in another terminal found nothing, timed out and reported that the run may still bill.
    ready = make_draft(home, tmp_path)
    before_create(home, lambda: home.ledger.ask_destroy(ready.mark, home.world.now()), monkeypatch)
    with pytest.raises(HomingError, match="destroyed while"):
        launch(ready, home)
    assert marked_now(home) == []
    assert billing_lines(home.ledger.lines()) == []


def test_a_run_destroyed_while_its_launch_waits_is_not_tried_on_the_next_offer(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, provider = make_draft(home, tmp_path), home.provider("local")

    def gone(request: object, instance_id: str) -> None:
        destroy_run(Home(home.path, World()), home.ledger.find("moss"))
        raise StartTimeout(f"{instance_id} disappeared before SSH came up.")

    def agree(row: object, instead: object) -> bool:
        raise AssertionError("a person destroyed it, so no other offer is tried")

    monkeypatch.setattr(provider, "hand_over", gone)
    other = SimpleNamespace(offer=dataclasses.replace(ready.order.offer, region="elsewhere"), timing=ready.timing,
                            cost_usd=Decimal(1))  # fmt: skip
    with pytest.raises(EndedElsewhere, match="was destroyed by another process"):
        launch_any(ready, [other], home, notify=lambda text: None, agree=agree)  # type: ignore[list-item]
    assert not home.ledger.find("moss").is_interrupted
    assert marked_now(home) == []


@pytest.mark.regression("destroyed-while-launching")
@pytest.mark.parametrize("moment", ["_send_age", "_check_guards"])
def test_a_launch_destroyed_after_its_first_heartbeat_says_so(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    real = getattr(launching, moment)

    def destroyed(*args: Any) -> Any:
        found = real(*args)
        destroy_run(Home(home.path, World()), home.ledger.find("moss"))
        return found

    monkeypatch.setattr(launching, moment, destroyed)
    with pytest.raises(EndedElsewhere, match="was destroyed by another process"):
        launch(make_draft(home, tmp_path, steps=100_000), home)
    assert home.ledger.find("moss").reason == "destroyed manually"
    assert marked_now(home) == []


def test_a_launch_that_cannot_record_its_failure_releases_its_lock(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The guard process lives on; with the lock held, no later refresh would close the line of this launch.
    ready, provider = make_draft(home, tmp_path), home.provider("local")

    def refuse(request: object) -> Instance:
        raise ProviderRefused("It answered 500.")

    def full(*args: object, **columns: object) -> None:
        raise IntegrityError("The ledger cannot be used.")

    monkeypatch.setattr(provider, "create", refuse)
    monkeypatch.setattr(home.ledger, "set_run", full)
    with pytest.raises(ProviderRefused, match="500"):
        launch(ready, home)
    assert not home.world.is_locked(home.launch_lock(ready.mark))
