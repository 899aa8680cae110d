"""`homing plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing
from tests.doubles.shop import Shop, offer, open_shops


@pytest.fixture
def cli(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Homing]:
    lay_out(tmp_path, monkeypatch, steps=10, step_s=0.02)
    yield typing(capsys, monkeypatch)
    clear(homing_home)


def test_the_table_has_totals_offers_and_how_the_speed_is_known(cli: Homing) -> None:
    said = cli("plan", "moss")
    assert said.code == 0
    for word in ("tokens", "FLOPs", "checkpoint", "minimum spend", "local this-computer", "$0.36/h"):
        assert word in said.out
    assert "homing launch moss --spend-limit" in said.err


def test_json_is_one_document_with_a_schema(cli: Homing) -> None:
    plan = cli("plan", "moss", "--json").json
    assert plan["schema"] == "homing.plan/1"
    assert plan["num_steps"] == 20
    assert plan["offers"][0]["speed_source"] in ("probed", "assumed", "measured")
    assert float(plan["minimum_spend_usd"]) > 0


def test_the_newest_run_file_is_planned_when_none_is_named(cli: Homing) -> None:
    assert cli("plan", "--json").json["run"] == "moss"


def test_resolved_shows_every_value_and_where_it_came_from(cli: Homing) -> None:
    said = cli("plan", "moss", "--resolved", "--set", "phases.0.steps=7")
    assert "model.width" in said.out
    assert "run file, line" in said.out
    assert "--set" in next(line for line in said.out.splitlines() if line.startswith("phases.0.num_steps"))
    document = cli("plan", "moss", "--resolved", "--json").json
    assert document["run"]["model"]["width"] == 64
    assert document["origin"]


def test_a_schedule_longer_than_its_limits_is_warned_of(cli: Homing) -> None:
    said = cli("plan", "moss", "--set", "limits.spend=$0.03", "--set", "phases.0.steps=100000000")
    assert "longer than the money" in said.err


def test_a_run_file_that_is_not_there_exits_2(cli: Homing) -> None:
    said = cli("plan", "fern")
    assert said.code == 2
    assert "Traceback" not in said.err


def test_planning_loads_no_torch(cli: Homing) -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.argv = ['homing', 'plan', 'moss', '--json']\n"
        "from homing.cli import main\n"
        "try: main.main()\n"
        "except SystemExit as e: assert not e.code\n"
        "print('LOADED', [m for m in ('torch', 'numpy', 'homing.lm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "LOADED []" in done.stdout, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["run"] == "moss"


def test_two_offers_are_compared_and_the_cheapest_to_finish_is_recommended(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = [offer("T4", rate="0.50"), offer("H100", rate="3.00", as_of=0.0), offer("L4", rate="0.10", disk_bytes=1)]
    open_shops(monkeypatch, local=Shop(offers))
    long = ["--set", "phases.0.steps=1000000000", "--set", "checkpoint.every=100000000"]
    said = cli("plan", "moss", *long)
    assert "Cheapest to finish: local 1x_h100" in said.err
    assert "local 1x_t4 would cost $" in said.err
    assert "left out: local 1x_l4 (1x L4, $0.10/h) has 1 B of" in said.err
    assert "rate of 1970-01-01" in said.out
    phases = said.out[said.out.index("Where time and dollars go") :]
    assert [line.split()[0] for line in phases.splitlines()[1:]] == ["phase", "boot", "pretrain", "home", "all"]
    document = cli("plan", "moss", "--json", *long).json
    best, other = document["offers"]
    assert float(best["more_usd"]) == 0
    assert Decimal(other["more_usd"]) == Decimal(other["cost_usd"]) - Decimal(best["cost_usd"])
    assert [part["name"] for part in best["phases"]] == ["boot and start", "pretrain", "home"]
    assert document["left_out"][0]["why"].startswith("has 1 B")


def test_the_limit_it_names_is_not_below_its_own_worst_case(cli: Homing) -> None:
    said = cli("plan", "moss", "--json")
    worst = Decimal(said.json["offers"][0]["worst_usd"])
    named = Decimal(cli("plan", "moss").err.split("--spend-limit ")[-1].split()[0])
    assert named >= worst


def test_the_next_command_names_the_run_as_it_was_named(cli: Homing) -> None:
    Path("fern.yaml").write_text(Path("runs/moss.yaml").read_text())
    said = cli("plan", "fern.yaml", "--set", "phases.0.steps=12")
    assert "Next: homing launch fern.yaml --set phases.0.steps=12 --spend-limit" in said.err
    said = cli("plan", "fern.yaml", "--set", "data.dir=data/none")
    assert "homing prep fern.yaml --set data.dir=data/none" in said.out


def test_text_that_is_not_there_is_said_and_prep_comes_next(cli: Homing) -> None:
    Path("runs/fern.yaml").write_text(Path("runs/moss.yaml").read_text().replace("moss", "fern"))
    said = cli("plan", "fern")
    assert "warning: data.text: there is no file or folder 'fern.txt'" in said.err
    assert "Next: homing prep fern" in said.err
