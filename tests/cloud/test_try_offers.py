"""From one offer to the next: a stop, destroy or new limit in between applies to the next offer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cloud.rig import make_draft, marked_now

from homing.cloud.destroy import destroy_run
from homing.cloud.guard.change_limit_or_stop import ask_to_stop, change_limit, propose
from homing.cloud.guard.limits_and_destroys import limits_of
from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, Launched
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.providers.base import Request
from homing.cloud.try_offers import launch_any
from homing.errors import EndedElsewhere, NoOffer, StartTimeout
from homing.world import World

Says = Callable[[Home, RunRow], object]


def in_another_terminal(home: Home, says: Says) -> None:
    other = Home(home.path, World())
    says(other, other.ledger.find("moss"))


def refuse_first(home: Home, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Makes the first create call fail as sold out, after calling `meanwhile`."""
    provider = home.provider("local")
    real = provider.create

    def create(request: Request) -> Any:
        if request.mark.endswith("-1"):
            meanwhile()
            raise NoOffer("It is sold out.", why="none left")
        return real(request)

    monkeypatch.setattr(provider, "create", create)


def go(
    home: Home,
    ready: Draft,
    between: Callable[[], object] = lambda: None,
    notify: Callable[[str], None] = lambda text: None,
) -> tuple[Draft, Launched]:
    """Launches with one more offer, which the person accepts after `between`."""
    other = SimpleNamespace(offer=dataclasses.replace(ready.order.offer, region="elsewhere"), timing=ready.timing,
                            cost_usd=Decimal(1))  # fmt: skip

    def agree(row: object, instead: object) -> bool:
        between()
        return True

    return launch_any(ready, [other], home, notify=notify, agree=agree)  # type: ignore[list-item]


def destroys(home: Home, run: RunRow) -> None:
    destroy_run(home, run)


def stops(home: Home, run: RunRow) -> None:
    ask_to_stop(home, run)


def is_nothing_rented(home: Home) -> bool:
    return marked_now(home) == [] and all(line.destroyed_at is not None for line in home.ledger.lines())


def test_the_next_offer_is_tried_and_leaves_no_lock(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_first(home, monkeypatch)
    ready, done = go(home, make_draft(home, tmp_path))
    assert (ready.attempt, done.run.state) == (2, "running")
    assert not home.world.is_locked(home.launch_lock(done.run.id))
    assert not home.world.is_locked(home.launch_lock(ready.mark))


@pytest.mark.parametrize("says", [destroys, stops])
def test_a_run_ended_between_two_offers_is_not_launched_on_the_next(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    refuse_first(home, monkeypatch)
    with pytest.raises(EndedElsewhere, match="not launched"):
        go(home, make_draft(home, tmp_path), between=lambda: in_another_terminal(home, says))
    assert home.ledger.find("moss").state == "stopped"
    assert is_nothing_rented(home)


def test_a_stop_during_the_first_create_prevents_the_next_offer(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_first(home, monkeypatch, meanwhile=lambda: in_another_terminal(home, stops))
    with pytest.raises(EndedElsewhere, match="a stop was requested"):
        go(home, make_draft(home, tmp_path))
    assert is_nothing_rented(home)


def test_a_run_destroyed_while_its_first_offer_is_undone_stays_destroyed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, provider = make_draft(home, tmp_path), home.provider("local")
    real = provider.destroy

    def never_comes(request: object, instance_id: str) -> None:
        raise StartTimeout(f"{instance_id} cannot be reached.")

    def destroy(instance_id: str) -> None:
        real(instance_id)
        monkeypatch.setattr(provider, "destroy", real)
        in_another_terminal(home, destroys)

    monkeypatch.setattr(provider, "hand_over", never_comes)
    monkeypatch.setattr(provider, "destroy", destroy)
    with pytest.raises(EndedElsewhere, match="not launched"):
        go(home, ready, between=lambda: pytest.fail("the next offer was proposed"))
    assert (home.ledger.find("moss").state, home.ledger.find("moss").reason) == ("stopped", "destroyed manually")
    assert is_nothing_rented(home)


def sets_limit(usd: str, time_s: float | None = None) -> Says:
    def says(other: Home, run: RunRow) -> None:
        began = other.world.monotonic()
        is_confirmed = change_limit(
            other, propose(other, run, Decimal(usd), time_s), confirm_s=0.0 if run.is_live else 60
        )
        assert not is_confirmed
        assert other.world.monotonic() - began < 30, "without a live instance it does not wait for a confirmation"

    return says


def test_a_limit_lowered_during_the_first_create_applies_to_the_next_offer(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowers = sets_limit("0.50", 7200.0)
    refuse_first(home, monkeypatch, meanwhile=lambda: in_another_terminal(home, lowers))
    ready, done = go(home, make_draft(home, tmp_path))
    assert ready.spend_limit_usd == Decimal("0.50")
    assert home.ledger.find("moss").spend_limit_usd == "0.50"
    assert limits_of(home, done.run).time_s == 7200.0
    assert (done.heartbeat.spend_limit_usd, done.heartbeat.time_limit_s) == ("0.50", 7200.0)


def test_a_limit_changed_during_the_question_applies_and_is_confirmed_again(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    answers = iter([lambda: in_another_terminal(home, sets_limit("0.50", 7200.0)), lambda: None])
    refuse_first(home, monkeypatch)
    ready, done = go(home, make_draft(home, tmp_path), between=lambda: next(answers)(), notify=messages.append)
    assert next(answers, None) is None, "the question named other limits"
    assert (ready.attempt, ready.spend_limit_usd) == (2, Decimal("0.50"))
    assert home.ledger.find("moss").spend_limit_usd == home.ledger.lines()[-1].limit_usd == "0.50"
    assert limits_of(home, done.run).time_s == 7200.0
    assert (done.heartbeat.spend_limit_usd, done.heartbeat.time_limit_s) == ("0.50", 7200.0)
    assert "The run's limits have changed: $0.50, time 2h00m" in messages


def test_an_offer_above_a_limit_lowered_during_the_question_is_not_taken(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    refuse_first(home, monkeypatch)
    with pytest.raises(NoOffer):
        go(
            home,
            make_draft(home, tmp_path),
            between=lambda: in_another_terminal(home, sets_limit("0.0001")),
            notify=messages.append,
        )
    assert any("The spend limit of $0.0001 is too low" in text for text in messages)
    assert home.ledger.find("moss").spend_limit_usd == "0.0001"
    assert is_nothing_rented(home)


def test_a_plain_failed_launch_keeps_its_reason_when_it_is_destroyed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_first(home, monkeypatch)
    with pytest.raises(NoOffer):
        launch_any(make_draft(home, tmp_path), [], home, notify=lambda text: None, agree=lambda row, ready: True)
    in_another_terminal(home, destroys)
    row = home.ledger.find("moss")
    assert (row.state, row.reason) == ("failed", "launch: It is sold out.")
