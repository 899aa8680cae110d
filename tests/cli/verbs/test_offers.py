"""`homing offers`."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, typing
from tests.cloud.shop import Shop, offer, open_shops

from homing.cli.verbs.offers import HEADERS, row_of
from homing.errors import ProviderRefused
from homing.world import Retries


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Homing:
    monkeypatch.chdir(tmp_path)
    return typing(capsys, monkeypatch)


def sell(monkeypatch: pytest.MonkeyPatch) -> None:
    b200 = [
        offer("B200", 8, "38.40", cloud="tensordock", region="us-east", nvlink=False),
        offer("B200", 8, "33.60", cloud="hyperstack", region="canada-1", nvlink=True, stock="low"),
        offer("B200", 1, "4.20", cloud="hyperstack", region="canada-1"),
    ]
    typed = offer("B200", 8, "50.00", as_of=time.time() - 86400 * 3, rate_source="copied from a page", is_spot=True)
    open_shops(monkeypatch, north=Shop(b200), south=Shop([typed]))


@pytest.mark.acceptance(49, 129)
def test_the_table_has_the_columns_people_know_and_the_lowest_rate_first(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(monkeypatch)
    said = cli("offers", "--gpu", "B200", "--num-gpus", "8")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0] == "Available B200 Instances (sorted by price)"
    assert lines[1].split()[:7] == ["#", "Provider", "Region", "GPUs", "VRAM", "Price/hr", "NVLink"]
    assert lines[2].split()[:8] == ["1", "north/hyperstack", "canada-1", "8x", "B200", "180GB", "$33.60", "Yes"]
    assert "stock low" in lines[2]
    assert lines[3].split()[-3:-1] == ["$38.40", "No"]
    assert len(lines) == 5
    assert "homing plan" in said.err


def test_a_cached_rate_shows_its_age_and_source(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    sell(monkeypatch)
    last = cli("offers", "--gpu", "B200", "--num-gpus", "8").out.splitlines()[-1]
    assert "spot" in last
    assert "3d00h old copied from a page" in last
    bodies = cli("offers", "--gpu", "B200", "--num-gpus", "8", "--json").json["offers"]
    assert [body["rate_age_s"] > 86400 for body in bodies] == [False, False, True]


@pytest.mark.acceptance(51)
def test_all_configurations_are_shown_when_asked(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    sell(monkeypatch)
    document = cli("offers", "--gpu", "B200", "--all-configs", "--json").json
    assert document["schema"] == "homing.offers/1"
    assert [body["num_gpus"] for body in document["offers"]] == [1, 8, 8, 8]


def test_only_the_providers_that_were_named_are_asked(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    sell(monkeypatch)
    bodies = cli("offers", "--gpu", "B200", "--num-gpus", "8", "--provider", "south", "--json").json["offers"]
    assert {body["provider"] for body in bodies} == {"south"}
    assert cli("offers", "--provider", "nowhere").code == 2


@pytest.mark.acceptance(51)
def test_an_unknown_card_exits_2_and_lists_the_known_ones(cli: Homing) -> None:
    said = cli("offers", "--gpu", "H9000")
    assert said.code == 2
    assert "RTX4090" in said.err


@pytest.mark.acceptance(49)
def test_a_dead_provider_is_a_warning_and_none_at_all_is_exit_3(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(monkeypatch, north=Shop(error=ProviderRefused("north is down.")), south=Shop([offer()]))
    said = cli("offers", "--gpu", "H100")
    assert said.code == 0
    assert "warning: Could not query north: north is down." in said.err
    none = cli("offers", "--gpu", "T4")
    assert none.code == 3
    assert "No provider currently offers 1x T4." in none.err
    assert "homing offers --all-configs   or use another GPU: --gpu" in none.err
    assert "north is down." in none.err, "a provider that could not be asked is named here too"
    assert "Queried: north, south." in none.err


def test_this_computer_is_an_offer_too_and_nothing_is_written(cli: Homing, homing_home: Path) -> None:
    (body,) = cli("offers", "--json").json["offers"]
    assert body["provider"] == "local"
    assert not (homing_home / "ledger.sqlite").exists()


@pytest.mark.parametrize("number", ["0", "-1"])
def test_no_cards_is_no_number_of_cards(cli: Homing, number: str) -> None:
    assert cli("offers", "--num-gpus", number).code == 2


def test_a_cloud_with_keys_but_without_setup_is_skipped_with_a_note(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be the keys of a bucket."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    assert "AWS has an API key but is not set up yet: homing setup aws" in cli("offers").err


def test_who_was_not_asked_for_want_of_a_key_is_named(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNPOD_API_KEY", "SHADEFORM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    said = cli("offers")
    assert said.code == 0
    assert re.search(r"Skipped, no API key: .*runpod", said.err)
    none = cli("offers", "--gpu", "H100")
    assert none.code == 3
    assert re.search(r"Skipped, no API key: .*runpod", none.err)
    assert "fix homing setup runpod" in none.err


def test_a_provider_that_cannot_be_reached_is_said_without_a_word_of_what_bills(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same silence does leave in doubt what bills when `runs` asks; for offers nothing was rented."""
    monkeypatch.setenv("RUNPOD_API_KEY", "none")
    monkeypatch.setenv("RUNPOD_API_URL", "http://127.0.0.1:9/v2")  # a closed port
    monkeypatch.setattr("homing.cloud.providers.rest.RETRIES", Retries(tries=4, first_s=0.01, longest_s=60.0))
    alone = cli("offers", "--provider", "runpod")
    both = cli("offers", "--provider", "runpod", "--provider", "local")
    assert (alone.code, both.code) == (4, 0)
    for said in (alone, both):
        assert "runpod is not responding" in said.err
        assert "refused" in said.err
        assert "homing doctor" in said.err
        assert "bill" not in said.err
    assert "so its instances may be billing" in cli("reconcile").err


def test_the_memory_of_a_computer_without_a_card_is_not_called_vram() -> None:
    offer_here = dataclasses.replace(offer("CPU", 0, "0.00"), num_cores=4, memory_bytes=16 * 2**30)
    row = row_of(1, offer_here)
    assert row[HEADERS.index("VRAM")] == "-"
    assert row[HEADERS.index("GPUs")] == "4 cores, 16GB RAM"
