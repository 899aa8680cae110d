"""Ending what bills in bad moments, on a cloud double that bills on its own clock."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.fake_rig import RUN, billed, line_of, note_rented, rent, rent_twins, written
from tests.cloud.fake_world import FakeWorld
from tests.doubles.absurd import spoil

from homing.cloud.destroy import destroy_lines, open_lines, would_be_lost
from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.providers.base import Instance
from homing.cloud.providers.fake.provider import Fake
from homing.cloud.reconcile import reconcile
from homing.errors import ProviderRefused, StillBilling
from homing.world import HttpRequest, HttpResponse, World


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


def answer_lists(reply: HttpResponse, world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers every request for the provider's list with `reply`; other requests are not changed."""
    real = world.http

    def http(request: HttpRequest) -> HttpResponse:
        is_list = request.method == "GET" and "/instances?" in request.url
        return reply if is_list else real(request)

    monkeypatch.setattr(world, "http", http)


def test_destroy_ends_an_instance_with_a_known_id_although_the_list_fails(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_rented(home, rent(home, tmp_path).id)
    answer_lists(HttpResponse(503, {}, b""), world, monkeypatch)
    with pytest.raises(StillBilling, match="not confirmed"):
        destroy_lines(home, open_lines(home, None), deadline_s=1)
    assert world.machines.running == [], "the destroy request was sent nevertheless"
    monkeypatch.undo()
    destroy_lines(home, open_lines(home, None))
    assert billed(world) <= written(home)


def test_a_list_in_an_unknown_format_stops_neither_the_guard_nor_destroy(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_rented(home, rent(home, tmp_path).id)
    answer_lists(HttpResponse(200, {}, b'{"instances": [{"uuid": 1}]}'), world, monkeypatch)
    assert "in an unknown format" in guard_pass(home).problems[0]
    with pytest.raises(StillBilling, match="not confirmed"):
        destroy_lines(home, open_lines(home, None), deadline_s=1)
    assert world.machines.running == []


def test_an_instance_found_by_its_mark_is_then_tracked_by_its_id(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # EC2 lists a terminating instance for about a minute. After that, looking it up by its mark found nothing.
    instance = rent(home, tmp_path)
    line = note_rented(home)
    real, looks = Fake.list_owned, [2]

    def late(self: Fake) -> list[Instance]:
        looks[0] -= 1
        return [instance] if looks[0] >= 0 else real(self)

    monkeypatch.setattr(Fake, "list_owned", late)
    destroy_lines(home, open_lines(home, None))
    closed = line_of(home, line.mark)
    assert (closed.instance_id, closed.is_at_most) == (instance.id, False)
    assert billed(world) <= written(home)


def test_destroy_ends_the_duplicate_although_the_other_instance_is_locked(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = rent_twins(home, world, tmp_path)
    note_rented(home, first)
    real = Fake.destroy

    def stubborn(self: Fake, instance_id: str) -> None:
        if instance_id == first:
            raise ProviderRefused("It answered 409: locked.")
        real(self, instance_id)

    monkeypatch.setattr(Fake, "destroy", stubborn)
    with pytest.raises(StillBilling, match="not confirmed"):
        destroy_lines(home, open_lines(home, None), deadline_s=1)
    assert world.machines.running == [first]


def test_the_billed_rate_is_kept_although_the_provider_forgets_it_after_the_end(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = rent(home, tmp_path)
    line = note_rented(home, instance.id)
    home.ledger.update(line.mark, rate_usd_per_hour=str(instance.rate_usd_per_hour / 2))  # the offered rate
    world.pass_time(600)
    real = Fake.describe

    def forgetful(self: Fake, instance_id: str) -> object:
        found = real(self, instance_id)
        if found.state != "gone":
            return found
        return dataclasses.replace(found, rate_usd_per_hour=0, spend_usd=None, ended_at=None, created_at=None)

    monkeypatch.setattr(Fake, "describe", forgetful)
    destroy_lines(home, open_lines(home, None))
    assert billed(world) <= written(home)
    assert line_of(home, line.mark).rate_usd_per_hour == str(instance.rate_usd_per_hour)


def test_an_instance_recorded_while_a_destroy_is_confirmed_is_also_destroyed(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The answer to the first create was lost, and this destroys its instance while the launch retries the create.
    first, second = rent_twins(home, world, tmp_path)
    world.cloud._things[second].hidden_until = world.t + 4000
    line = note_rented(home)
    real = reconcile.is_absent

    def meanwhile(*args: object) -> bool:
        is_gone = real(*args)  # type: ignore[arg-type]
        if line_of(home, line.mark).instance_id == first:
            home.ledger.update(line.mark, instance_id=second)
        return is_gone

    monkeypatch.setattr("homing.cloud.destroy.is_absent", meanwhile)
    destroy_lines(home, open_lines(home, None))
    assert world.machines.running == []
    assert line_of(home, line.mark).instance_id == second


def test_an_unresponsive_store_does_not_delay_a_destroy(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Destroy first asks the store what would be lost; a hanging S3 is retried for minutes.
    line = note_rented(home, rent(home, tmp_path).id)
    waits, waited = threading.Event(), list[bool]()
    monkeypatch.setattr("homing.cloud.ask_providers.ASK_S", 0.2)
    monkeypatch.setattr(home.world, "together", World().together)  # with real time
    monkeypatch.setattr("homing.cloud.destroy.read_reports", lambda *_: waited.append(waits.wait(20)))
    monkeypatch.setattr(Home, "store_of", lambda *_: None)
    home.ledger.set_run(line.run_id, store="s3://far-away/moss")
    run = home.ledger.run(line.run_id)
    assert run is not None
    assert "did not answer within 0.2 s" in would_be_lost(home, run)
    assert waited == []
    waits.set()


# --- absurd figures ---

ABSURD = ["NaN", "sNaN", "Infinity", "-Infinity", "1e308", "1e999999999", "-5"]


def show_figures(monkeypatch: pytest.MonkeyPatch, **figures: object) -> None:
    """The provider returns all its instances with these figures, without the checks of its API client."""
    list_owned, describe = Fake.list_owned, Fake.describe

    def spoiled(instance: Instance) -> Instance:
        return dataclasses.replace(instance, **figures) if instance.state != "gone" else instance  # type: ignore[arg-type]

    monkeypatch.setattr(Fake, "list_owned", lambda self: [spoiled(each) for each in list_owned(self)])
    monkeypatch.setattr(Fake, "describe", lambda self, instance_id: spoiled(describe(self, instance_id)))


@pytest.mark.regression("provider-figures")
def test_absurd_provider_figures_do_not_prevent_the_destroy_request(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, text in enumerate(ABSURD, start=1):
        for field in ("rate_usd_per_hour", "spend_usd"):
            with monkeypatch.context() as patch:
                attempt = 2 * number + (field == "spend_usd")
                note_rented(home, rent(home, tmp_path, attempt).id, attempt)
                show_figures(patch, **{field: Decimal(text)})
                with contextlib.suppress(StillBilling):
                    destroy_lines(home, open_lines(home, None), deadline_s=1)
                assert world.machines.running == [], (field, text)
            destroy_lines(home, open_lines(home, None), deadline_s=60)
            home.ledger.set_run(RUN, state="stopped")


@pytest.mark.regression("provider-figures")
def test_absurd_provider_figures_do_not_stop_the_guard_at_a_limit(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = rent(home, tmp_path)
    line = note_rented(home, instance.id)
    world.cloud._things[instance.id].guard_usd = None  # the provider's own guard does not act
    world.pass_time(40 * 3600)  # the limit allows about 33 hours
    assert world.machines.running == [instance.id]
    show_figures(monkeypatch, spend_usd=Decimal("Infinity"))
    guard_pass(home)
    assert world.machines.running == []
    assert line_of(home, line.mark).spend_usd != "Infinity"


@pytest.mark.regression("absurd-bills")
def test_an_absurd_bill_is_reported_and_not_recorded(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = note_rented(home, rent(home, tmp_path).id)
    world.pass_time(600)
    sane = guard_pass(home)
    for text in ("1e26", "123456", "Infinity"):
        real = world.http

        def http(request: HttpRequest, text: str = text, real: Callable[..., HttpResponse] = real) -> HttpResponse:
            return spoil(real(request), {"spend_usd": text})

        with monkeypatch.context() as patch:
            patch.setattr(world, "http", http)
            made = guard_pass(home)
            assert any("homing ignores" in problem for problem in made.problems), text
            assert Decimal(line_of(home, line.mark).spend_usd) < 1, text
            assert home.ledger.bills().get(line.mark, Decimal(0)) < 1, text
    assert world.machines.running, "an implausible figure destroys nothing"
    assert sane.problems == guard_pass(home).problems


@pytest.mark.regression("provider-figures")
def test_an_invalid_retry_after_header_does_not_prevent_a_destroy_retry(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_rented(home, rent(home, tmp_path).id)
    real, refused = world.http, list[str]()

    def http(request: HttpRequest) -> HttpResponse:
        if request.method == "DELETE" and not refused:
            refused.append(request.url)
            return HttpResponse(429, {"retry-after": "nan"}, b"")
        return real(request)

    monkeypatch.setattr(world, "http", http)
    destroy_lines(home, open_lines(home, None))
    assert world.machines.running == []
    assert all(seconds == seconds for seconds in world.slept), "it never sleeps for NaN seconds"
