"""After `rm ledger.sqlite*`, with and without its backup: no verb says that nothing bills while something does."""

from __future__ import annotations

import shutil
from decimal import Decimal

import pytest
from tests.cli.lost_rig import NEW, Rig, rig
from tests.cloud.fake_world import FakeWorld
from tests.cloud.rig import make_data, make_run

from homing.cloud.launch.launch import LaunchOrder, draft
from homing.cloud.providers.base import Needs
from homing.errors import StillBilling

__all__ = ["rig"]

VERBS = [("status", "moss"), ("watch", "moss"), ("stop", "moss", "--no-wait"), ("fetch", "moss"), ("status",)]


def lose_backup(rig: Rig) -> None:
    shutil.rmtree(rig.path / "backup", ignore_errors=True)


def be_silent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(self: FakeWorld, request: object) -> object:
        raise OSError("no route to host")

    monkeypatch.setattr(FakeWorld, "http", no_answer)


@pytest.mark.regression("lost-ledger")
@pytest.mark.parametrize("has_backup", [True, False])
def test_destroy_ends_what_bills_although_the_ledger_is_lost(rig: Rig, has_backup: bool) -> None:
    instance = rig.rent()
    assert rig.billing == [instance]
    rig.lose_ledger()
    if not has_backup:
        lose_backup(rig)
    said = rig.cli("destroy", "moss", "--yes")
    assert rig.billing == [], said.err
    assert said.code == 0, said.err


@pytest.mark.regression("lost-ledger")
@pytest.mark.parametrize("words", VERBS)
def test_no_verb_says_that_nothing_bills_while_something_does(
    rig: Rig, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.rent()
    rig.lose_ledger()
    lose_backup(rig)
    be_silent(rig, monkeypatch)
    said = rig.cli(*words)
    assert "It has no instance and is not billing" not in said.err
    assert said.code == StillBilling.exit_code, said.err
    assert "homing adopt" in said.err or "homing runs" in said.err


@pytest.mark.parametrize("has_backup", [True, False])
def test_status_shows_it_with_its_limit(rig: Rig, has_backup: bool) -> None:
    instance = rig.rent(limit="3")
    rig.lose_ledger()
    if not has_backup:
        lose_backup(rig)
    said = rig.cli("status", "moss", "--json")
    assert said.code == 0, said.err
    assert (said.json["run"], said.json["spend_limit_usd"], said.json["is_billing"]) == (NEW, "3", True)
    assert said.json["instances"][-1]["instance_id"] == instance
    assert ("was missing. It was restored from its backup of" in said.err) is has_backup


@pytest.mark.parametrize("has_backup", [True, False])
def test_the_guard_ends_it_at_its_limit(rig: Rig, has_backup: bool) -> None:
    rig.rent(limit="0.10")
    rig.lose_ledger()
    if not has_backup:
        lose_backup(rig)
    rig.world.pass_time(990)
    said = rig.cli("guard", "--once")
    assert rig.billing == [], said.err
    assert "at its limit" in said.out


def test_an_instance_without_run_documents_is_named_with_the_command_that_ends_it(rig: Rig) -> None:
    instance = rig.rent()
    rig.lose_ledger()
    lose_backup(rig)
    shutil.rmtree(rig.path / "runs")
    for words in VERBS:
        said = rig.cli(*words)
        assert said.code == StillBilling.exit_code, (words, said.err)
        assert f"homing destroy {instance}" in said.err
    assert rig.cli("destroy", instance, "--yes").code == 0
    assert rig.billing == []


def test_a_provider_that_does_not_answer_leaves_it_open_by_its_record_in_the_store(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.rent()
    rig.lose_ledger()
    lose_backup(rig)
    be_silent(rig, monkeypatch)
    said = rig.cli("destroy", "moss", "--yes")
    assert said.code == StillBilling.exit_code
    assert f"homing adopt file:{rig.tmp_path / 'store'} {NEW}" in said.err


def test_an_ended_run_is_reported_as_shown_by_no_provider(rig: Rig) -> None:
    rig.rent()
    assert rig.cli("destroy", "moss", "--yes").code == 0
    rig.lose_ledger()
    lose_backup(rig)
    said = rig.cli("status", "moss")
    assert said.code == 2
    assert "No configured provider lists an instance of this run." in said.err


def test_a_home_that_never_rented_asks_no_provider(rig: Rig) -> None:
    said = rig.cli("status", "moss")
    assert said.code == 2
    assert "has not been launched yet" in said.err
    assert rig.world.requests == []


@pytest.mark.regression("lost-ledger")
@pytest.mark.parametrize("has_backup", [True, False])
def test_launch_rents_no_second_instance(rig: Rig, has_backup: bool) -> None:
    instance = rig.rent()
    make_data(rig.folder / "data/moss")
    rig.lose_ledger()
    if not has_backup:
        lose_backup(rig)
    said = rig.cli("launch", "moss", "--set", "cloud.providers=fake", "--spend-limit", "5", "--one-guard", "--yes")
    assert [line.id for line in rig.world.cloud.bill() if line.kind == "instance"] == [instance], said.err
    assert f"A run named moss is already live: {NEW}" in said.err


def test_launch_is_refused_where_the_provider_of_a_lost_run_cannot_be_asked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.rent()
    home = rig.home
    rig.lose_ledger()
    lose_backup(rig)
    ready = LaunchOrder(
        run=make_run(rig.tmp_path),
        run_file_text="name: moss",
        is_prepared=True,
        offer=home.provider("fake").offers(Needs())[0],
        spend_limit_usd=Decimal(5),
    )
    be_silent(rig, monkeypatch)
    with pytest.raises(StillBilling, match="it may be billing") as refused:
        draft(ready, rig.home)
    assert "Could not query fake" in refused.value.why
    assert "homing adopt" in refused.value.fix
