"""`homing ledger`."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing

from homing.cloud.home import Home
from homing.world import World


@pytest.fixture
def cli(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Homing]:
    lay_out(tmp_path, monkeypatch, steps=4, step_s=0.02)
    yield typing(capsys, monkeypatch)
    clear(homing_home)


def test_the_receipt_and_the_total_are_there_after_the_run(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    said = cli("ledger", "moss")
    assert said.out.strip().splitlines()[-1].startswith("total")
    assert "gone" in said.out
    ledger = cli("ledger", "--json").json
    assert ledger["schema"] == "homing.ledger/1"
    (line,) = ledger["lines"]
    assert line["schema"] == "homing.ledger-line/1"
    assert line["spend_usd"] == ledger["total_usd"]
    assert 0 < float(ledger["total_usd"]) < 0.02
    assert cli("ledger", "fern").code == 2


@pytest.mark.slow
def test_our_count_and_the_providers_stand_side_by_side_with_the_difference(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    said = cli("ledger", "moss")
    assert "theirs" in said.out
    assert "by the providers' own $" in said.err
    assert "warning" not in said.err
    (line,) = cli("ledger", "--json").json["lines"]
    difference = Decimal(line["spend_usd"]) - Decimal(line["provider_usd"])
    assert abs(Decimal(line["difference_usd"])) <= Decimal("0.01") + abs(difference)


@pytest.mark.slow
def test_a_bill_that_is_further_from_ours_than_we_promise_is_said_aloud(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    ledger = Home(homing_home, World()).ledger
    ledger.note_bill(ledger.lines()[0].mark, Decimal("7.00"), 0.0)
    said = cli("ledger", "moss")
    assert "the provider says $7.00, we count $0.0" in said.err
    assert "-$6.9" in said.out or "-$7.0" in said.out
