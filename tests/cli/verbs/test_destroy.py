"""`homing destroy`: asks only if something would be lost, and is loud when it is not sure."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with
from tests.cloud.fake_world import KEY, FakeWorld
from tests.cloud.rig import forget

from homing.api.lookup.find_runs import usd
from homing.api.runs.end_runs import Ended, destroy_made, destroy_named, find_resources
from homing.cli.verbs.destroy import _show
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import PREEMPTED, LedgerLine, RunRow
from homing.cloud.providers.base import Resource
from homing.cloud.providers.fake.cloud import KEY_HEADER
from homing.cloud.providers.local.provider import Local
from homing.errors import IntegrityError, ProviderSilent, StillBilling, UsageError
from homing.world import HttpRequest, HttpResponse, NetworkError, World

cli = cli_with(steps=100000)


def yes(question: str) -> bool:
    return True


@pytest.mark.acceptance(137)
def test_it_asks_when_something_would_be_lost_and_ends_it_with_yes(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    refused = cli("destroy", "moss")
    assert refused.code == 2
    assert "not pushed" in refused.err
    said = cli("destroy", "moss", "--yes", "--json")
    assert said.code == 0, said.err
    (receipt,) = said.json["receipts"]
    assert (receipt["billing"], receipt["state"]) == ("no", "gone")
    assert float(receipt["spend_usd"]) > 0
    again = cli("destroy", "moss")
    assert again.code == 0
    assert "nothing is billing" in again.err


def test_it_does_not_say_that_nothing_is_billing_if_a_provider_could_not_be_queried(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> list[object]:
        raise ProviderSilent("local does not respond.")

    cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert cli("destroy", "moss", "--yes").code == 0
    with monkeypatch.context() as patched:
        patched.setattr(Local, "list_owned", silent)
        patched.setattr(Local, "list_resources", silent)
        one, everything = cli("destroy", "moss"), cli("destroy", "--all", "--yes")
    for said in (one, everything):
        assert "nothing is billing" not in said.err
        assert "No known instance was running." in said.err
        assert said.err.count("local does not respond") >= 1
    assert one.code == 0, "its instance is confirmed to be gone"
    assert everything.code == 6
    assert "something may still be billing" in everything.err
    assert "homing destroy --all   once the provider responds again" in everything.err


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["moss", "runs/moss.yaml"])
def test_a_ledger_that_cannot_be_updated_does_not_keep_a_machine_billing(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    def full(home: object) -> list[str]:
        raise IntegrityError("The ledger cannot be used.")

    cli("launch", "moss", "--spend-limit", "1", "--yes")
    monkeypatch.setattr("homing.api.runs.end_runs.refresh", full)
    monkeypatch.setattr("homing.cloud.reconcile.inventory.refresh", full)
    said = cli("destroy", typed, "--yes")
    assert said.code == 0, said.err
    assert "The ledger cannot be used" in said.err
    assert "Destroyed, including volumes and keys, and confirmed" in said.err


def test_a_word_that_may_be_a_volume_at_a_provider_who_cannot_be_asked_may_bill(
    homing_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    world = FakeWorld()

    def cut(request: HttpRequest) -> HttpResponse:
        raise NetworkError("no route")

    home = Home(homing_home, world)
    assert find_resources(home, "v-000002") == []
    monkeypatch.setattr(world, "http", cut)
    with pytest.raises(StillBilling, match="could not check whether"):
        find_resources(home, "v-000002")


def test_a_word_for_the_account_that_cannot_be_asked_keeps_no_machine_billing(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(self: object) -> str:
        raise ProviderSilent("It did not answer.")

    cli("launch", "moss", "--spend-limit", "1", "--yes")
    monkeypatch.setattr(Local, "account", silent)
    said = cli("destroy", "moss", "--same-account", "--yes")
    assert said.code == 0, said.err
    assert "Destroyed, including volumes and keys, and confirmed" in said.err


def test_it_never_guesses(cli: Homing) -> None:
    assert cli("destroy").code == 2
    assert cli("destroy", "moss", "--all").code == 2
    assert cli("destroy", "absent").code == 2
    refused = cli("destroy", "moss", "--kept")
    assert refused.code == 2
    assert "--kept needs --all" in refused.err


@pytest.mark.acceptance(140)
@pytest.mark.slow
def test_all_ends_everything_also_what_no_run_knows(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    forget(homing_home)
    forgotten = cli("runs", "--json").json["forgotten"]
    assert len(forgotten) == 1
    said = cli("destroy", "--all", "--yes", "--json")
    assert said.code == 0, said.err
    assert [line["mark"] for line in said.json["receipts"]] == [forgotten[0]["mark"]]
    assert cli("runs", "--json").json["billing"] == []


def test_all_also_ends_the_wait_for_a_next_machine(cli: Homing, homing_home: Path) -> None:
    # "Nothing was running", it said, and a guard rented the next one.
    started = cli("launch", "moss", "--spend-limit", "1", "--yes", "--json").json
    assert cli("destroy", "moss", "--yes").code == 0
    ledger = Home(homing_home, World()).ledger
    ledger.set_run(started["run"], state="stopped", reason=f"{PREEMPTED}its owner took it", exit_code=1)
    assert cli("destroy", "--all", "--yes").code == 0
    row = ledger.run(started["run"])
    assert row is not None
    assert row.reason == "destroyed manually"


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["pipe", "full"])
def test_destroy_works_with_a_closed_output(cli: Homing, homing_home: Path, stream: str) -> None:
    # `homing destroy moss --yes 2>&1 | head -1`: a word before the end found the pipe closed, and nothing was ended.
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    reader, writer = os.pipe()
    os.close(reader)
    broken = writer if stream == "pipe" else os.open("/dev/full", os.O_WRONLY)
    argv = [sys.executable, "-m", "homing.cli", "destroy", "moss", "--yes", "--json"]
    try:
        done = subprocess.run(argv, stdout=broken, stderr=broken, check=False)
    finally:
        for each in {writer, broken}:
            os.close(each)
    assert done.returncode == 0
    assert Home(homing_home, World()).provider("local").list_owned() == []


@pytest.mark.acceptance("P1")
def test_an_end_that_is_not_confirmed_exits_6_and_every_later_verb_says_so(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    from homing.cloud.providers.local.provider import Local

    monkeypatch.setattr("homing.cloud.ledger.meter.FREE_PROVIDERS", frozenset())  # treat it as a rented machine
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    monkeypatch.setattr(Local, "destroy", lambda self, instance_id: None)
    monkeypatch.setattr("homing.api.runs.end_runs.destroy_run", lambda home, row: fast_destroy(home, row))
    said = cli("destroy", "moss", "--yes")
    assert said.code == 6
    assert "$0.36/h" in said.err
    assert "homing destroy moss-" in said.err
    for verb in (["status"], ["runs"], ["ledger"], ["explain", "model.depth"], ["fetch", "absent"]):
        later = cli(*verb)
        assert later.code == 6, verb
        assert later.err.count("error: 1 instance may still be billing") == 1
    assert "Unknown run: 'absent'" in later.err  # what went wrong itself is not hidden by it
    assert cli("--version").code == 0
    monkeypatch.undo()


def fast_destroy(home: object, row: object) -> object:
    from homing.cloud.destroy import destroy_run

    return destroy_run(home, row, deadline_s=0.1)  # type: ignore[arg-type]


class TestThings:
    """Resources other than instances, with --all."""

    @pytest.fixture
    def home(self, homing_home: Path) -> Home:
        home = Home(homing_home, FakeWorld())
        for mark in (f"homing-{home.owner}-old-1", f"homing-{home.owner}-moss-volume"):
            body = json.dumps({"name": mark, "size_gb": 10}).encode()
            home.world.http(HttpRequest("POST", "https://cloud.test/volumes", {KEY_HEADER: KEY}, body))
        return home

    @pytest.fixture(autouse=True)
    def _one_is_kept(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        provider = home.provider("fake")
        real = provider.list_resources

        def listed() -> list[Resource]:
            return [dataclasses.replace(each, is_kept=each.mark.endswith("-volume")) for each in real()]

        monkeypatch.setattr(provider, "list_resources", listed)

    @pytest.mark.acceptance(136)
    def test_all_of_it_goes_after_asking_for_what_is_kept(self, home: Home) -> None:
        assert destroy_made(home, yes, kept=True) == ([], [])
        assert home.provider("fake").list_resources() == []

    @pytest.mark.acceptance(136)
    def test_a_kept_volume_survives_all_with_yes_and_its_rate_and_command_are_printed(
        self, home: Home, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (left,), _ = destroy_made(home, yes, kept=False)
        assert left.kind == "kept"
        assert [each.mark for each in home.provider("fake").list_resources()] == [left.mark]
        _show(Ended(left=[left]))
        said = capsys.readouterr().err
        assert left.rate_usd_per_hour > 0
        rate = usd(left.rate_usd_per_hour)
        assert (
            f"Still exists: fake volume {left.id}, marked to be kept, {rate}/h. Destroy it: homing destroy {left.id}"
            in said
        )
        assert "nothing is billing" not in said

    def test_one_thing_goes_by_its_id_and_a_word_that_a_run_has_means_the_run(self, home: Home) -> None:
        (volume,) = [each for each in home.provider("fake").list_resources() if each.is_kept]
        assert find_resources(home, "no-such-thing") == []
        run = RunRow(volume.id, "moss", "launching", 1.0, "file:x", "0" * 64)
        found = find_resources(home, volume.id)
        assert [(each.id, each.kind) for each in found] == [(volume.id, "kept")]
        home.ledger.intend(run, LedgerLine("m", run.id, "moss", 1, "fake", "cpu", "1", "1", intent_at=1.0))
        assert find_resources(home, volume.id) == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(home.provider("fake"), "destroy_resource", lambda resource: None)
            stuck = destroy_named(home, found, yes).error
        assert isinstance(stuck, StillBilling)
        assert "still exists" in stuck.what
        assert stuck.fix == f"homing destroy {volume.id}"
        assert destroy_named(home, found, yes).error is None
        assert volume.id not in [each.id for each in home.provider("fake").list_resources()]

    def test_what_a_living_instance_uses_is_refused_with_what_ends_that(self, home: Home) -> None:
        mark = f"homing-{home.owner}-old-1"
        run = RunRow("old", "old", "launching", 1.0, "file:x", "0" * 64)
        home.ledger.intend(run, LedgerLine(mark, "old", "old", 1, "fake", "cpu", "1", "1", intent_at=1.0))
        home.ledger.begin_create(mark, home.world.now())
        (volume,) = [each for each in home.provider("fake").list_resources() if each.mark == mark]
        with pytest.raises(UsageError, match="is in use") as caught:
            find_resources(home, volume.id)
        assert caught.value.fix.startswith("homing destroy old ")

    @pytest.mark.acceptance(136)
    def test_a_volume_that_the_user_keeps_stays_and_is_reported(self, home: Home) -> None:
        (left,), _ = destroy_made(home, lambda question: False, kept=True)
        assert left.kind == "kept"
        assert [each.mark for each in home.provider("fake").list_resources()] == [left.mark]

    def test_a_resource_that_cannot_be_removed_is_reported(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(home.provider("fake"), "destroy_resource", lambda resource: None)
        assert len(destroy_made(home, yes, kept=True)[0]) == 2


@pytest.mark.acceptance(136)
@pytest.mark.slow
def test_stored_models_go_only_when_asked_for_and_agreed_to(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert cli("destroy", "moss", "--yes").code == 0
    (run,) = Home(homing_home, World()).ledger.runs()
    folder = Path(run.store.removeprefix("file:")) / "runs" / run.id
    stored = [path for path in folder.rglob("*") if path.is_file()]
    assert stored
    refused = cli("destroy", "moss", "--stored")
    assert refused.code == 2
    assert "including its model?" in refused.err
    assert all(path.exists() for path in stored)
    assert cli("destroy", "moss", "--stored", "--yes").code == 0
    assert not [path for path in stored if path.exists()]


@pytest.mark.acceptance(136)
@pytest.mark.regression("stored-removal")
def test_destroy_names_what_it_removed_from_the_store_and_no_verb_restores_the_record(
    cli: Homing, homing_home: Path
) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    said = cli("destroy", "moss", "--stored", "--yes")
    (run,) = Home(homing_home, World()).ledger.runs()
    assert f"Removed from {run.store}: " in said.err
    assert f" of {run.id}, " in said.err
    for verb in (["destroy", "moss", "--yes"], ["runs"], ["limit", "moss", "--spend", "2"], ["reconcile"], ["status"]):
        cli(*verb)
        folder = Path(run.store.removeprefix("file:")) / "runs" / run.id
        assert [path.name for path in folder.rglob("*") if path.is_file()] == [], verb
    again = cli("destroy", "moss", "--stored", "--yes", "--json")
    assert again.json["removed"] == {}
    assert f"{run.store} has no files for {run.id}." in cli("destroy", "moss", "--stored", "--yes").err
