"""`homing ledger`."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with

from homing.cloud.home import Home
from homing.cloud.ledger.ledger import AT_MOST, LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.config.home_and_run_files import PROJECT_NOTE
from homing.world import World

cli = cli_with(steps=4)


@pytest.mark.slow
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
    assert line["spend_usd"] == ledger["made_up_usd"]
    assert 0 < float(ledger["made_up_usd"]) < 0.02
    assert ledger["total_usd"] == "0"
    assert cli("ledger", "fern").code == 2


def test_every_verb_marks_an_upper_bound_of_dollars_as_one(cli: Homing, homing_home: Path) -> None:
    home = Home(homing_home, World())
    mark = make_mark(home.owner, "moss-1", 1)
    line = LedgerLine(mark, "moss-1", "moss", 1, "local", "this-computer", "3.6", "12", 1.0)
    home.ledger.intend(RunRow("moss-1", "moss", "failed", 1.0, "file:/nowhere", "f" * 64, "12"), line)
    home.ledger.close(mark, at=901.0, spend_usd=Decimal("0.90"), note=f"{AT_MOST}never seen at the provider")
    said = cli("ledger", "moss-1")
    assert said.out.count("at most $0.90") == 2, "the line and the total"
    assert "neither homing nor the provider knows when the instance ended" in said.err
    assert "at most $0.90" in cli("runs").out
    assert "at most $0.90" in cli("status", "moss-1").out
    document = cli("ledger", "--json").json
    assert (document["is_at_most"], document["lines"][0]["is_at_most"]) == (True, True)
    (run,) = cli("runs", "--json").json["runs"]
    assert run["is_at_most"]


def test_columns_add_up_and_a_difference_of_a_millionth_is_no_leak(cli: Homing, homing_home: Path) -> None:
    home = Home(homing_home, World())
    spends = {1: Decimal("0.0123401"), 2: Decimal("0.0100003")}
    home.ledger.intend(RunRow("moss-1", "moss", "done", 1.0, "file:/nowhere", "f" * 64, "12"), _line(home, 1))
    home.ledger.intend(RunRow("moss-1", "moss", "done", 1.0, "file:/nowhere", "f" * 64, "12"), _line(home, 2))
    for attempt, spend in spends.items():
        mark = _line(home, attempt).mark
        home.ledger.begin_create(mark, 1.0)
        home.ledger.close(mark, at=1.0 + float(spend) * 1000, spend_usd=spend, note="")
        home.ledger.note_bill(mark, spend - Decimal("0.000001"), 0.0)
    said = cli("ledger", "moss-1")
    first, second, total = said.out.strip().splitlines()[1:]
    assert first.split()[-4:] == ["$0.0124", "$0.0124", "under", "$0.0001"]
    assert second.split()[-4:] == ["$0.0101", "$0.0100", "under", "$0.0001"]
    assert total.split()[-1] == "$0.0225"
    assert "Counted by homing: $0.0225, reported by providers: $0.0224" in said.err
    assert cli("ledger", "--json").json["made_up_usd"] == "0.0223404", "to the last digit, for programs"


def test_made_up_dollars_are_not_added_to_real_ones(cli: Homing, homing_home: Path) -> None:
    home = Home(homing_home, World())
    for number, (provider, spend) in enumerate({"local": "5", "runpod": "0.25"}.items(), start=1):
        run_id = f"moss-{number}"
        mark = make_mark(home.owner, run_id, 1)
        line = LedgerLine(mark, run_id, "moss", 1, provider, "a-machine", "3.6", "12", float(number))
        home.ledger.intend(RunRow(run_id, "moss", "done", float(number), "file:/nowhere", "f" * 64, "12"), line)
        home.ledger.close(mark, at=901.0, spend_usd=Decimal(spend), note="")
    said = cli("ledger", "moss")
    *_, real, made_up = said.out.strip().splitlines()
    assert (real.split()[0], real.split()[-1]) == ("total", "$0.25")
    assert (made_up[:14], made_up.split()[-1]) == ("total, made up", "$5.00")
    assert "made up, and no one is billed" in said.err
    document = cli("ledger", "--json").json
    assert (document["total_usd"], document["made_up_usd"]) == ("0.25", "5")
    last = cli("ledger", "--last", "0")
    assert "$5.25" not in last.out
    assert "1 earlier line, closed, made up" in last.out
    assert cli("ledger", "--last", "0", "--json").json["total_usd"] == "0.25"


def test_a_name_does_not_include_its_runs_from_other_folders(cli: Homing, homing_home: Path, tmp_path: Path) -> None:
    home = Home(homing_home, World())
    for run_id, spend in (("moss-1", "3"), ("moss-2", "0.25")):
        mark = make_mark(home.owner, run_id, 1)
        line = LedgerLine(mark, run_id, "moss", 1, "runpod", "a-machine", "3.6", "12", 1.0)
        home.ledger.intend(RunRow(run_id, "moss", "done", 1.0, "file:/nowhere", "f" * 64, "12"), line)
        home.ledger.close(mark, at=901.0, spend_usd=Decimal(spend), note="")
    note = homing_home / "runs" / "moss-1" / PROJECT_NOTE
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps({"folder": str(tmp_path)}))
    said = cli("ledger", "moss")
    assert said.out.strip().splitlines()[-1].split()[-1] == "$0.25"
    assert "1 run of this name was started in other folders and not included: moss-1" in said.err
    document = cli("ledger", "moss", "--json").json
    assert (document["total_usd"], document["elsewhere"]) == ("0.25", ["moss-1"])
    assert cli("ledger", "--json").json["total_usd"] == "3.25"


def _line(home: Home, attempt: int) -> LedgerLine:
    mark = make_mark(home.owner, "moss-1", attempt)
    return LedgerLine(mark, "moss-1", "moss", attempt, "local", "this-computer", "3.6", "12", 1.0)


@pytest.mark.acceptance(128)
@pytest.mark.slow
def test_our_count_and_the_providers_stand_side_by_side_with_the_difference(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    said = cli("ledger", "moss")
    assert "provider bill" in said.out
    assert "reported by providers: $" in said.err
    assert "warning" not in said.err
    (line,) = cli("ledger", "--json").json["lines"]
    difference = Decimal(line["spend_usd"]) - Decimal(line["provider_usd"])
    assert abs(Decimal(line["difference_usd"]) - difference) <= Decimal("0.01")


@pytest.mark.acceptance(128)
@pytest.mark.slow
def test_a_bill_outside_the_promised_margin_is_reported(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    ledger = Home(homing_home, World()).ledger
    ledger.note_bill(ledger.lines()[0].mark, Decimal("7.00"), 0.0)
    said = cli("ledger", "moss")
    assert "provider reports $7.00, homing counted $0.0" in said.err
    assert "-$6.9" in said.out or "-$7.0" in said.out
