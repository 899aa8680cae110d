"""Everything that carries our mark against the ledger, on a cloud double that bills on its own clock."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.fake_rig import RUN, note, rent
from tests.cloud.fake_world import KEY, FakeWorld

from homing.cloud.destroy import destroy_lines, destroy_run, end_finding, open_lines
from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import Adopted, LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark, volume_mark
from homing.cloud.providers.fake.faults import Faults, Strike
from homing.cloud.providers.fake.provider import KEY_HEADER, Fake
from homing.cloud.reconcile.inventory import Finding, keep, survey
from homing.cloud.reconcile.receipt import receipt
from homing.cloud.reconcile.reconcile import CREATE_GRACE_S, refresh
from homing.errors import ProviderSilent, StillBilling
from homing.world import HttpRequest, HttpResponse, NetworkError


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


def add(world: FakeWorld, kind: str, name: str) -> None:
    body = json.dumps({"name": name, "size_gb": 100}).encode()
    world.cloud.handle(HttpRequest("POST", f"http://x/{kind}", {KEY_HEADER: KEY}, body))


def kinds(home: Home) -> list[tuple[str, str]]:
    return [(finding.kind, finding.thing) for finding in survey(home).findings]


def test_an_instance_in_the_ledger_is_found_as_known(home: Home, tmp_path: Path) -> None:
    instance = rent(home, tmp_path)
    note(home, instance.id)
    (finding,) = survey(home).findings
    assert (finding.kind, finding.run_id, finding.id) == ("known", RUN, instance.id)
    assert not survey(home).to_answer


@pytest.mark.acceptance(140)
def test_an_instance_missing_from_the_ledger_is_found_with_its_cost_and_destroyed(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    instance = rent(home, tmp_path)
    world.pass_time(3600)
    (finding,) = survey(home).to_answer
    assert (finding.kind, finding.run_id, finding.id) == ("forgotten", "", instance.id)
    assert finding.age_s == pytest.approx(3600, abs=5)
    assert finding.spend_usd >= finding.rate_usd_per_hour * Decimal("0.99") > 0
    assert survey(home).to_answer  # asked again until the person answers
    assert end_finding(home, finding) == ""
    assert world.machines.running == []
    (line,) = home.ledger.lines()
    assert (line.billing, line.state) == ("no", "gone")
    assert survey(home).findings == []


def test_a_kept_instance_is_recorded_under_its_run_and_not_asked_about_again(home: Home, tmp_path: Path) -> None:
    first = rent(home, tmp_path)
    note(home, first.id)
    second = rent(home, tmp_path, 2)
    stray = rent(home, tmp_path, 1, run="other-20260101-000000-abcd")
    for finding in survey(home).to_answer:
        keep(home, finding)
    assert survey(home).to_answer == []
    lines = {line.instance_id: line for line in home.ledger.lines()}
    assert (lines[second.id].run_id, lines[second.id].limit_usd) == (RUN, "12")
    assert (lines[stray.id].run_id, lines[stray.id].run_name) == ("", "other-20260101-000000-abcd")


def test_a_kept_instance_of_an_ended_run_bills_until_its_limit_with_an_alert(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    note(home, rent(home, tmp_path).id)
    destroy_run(home, home.ledger.find("moss"))
    second = rent(home, tmp_path, 2)
    (finding,) = survey(home).to_answer
    assert "keeps billing until the limit of moss-20260101-000000-abcd, $12.00" in keep(home, finding)
    world.pass_time(meter.MARGIN_S + 60)
    made = guard_pass(home)
    assert made.done == []
    assert "is being kept, as you chose in reconcile" in made.alerts[0]
    assert guard_pass(home).alerts == [], "alerted once an hour"
    assert second.id in world.machines.running
    home.ledger.set_run(RUN, spend_limit_usd="0.01")
    assert "at its limit" in guard_pass(home).done[0]
    assert world.machines.running == []


def test_a_kept_earlier_attempt_of_a_live_run_is_not_destroyed(home: Home, world: FakeWorld, tmp_path: Path) -> None:
    first = rent(home, tmp_path)
    world.pass_time(60)
    note(home, rent(home, tmp_path, 2).id, 2)
    (finding,) = survey(home).to_answer
    keep(home, finding)
    assert guard_pass(home).done == []
    assert first.id in world.machines.running


def test_keeping_an_instance_without_a_run_says_that_only_you_can_end_it(home: Home, tmp_path: Path) -> None:
    rent(home, tmp_path, 1, run="other-20260101-000000-abcd")
    (finding,) = survey(home).to_answer
    assert "only you can end it" in keep(home, finding)


def test_an_instance_listed_by_another_provider_does_not_take_over_the_line(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = rent(home, tmp_path)
    note(home, instance.id)
    stranger = dataclasses.replace(instance, id="not-it", provider="local")
    monkeypatch.setattr(home.provider("local"), "list_owned", lambda: [stranger])
    monkeypatch.setattr("homing.cloud.reconcile.reconcile.configured", lambda *_: ["fake", "local"])
    problems = refresh(home)
    assert "local lists not-it" in problems[0]
    (line,) = home.ledger.lines()
    assert (line.provider, line.instance_id) == ("fake", instance.id)
    assert guard_pass(home).done == []
    assert [each.id for each in home.provider("fake").list_owned()] == [instance.id]


@pytest.mark.parametrize(("reference", "costs"), [("5", "5"), ("0.01", "2.49"), (None, "2.49")])
def test_a_receipt_is_the_larger_of_the_providers_figure_and_ours(
    home: Home, world: FakeWorld, tmp_path: Path, reference: str | None, costs: str
) -> None:
    instance = rent(home, tmp_path)
    note(home, instance.id)
    ended = dataclasses.replace(
        instance, spend_usd=None if reference is None else Decimal(reference), ended_at=world.now() + 3600
    )
    (line,) = home.ledger.lines()
    receipt(home, line, ended, "ended")
    assert Decimal(home.ledger.lines()[0].spend_usd) == Decimal(costs)


def test_a_home_clock_ahead_of_the_providers_does_not_make_the_receipt_zero(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    instance = rent(home, tmp_path)
    note(home, instance.id)
    (line,) = home.ledger.lines()
    assert line.created_at is not None
    there = line.created_at - 7200.0
    receipt(home, line, dataclasses.replace(instance, created_at=there, ended_at=there + 3600, spend_usd=None), "ended")
    assert Decimal(home.ledger.lines()[0].spend_usd) == Decimal("2.49")


def test_a_closed_line_is_reopened_if_its_instance_is_still_listed(home: Home, tmp_path: Path) -> None:
    instance = rent(home, tmp_path)
    line = note(home, instance.id)
    home.ledger.close(line.mark, at=home.world.now(), spend_usd=Decimal(0), note="wrong")
    assert kinds(home) == [("reopened", "instance")]
    assert kinds(home) == [("known", "instance")]


def test_an_unlisted_instance_is_not_closed_while_its_launch_waits_for_it(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The provider may list a new instance late. Closing its line too early made a guard rent a second one.
    line = note(home, rent(home, tmp_path).id)
    lock, real = home.launch_lock(line.mark), world.http
    world.mkdir(lock.parent)
    assert world.lock(lock)

    def not_yet(request: HttpRequest) -> HttpResponse:
        if request.method != "GET" or "/instances" not in request.url:
            return real(request)
        return HttpResponse(200, {}, b'{"instances": []}') if "?" in request.url else HttpResponse(404, {}, b"{}")

    monkeypatch.setattr(world, "http", not_yet)
    refresh(home)
    assert home.ledger.lines()[0].destroyed_at is None
    assert home.ledger.find("moss").is_live
    world.remove(lock)
    refresh(home)
    assert home.ledger.lines()[0].destroyed_at is not None, "no launch waits for it any more"


def test_an_instance_that_ended_itself_gets_its_receipt_after_the_settle_time(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    instance = rent(home, tmp_path)
    note(home, instance.id)
    home.provider("fake").destroy(instance.id)
    world.slept.clear()
    assert kinds(home) == [("absent", "instance")]
    assert sum(world.slept) >= home.provider("fake").settle_s
    assert kinds(home) == []


def test_resources_of_another_owner_are_not_listed_or_destroyed(home: Home, world: FakeWorld, tmp_path: Path) -> None:
    reference = rent(home, tmp_path, owner="zzz999")
    add(world, "volumes", "homing-zzz999-volume")
    add(world, "keys", "another-users-key")
    assert survey(home).findings == []
    destroy_lines(home, open_lines(home, None))
    world.pass_time(5)
    assert reference.id in world.machines.running


@pytest.mark.acceptance(127)
def test_volumes_and_keys_without_a_live_run_are_found_and_removed(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    instance = rent(home, tmp_path)
    line = note(home, instance.id)
    add(world, "volumes", line.mark)
    add(world, "volumes", make_mark(home.owner, "older", 1))
    add(world, "keys", f"homing-{home.owner}-key")
    found = survey(home)
    assert [(each.kind, each.thing) for each in found.findings] == [
        ("known", "instance"),
        ("in use", "volume"),
        ("left over", "volume"),
        ("left over", "key"),
    ]
    volume, key = found.to_answer
    assert volume.may_bill
    assert not key.may_bill
    assert [end_finding(home, each) for each in found.to_answer] == ["", ""]
    assert [each.thing for each in survey(home).findings] == ["instance", "volume"]


def test_destroy_also_removes_the_volumes_and_keys_of_the_run(home: Home, world: FakeWorld, tmp_path: Path) -> None:
    instance = rent(home, tmp_path)
    line = note(home, instance.id)
    add(world, "volumes", line.mark)
    add(world, "keys", line.mark)
    destroy_run(home, home.ledger.find("moss"))
    assert home.provider("fake").list_resources() == []
    assert not any(bill.until is None for bill in world.cloud.bill())


def test_a_leftover_volume_keeps_the_line_open_until_it_is_removed(
    homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = FakeWorld(Faults(strikes=(Strike("leaves_volume", of="create"),)))
    home = Home(homing_home, world)
    instance = rent(home, tmp_path)
    note(home, instance.id)
    world.pass_time(60)
    provider = home.provider("fake")
    provider.destroy(instance.id)
    monkeypatch.setattr(provider, "destroy_resource", lambda resource: None)
    assert any("has ended, but" in problem for problem in refresh(home))
    assert home.ledger.lines()[0].destroyed_at is None
    monkeypatch.undo()
    refresh(home)
    assert home.ledger.lines()[0].destroyed_at is not None
    assert not any(bill.until is None for bill in world.cloud.bill())


def test_an_unreachable_provider_is_reported_and_may_hide_billing_instances(
    home: Home, world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = rent(home, tmp_path)
    note(home, instance.id)

    def cut(request: HttpRequest) -> HttpResponse:
        raise NetworkError("no route")

    monkeypatch.setattr(world, "http", cut)
    found = survey(home)
    assert found.is_blind
    assert any("Could not query fake" in problem for problem in found.problems)
    assert [finding.kind for finding in found.findings] == ["waiting"]
    monkeypatch.undo()
    assert not survey(home).is_blind


def test_an_unreachable_provider_makes_an_empty_survey_incomplete(
    home: Home, world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(request: HttpRequest) -> HttpResponse:
        raise NetworkError("no route")

    monkeypatch.setattr(world, "http", cut)
    found = survey(home)
    assert found.findings == []
    assert found.is_blind


def test_destroy_is_not_confirmed_while_an_unanswered_create_may_still_take_effect(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    line = note(home)
    with pytest.raises(StillBilling, match="1 instance"):
        destroy_lines(home, open_lines(home, None))
    assert [each.mark for each in home.ledger.unconfirmed()] == [line.mark]
    late = rent(home, tmp_path)  # the create call took effect after all
    destroy_lines(home, open_lines(home, None))
    assert late.id not in world.machines.running
    assert home.ledger.unconfirmed() == []


def test_an_unanswered_create_is_closed_at_an_upper_bound_after_the_grace_period(home: Home, world: FakeWorld) -> None:
    note(home)
    world.pass_time(CREATE_GRACE_S)
    destroy_lines(home, open_lines(home, None))
    (line,) = home.ledger.lines()
    # It may have existed unseen for a while, so this is an upper bound.
    assert (line.billing, line.note) == ("no", "at most: never seen at the provider")
    assert Decimal(line.spend_usd) >= meter.cost(Decimal("2.49"), CREATE_GRACE_S)


def test_a_launch_that_died_before_its_create_call_is_closed(home: Home) -> None:
    note(home, is_created=False)
    (finding,) = survey(home).findings
    assert (finding.kind, finding.spend_usd) == ("unborn", 0)
    (line,) = home.ledger.lines()
    assert (line.billing, line.created_at) == ("no", None)
    assert home.ledger.find("moss").state == "failed"


def test_an_instance_is_destroyed_although_an_older_ledger_says_it_was_never_created(
    home: Home, world: FakeWorld, tmp_path: Path
) -> None:
    note(home, is_created=False)
    rent(home, tmp_path)
    world.pass_time(3600)
    refresh(home)
    destroy_lines(home, open_lines(home, None))
    assert world.machines.running == []
    assert home.ledger.lines()[0].note != "never created"


def test_survey_warns_of_an_earlier_account_that_the_current_key_cannot_list(
    home: Home, world: FakeWorld, homing_home: Path, tmp_path: Path
) -> None:
    note(home, rent(home, tmp_path).id)
    refresh(home)
    destroy_lines(home, open_lines(home, None))
    mine = world.cloud.account
    assert not any(mine in problem for problem in survey(home).problems)
    other = FakeWorld()
    other.cloud.account, other.t = "account-of-others", world.t
    (messages,) = [problem for problem in survey(Home(homing_home, other)).problems if mine in problem]
    assert "account-of-others" in messages


def test_the_account_is_queried_once_for_all_lines_even_without_an_answer(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in (1, 2):
        note(home, rent(home, tmp_path, attempt).id, attempt)
        home.ledger.set_run(RUN, state="stopped")
    asked = []

    def silent(self: object) -> str:
        asked.append(1)
        raise ProviderSilent("It did not answer.")

    monkeypatch.setattr(Fake, "account", silent)
    refresh(home)
    refresh(home)
    assert len(asked) == 1


def test_a_line_is_not_closed_while_its_launch_is_running(home: Home) -> None:
    line = note(home, is_created=False)
    home.world.mkdir(home.launch_lock(line.mark).parent)
    assert home.world.lock(home.launch_lock(line.mark))  # like the launching process
    assert kinds(home) == [("waiting", "instance")]
    assert home.ledger.lines()[0].destroyed_at is None


def test_only_adopted_instances_of_another_home_are_shown(home: Home, world: FakeWorld, tmp_path: Path) -> None:
    reference = rent(home, tmp_path, owner="zzz999")
    rent(home, tmp_path, 2, owner="zzz999")
    now = world.now()
    line = LedgerLine(
        reference.mark,
        RUN,
        "moss",
        1,
        "fake",
        "h100",
        "2.49",
        "12",
        now,
        reference.id,
        now,
        state="ready",
        billing="yes",
    )
    row = RunRow(RUN, "moss", "running", now, "file:/nowhere", "f" * 64, "12")
    home.ledger.adopt_run(row, [line], [Adopted(reference.mark, "zzz999", world.host(), str(home.path))])
    add(world, "volumes", reference.mark)
    add(world, "volumes", make_mark("zzz999", RUN, 2))
    found: list[Finding] = survey(home).findings
    assert [(each.kind, each.thing, each.mark) for each in found] == [
        ("known", "instance", reference.mark),
        ("in use", "volume", reference.mark),
    ]


def test_the_volume_of_an_adopted_run_is_shown_and_can_be_removed_here(
    home: Home, world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The volume outlives the instances, and the home that created it may no longer exist.
    now, mark = world.now(), make_mark("zzz999", RUN, 1)
    row = RunRow(RUN, "moss", "done", now, "file:/nowhere", "f" * 64, "12")
    line = LedgerLine(mark, RUN, "moss", 1, "fake", "h100", "2.49", "12", now, "i-1", now, now, "gone", "no")
    home.ledger.adopt_run(row, [line], [Adopted(mark, "zzz999", world.host(), str(home.path))])
    add(world, "volumes", volume_mark(mark))
    add(world, "volumes", "homing-zzz999-another-20260101-000000-abcd-volume")
    (finding,) = survey(home).findings
    assert (finding.thing, finding.mark, finding.may_bill) == ("volume", volume_mark(mark), True)
    assert end_finding(home, finding) == ""
    assert survey(home).findings == []


def test_a_resource_kept_on_purpose_is_shown_and_not_asked_about(
    home: Home, world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(world, "volumes", f"homing-{home.owner}-moss-volume")
    real = home.provider("fake").list_resources
    monkeypatch.setattr(
        home.provider("fake"), "list_resources", lambda: [dataclasses.replace(each, is_kept=True) for each in real()]
    )
    (kept,) = survey(home).findings
    assert kept.kind == "kept"
    assert kept.may_bill
    assert not kept.needs_answer
