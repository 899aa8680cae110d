"""A receipt is never below what the provider bills; if the cost is unknown, it is marked as an upper bound."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.fake_rig import RATE, RUN, billed, line_of, note_rented, note_twins, rent, written
from tests.cloud.fake_world import FakeWorld
from tests.contracts.providers import ProviderContract

from homing.cloud.destroy import destroy_lines, end_duplicates, open_lines
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import REFUSED, LedgerLine
from homing.cloud.ledger.mark import duplicate_mark, make_mark, shown_mark
from homing.cloud.providers.fake.cloud_types import Settings
from homing.cloud.providers.fake.faults import Faults, Strike
from homing.cloud.reconcile.receipt import counted, receipt, seen_spend
from homing.cloud.reconcile.reconcile import CREATE_GRACE_S, is_absent, note_duplicate, refresh
from homing.store import open_store, run_key
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat
from homing.world import Database, HttpRequest, HttpResponse, NetworkError


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


def test_spend_between_two_observations_uses_the_monotonic_clock(home: Home, world: FakeWorld) -> None:
    line = note_rented(home)
    assert line.created_at is not None
    seen_spend(home, line)
    world.pass_time(3600)
    ahead = dataclasses.replace(line, created_at=world.now() + 3600)  # as if the clock had been set back
    assert seen_spend(home, ahead) == RATE
    world.pass_time(3600)
    assert seen_spend(home, ahead) == 2 * RATE


@pytest.mark.parametrize("is_destroyed", [False, True])
def test_an_instance_that_was_never_seen_costs_an_upper_bound(
    home: Home, world: FakeWorld, tmp_path: Path, is_destroyed: bool
) -> None:
    # The answer to the create call was lost and the instance was preempted unseen: its line used to close at $0.
    note_rented(home)
    world.cloud.preempt(rent(home, tmp_path).id, notice_s=600.0)
    world.pass_time(CREATE_GRACE_S + 1)
    if is_destroyed:
        destroy_lines(home, open_lines(home, None))
    else:
        home.ledger.update(make_mark(home.owner, RUN, 1), run_id="")  # no store to look for heartbeats in
        assert refresh(home) == []
    (line,) = home.ledger.lines()
    assert line.is_at_most
    assert billed(world) > 0
    assert billed(world) <= written(home) <= meter.cost(RATE, CREATE_GRACE_S + 60)


def test_the_upper_bound_is_capped_by_the_providers_own_guard(homing_home: Path) -> None:
    world = FakeWorld(settings=Settings(has_guard=True))
    home = Home(homing_home, world)
    note_rented(home)
    world.pass_time(3 * 86400)
    destroy_lines(home, open_lines(home, None))
    assert written(home) == 12, "its limit"
    assert home.ledger.lines()[0].is_at_most


def test_the_upper_bound_covers_the_whole_time_without_a_provider_guard(homing_home: Path) -> None:
    world = FakeWorld(settings=Settings(has_guard=False))
    home = Home(homing_home, world)
    note_rented(home)
    world.pass_time(3 * 86400)
    destroy_lines(home, open_lines(home, None))
    assert written(home) >= meter.cost(RATE, 3 * 86400)


def test_a_refused_create_costs_nothing_even_after_a_provider_outage(
    home: Home, world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = note_rented(home)
    home.ledger.update(line.mark, state=REFUSED, note="there is no room")

    def cut(request: HttpRequest) -> HttpResponse:
        raise NetworkError("no route")

    monkeypatch.setattr(world, "http", cut)
    refresh(home)
    monkeypatch.undo()
    world.pass_time(60)
    destroy_lines(home, open_lines(home, None))
    (line,) = home.ledger.lines()
    assert (line.spend_usd, line.note, line.is_at_most) == ("0", "there is no room", False)


def test_an_instance_with_a_heartbeat_is_charged_although_its_create_was_refused(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    # Modal did not answer the create call until its queue time was over. The launch recorded "no room", although the
    # instance had trained all that time, and its line closed at $0.
    line = note_rented(home)
    home.ledger.set_run(RUN, store=f"file:{tmp_path}/store")
    store = open_store(f"file:{tmp_path}/store", world)
    world.pass_time(600)
    beat = Heartbeat(world.now() - 5, line.mark, 1, "training", world.now() - 600, str(RATE), "0.05", "12")
    store.put_bytes(run_key(RUN, file_names.HEARTBEAT), codec.dumps(beat).encode())
    home.ledger.update(line.mark, state=REFUSED, note="there is no room")
    destroy_lines(home, open_lines(home, None))
    assert written(home) >= meter.cost(RATE, 600)


def test_the_cost_of_a_manually_destroyed_instance_is_no_upper_bound(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    note_rented(home, rent(home, tmp_path).id)
    world.pass_time(3600)
    destroy_lines(home, open_lines(home, None))
    assert not home.ledger.lines()[0].is_at_most
    assert billed(world) <= written(home) <= billed(world) + meter.cost(RATE, 60)


def test_a_receipt_uses_the_billed_rate_if_it_is_above_the_offered_one(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    instance = rent(home, tmp_path)
    line = note_rented(home, instance.id)
    world.pass_time(600)
    dear = dataclasses.replace(instance, state="gone", rate_usd_per_hour=RATE * 2, spend_usd=None)
    receipt(home, line_of(home, line.mark), dear, "gone")
    assert written(home) >= meter.cost(RATE * 2, 600)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_duplicate_listed_later_gets_a_line_of_its_own(
    home: Home, world: FakeWorld, tmp_path: Path, is_closed: bool
) -> None:
    line, first, second = note_twins(home, world, tmp_path)
    world.cloud._things[first].hidden_until = world.t + 4000
    world.pass_time(3600)
    if is_closed:
        destroy_lines(home, open_lines(home, None))
    else:
        refresh(home)
        world.cloud.preempt(second, notice_s=0.0)
    world.pass_time(600)
    refresh(home)
    assert line_of(home, duplicate_mark(line.mark, first)).instance_id == first
    assert line_of(home, line.mark).instance_id == second
    destroy_lines(home, open_lines(home, None))
    refresh(home)
    assert written(home) >= billed(world) > 0


def test_a_duplicate_is_destroyed_although_the_ledger_cannot_be_written(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, _, second = note_twins(home, world, tmp_path)
    really = Database.execute

    def on_a_full_disk(self: Database, *statements: Any) -> Any:
        if any(sql.startswith(("UPDATE", "INSERT OR IGNORE INTO lines")) for sql, _ in statements):
            raise OSError("database or disk is full")
        return really(self, *statements)

    monkeypatch.setattr(Database, "execute", on_a_full_disk)
    assert end_duplicates(home, line_of(home, line.mark))
    assert list(world.machines.running) == [second]


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_two_instances_with_one_mark_get_two_lines_and_both_are_charged(
    home: Home, world: FakeWorld, tmp_path: Path, is_looked_at: bool
) -> None:
    line, first, second = note_twins(home, world, tmp_path)
    world.pass_time(3600)
    if is_looked_at:
        assert any("both are being billed" in problem for problem in refresh(home))
        assert [each.instance_id for each in home.ledger.lines(RUN)] == [first, second], (
            "the last line is the run's own"
        )
    destroy_lines(home, open_lines(home, None))
    refresh(home)
    assert world.machines.running == []
    assert {shown_mark(each.mark) for each in home.ledger.lines()} == {line.mark}
    assert written(home) >= billed(world) >= meter.cost(RATE, 7200)


def test_a_duplicate_that_outlives_the_main_instance_keeps_its_own_line(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    line, first, second = note_twins(home, world, tmp_path)
    refresh(home)
    world.pass_time(600)
    world.cloud.preempt(second, notice_s=0.0)
    world.pass_time(3600)
    refresh(home)
    assert line_of(home, line.mark).instance_id == second
    assert line_of(home, duplicate_mark(line.mark, first)).billing == "yes"
    destroy_lines(home, open_lines(home, None))
    assert billed(world) <= written(home) <= billed(world) + meter.cost(RATE, 2 * 60)


def test_a_duplicate_that_the_create_call_destroyed_is_charged(homing_home: Path, tmp_path: Path) -> None:
    # The first answer is lost and its instance is listed only after a second create; the older one is then kept.
    world = FakeWorld(Faults(strikes=(Strike("lost_after", 1, "create"),)))
    home = Home(homing_home, world)
    line, provider = note_rented(home), home.provider("fake")
    add = world.cloud._add

    def late(kind: str, mark: str, rate: Decimal) -> object:
        thing = add(kind, mark, rate)
        if len(world.cloud._things) == 1:
            thing.hidden_until = world.t + provider.settle_s + 0.5
        else:
            world.pass_time(1.0)
        return thing

    world.cloud._add = late  # type: ignore[assignment]
    made = provider.create(ProviderContract().make_request(provider, line.mark, tmp_path))
    (duplicate,) = made.twins
    home.ledger.update(line.mark, instance_id=made.id)
    note_duplicate(home, line_of(home, line.mark), dataclasses.replace(made, id=duplicate, state="destroying"))
    world.pass_time(60)
    refresh(home)
    destroy_lines(home, open_lines(home, None))
    assert len(world.cloud.bill()) == 2
    assert written(home) >= billed(world)


def test_spend_of_another_account_reported_to_an_agent_is_not_counted_as_its_own() -> None:
    first = LedgerLine("a-1", "r", "moss", 1, "shop", "x", "1.00", "1.00", 0.0, created_at=0.0, account="mine")
    second = dataclasses.replace(first, mark="a-2", attempt=2, intent_at=600.0, created_at=600.0, account="team")
    beat = Heartbeat(960.0, "a-2", 2, "training", 600.0, "1.00", spend_usd="1.10")
    closed = dataclasses.replace(
        first, destroyed_at=1200.0, spend_usd="0.20"
    )  # with its key, and cheaper than it might
    for lines in ([first, second], [closed, second]):
        assert counted(second, beat, lines, now=960.0) == Decimal("0.10")
    before = dataclasses.replace(closed, destroyed_at=500.0)
    assert counted(second, beat, [before, second], now=960.0) == Decimal("0.90")


def test_a_clock_set_back_during_a_destroy_does_not_lower_the_receipt(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The instance ended by itself before this process saw it, and its provider gives no end time.
    instance = rent(home, tmp_path)
    note_rented(home, instance.id)
    world.pass_time(3600)
    home.provider("fake").destroy(instance.id)
    back_s, real, describe = 0.0, is_absent, type(home.provider("fake")).describe

    def without_end_time(provider: Any, instance_id: str) -> Any:
        return dataclasses.replace(describe(provider, instance_id), ended_at=None, spend_usd=None)

    def meanwhile(*given: Any) -> bool:
        nonlocal back_s
        back_s = 1800.0
        return real(*given)

    monkeypatch.setattr(type(home.provider("fake")), "describe", without_end_time)
    monkeypatch.setattr(world, "now", lambda: world.t - back_s)
    monkeypatch.setattr("homing.cloud.destroy.is_absent", meanwhile)
    destroy_lines(home, open_lines(home, None))
    assert meter.cost(RATE, 3600) <= billed(world) <= written(home) <= meter.cost(RATE, 3700)


@pytest.mark.parametrize("spend", ["NaN", "Infinity", "1e999999999", "1e30", "-5", "lots", "9" * 200])
def test_absurd_dollars_in_a_heartbeat_become_no_bill(spend: str) -> None:
    line = LedgerLine("a-1", "moss-1", "moss", 1, "local", "o", "1.00", "5", 0.0, created_at=0.0)
    beat = Heartbeat(960.0, "a-1", 1, "training", 600.0, "1.00", spend_usd=spend)
    assert counted(line, beat, [line], 1000.0) == 0
    assert counted(line, dataclasses.replace(beat, spend_usd="1.10"), [line], 1000.0) == Decimal("1.10")
