"""What a person types about machines at a cloud: the list of what bills, with dollars, and the end of one by its id."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from tests.cli.control_rig import Homing, typing
from tests.contracts.providers import ProviderContract
from tests.doubles.runpod_world import RunpodWorld

from homing.cloud.home import Home
from homing.cloud.ledger.mark import make_mark, owner_prefix
from homing.cloud.ledger.meter import show_usd
from homing.cloud.providers.runpod.provider import Runpod
from homing.cloud.providers.runpod.storage import make_volume


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> RunpodWorld:
    found = RunpodWorld()
    monkeypatch.setattr("homing.api.lookup.find_runs.World", lambda: found)
    return found


@pytest.fixture
def cli(world: RunpodWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Homing:
    return typing(capsys, monkeypatch)


def rent(world: RunpodWorld, homing_home: Path, tmp_path: Path, number: int) -> str:
    """A pod of ours that no ledger of this home knows; its id."""
    home = Home(homing_home, world)
    mark = make_mark(home.owner, f"moss-{number}", 1)
    folder = tmp_path / str(number)
    folder.mkdir()
    request = ProviderContract().make_request(home.provider("runpod"), mark, folder)
    return home.provider("runpod").create(request).id


def keep_a_volume(world: RunpodWorld, homing_home: Path) -> str:
    home = Home(homing_home, world)
    runpod = cast(Runpod, home.provider("runpod"))
    name = f"{owner_prefix(home.owner)}books"
    return make_volume(runpod._api, name, 1000, "EU-RO-1", settle_s=0.0).id


@pytest.mark.acceptance(121)
def test_pods_are_listed_with_their_state_and_what_each_has_cost(
    cli: Homing, world: RunpodWorld, homing_home: Path, tmp_path: Path
) -> None:
    ids = [rent(world, homing_home, tmp_path, number) for number in (1, 2)]
    cli("runs")  # from here on the ledger knows them
    world.pass_time(3600.0)
    said = cli("runs")
    rows = [line for line in said.out.splitlines() if any(pod in line for pod in ids)]
    assert len(rows) == 2
    assert all("ready" in row and "yes" in row for row in rows), rows
    billed = min(line.usd for line in world.cloud.bill())
    assert billed > 0
    assert all(show_usd(billed) in row for row in rows), (billed, rows)
    assert "2 instances may still be billing" in said.err


@pytest.mark.acceptance(127)
def test_a_volume_that_bills_with_no_instance_left_is_no_nothing(
    cli: Homing, world: RunpodWorld, homing_home: Path
) -> None:
    volume = keep_a_volume(world, homing_home)
    said = cli("runs")
    assert volume in said.out
    assert "Nothing is billing" not in said.err
    assert "other resource billed at" in said.err
    (thing,) = cli("runs", "--json").json["things"]
    assert (thing["provider"], thing["id"]) == ("runpod", volume)
    assert float(thing["rate_usd_per_hour"]) > 0.05


@pytest.mark.acceptance(137)
def test_one_of_two_is_ended_by_its_id_and_its_end_is_confirmed(
    cli: Homing, world: RunpodWorld, homing_home: Path, tmp_path: Path
) -> None:
    first, second = (rent(world, homing_home, tmp_path, number) for number in (1, 2))
    said = cli("destroy", first)
    assert said.code == 0, said.err
    assert first in said.out
    assert [pod for pod in (first, second) if pod in world.pods.running] == [second]
    assert [line["instance_id"] for line in cli("runs", "--json").json["billing"]] == [second]
    assert cli("destroy", "pod-that-never-was").code == 2
