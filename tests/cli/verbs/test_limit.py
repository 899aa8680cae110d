"""`homing limit`: old -> new, and whether the agent has confirmed it."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with

from homing.cloud.ledger.ledger import SILENT, Ledger
from homing.doctor.check import Balance
from homing.world import World

say = cli_with(steps=100_000)


@pytest.mark.slow
@pytest.mark.acceptance("X21")
def test_it_says_old_new_and_worst_case_and_waits_for_the_agent(say: Homing) -> None:
    assert say("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    said = say("limit", "moss", "--spend", "3", "--time", "9h")
    assert said.code == 0
    assert "$1.00 -> $3.00, time no limit -> 9h00m" in said.out
    assert "worst case $3.00" in said.out
    assert "The agent confirmed the new limit." in said.err
    again = say("limit", "moss", "--spend", "2", "--json").json
    assert (again["old_usd"], again["new_usd"], again["is_confirmed"]) == ("3", "2", True)
    assert say("status", "moss", "--json").json["spend_limit_usd"] == "2"


@pytest.mark.slow
def test_a_raised_limit_above_the_known_balance_is_a_warning(say: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    balance = Balance(Decimal("4.99"), Decimal(0))
    monkeypatch.setattr("homing.cloud.providers.local.provider.Local.balance", lambda self: balance, raising=False)
    assert say("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    raised = say("limit", "moss", "--spend", "6")
    assert raised.code == 0
    assert re.search(r"warning: \$4\.99 left at local; this run may cost \$(6\.00|5\.99)\.", raised.err), raised.err
    assert "left at" not in say("limit", "moss", "--spend", "5.50").err, "it is lower, so it needs no funds"
    balance = Balance(Decimal("0.05"), Decimal(0))
    assert "$0.05 left at local" in say("limit", "moss", "--spend", "6", "--time", "1h").err, "one of two is raised"


@pytest.mark.parametrize("spend", ["1e30", "9e99999999"])
def test_an_enormous_limit_is_refused_in_words(say: Homing, spend: str) -> None:
    said = say("limit", "moss", "--spend", spend)
    assert said.code == 2
    assert "the maximum is $1,000,000,000.00" in said.err


@pytest.mark.slow
@pytest.mark.parametrize("argv", [("--spend", "0"), ("--spend", "lots"), ("--time", "soon"), ()])
def test_what_is_no_limit_is_refused(say: Homing, argv: tuple[str, ...]) -> None:
    assert say("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    assert say("limit", "moss", *argv).code == 2


@pytest.mark.slow
def test_limit_of_an_ended_run_prints_how_to_resume(say: Homing) -> None:
    assert say("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    assert say("destroy", "moss", "--yes").code == 0
    said = say("limit", "moss", "--spend", "3")
    assert said.code == 2
    assert re.search(r"homing launch moss-\S+ --resume --spend-limit 3\.00", said.err)


def test_limit_of_a_run_that_a_guard_may_relaunch_says_who_uses_the_new_limit(say: Homing) -> None:
    assert say("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    assert say("destroy", "moss", "--yes").code == 0
    ledger = Ledger(Path(os.environ["HOMING_HOME"]) / "ledger.sqlite", World())
    ledger.set_run(ledger.find("moss").id, state="failed", reason=SILENT)
    said = say("limit", "moss", "--spend", "3")
    assert said.code == 0
    assert "The run has no instance now" in said.err
    assert "obeys" not in said.err
    assert ledger.find("moss").spend_limit_usd == "3"


@pytest.mark.parametrize("typed", ["0.12", "$3"])
def test_a_bare_sum_is_answered_with_the_flag_that_it_needs(say: Homing, typed: str) -> None:
    said = say("limit", "moss", typed, "--json")
    assert said.code == 2
    assert said.json["fix"] == f"homing limit moss --spend {typed.removeprefix('$')}"


def test_the_flag_of_launch_means_the_same_here(say: Homing) -> None:
    assert "has not been launched yet" in say("limit", "moss", "--spend-limit", "3").err
