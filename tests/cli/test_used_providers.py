"""A provider that was used once and whose key is not set any more: when commands warn of it and when not."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with

from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.world import World

cli = cli_with(steps=4)


def used_before(homing_home: Path, *, is_open: bool) -> str:
    """Write a run on RunPod to the ledger; the key is not set any more."""
    home = Home(homing_home, World())
    mark = make_mark(home.owner, "fern-1", 1)
    line = LedgerLine(mark, "fern-1", "fern", 1, "runpod", "RTX 4090", "0.69", "5", 1.0)
    home.ledger.intend(RunRow("fern-1", "fern", "done", 1.0, f"file:{homing_home}/store", "f" * 64, "5"), line)
    home.ledger.begin_create(mark, 1.0)
    home.ledger.update(mark, instance_id="pod-1", state="running", billing="yes")
    if not is_open:
        home.ledger.close(mark, at=901.0, spend_usd=Decimal("0.17"), note="")
    return mark


@pytest.mark.parametrize("verb", [("ledger",), ("status", "fern-1"), ("runs",), ("launch", "moss", "--dry-run")])
def test_without_its_key_a_provider_where_all_has_ended_is_not_warned_of(
    cli: Homing, homing_home: Path, verb: tuple[str, ...]
) -> None:
    used_before(homing_home, is_open=False)
    more = ["--spend-limit", "1"] if verb[0] == "launch" else []
    said = cli(*verb, *more)
    assert said.code == 0, said.err
    assert "Could not query runpod" not in said.err
    if verb == ("runs",):
        assert "Nothing is known to be billing." in said.err
        assert "Not checked, because it is not set up here: runpod. See: homing doctor" in said.err


@pytest.mark.parametrize("verb", [("ledger",), ("status", "fern-1"), ("runs",)])
def test_where_an_instance_may_be_billing_every_command_warns(
    cli: Homing, homing_home: Path, verb: tuple[str, ...]
) -> None:
    used_before(homing_home, is_open=True)
    assert "Could not query runpod, so its instances may be billing" in cli(*verb).err


def test_reconcile_says_what_it_could_not_check(cli: Homing, homing_home: Path) -> None:
    used_before(homing_home, is_open=False)
    said = cli("reconcile")
    assert "Could not query runpod" in said.out + said.err


@pytest.mark.parametrize(("is_open", "words"), [(False, "everything ended"), (True, "1 instance in the ledger is")])
def test_doctor_names_a_used_provider_without_a_key(cli: Homing, homing_home: Path, is_open: bool, words: str) -> None:
    used_before(homing_home, is_open=is_open)
    said = cli("doctor", "--json")
    (check,) = [each for each in said.json["checks"] if each["name"] == "runpod.key"]
    assert check["state"] == ("fault" if is_open else "warning")
    assert "Runs were launched there before" in check["text"]
    assert words in check["text"]
