"""`homing plan`."""

from __future__ import annotations

import dataclasses
import json
import re
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with
from tests.cloud.shop import Shop, offer, open_shops

from homing.cloud.home import Home
from homing.cloud.ledger.meter import cost
from homing.cloud.plan.measured_speeds import LearnedRow, load_table
from homing.cloud.providers.fixed_prices import find_price
from homing.doctor.check import Balance
from homing.world import World

cli = cli_with(steps=10)


def test_the_table_has_totals_offers_and_how_the_speed_is_known(cli: Homing) -> None:
    said = cli("plan", "moss")
    assert said.code == 0
    for word in ("tokens", "FLOPs", "checkpoint", "minimum spend", "local this-computer", "$0.36/h"):
        assert word in said.out
    assert "homing launch moss --spend-limit" in said.err


@pytest.mark.parametrize("sign", ["its smoke run has not passed yet", "the maximum is 100"])
def test_what_launch_refuses_is_said_in_the_same_words_and_not_recommended(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    is_large = "smoke" in sign
    monkeypatch.setattr("homing.api.runs.refused_launch.needs_smoke_first", lambda run: is_large)
    typed = ["moss", *([] if is_large else ["--set", "phases.0.steps=20000"])]
    said = cli("plan", *typed)
    assert said.code == 0
    assert "`homing launch` refuses this run." in said.err
    assert "Next: homing" not in said.err
    refused = cli("launch", *typed, "--spend-limit", "900", "--yes")
    assert refused.code == 2
    assert sign in said.err
    assert sign in refused.err
    listed = cli("plan", *typed, "--json").json["refused"]
    assert [each["kind"] for each in listed] == ["no-smoke" if is_large else "many-passes"]


def test_a_limit_that_the_balance_does_not_cover_is_not_recommended(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    balance = Balance(Decimal("0.001"), Decimal(0))
    monkeypatch.setattr("homing.cloud.providers.local.provider.Local.balance", lambda self: balance, raising=False)
    said = cli("plan", "moss")
    assert "$0.0010 left at local; this run may cost" in said.err
    assert "homing launch moss" not in said.err


def test_a_store_that_the_best_offer_cannot_reach_is_said_instead_of_a_launch_command(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "homing.cloud.providers.local.provider.Local.cannot", {"file_store": "It is far away."}, raising=False
    )
    said = cli("plan", "moss")
    assert "cannot reach file:" in said.err
    assert "Next: homing launch" not in said.err


def test_json_is_one_document_with_a_schema(cli: Homing) -> None:
    plan = cli("plan", "moss", "--json").json
    assert plan["schema"] == "homing.plan/1"
    assert plan["num_steps"] == 20
    assert plan["offers"][0]["speed_source"] in ("probed", "assumed", "measured")
    assert float(plan["minimum_spend_usd"]) > 0


@pytest.mark.acceptance(85)
def test_the_newest_run_file_is_planned_when_none_is_named(cli: Homing) -> None:
    assert cli("plan", "--json").json["run"] == "moss"


@pytest.mark.acceptance(148)
def test_resolved_shows_every_value_and_where_it_came_from(cli: Homing) -> None:
    said = cli("plan", "moss", "--resolved", "--set", "phases.0.steps=7")
    assert "model.width" in said.out
    assert "run file, line" in said.out
    assert "--set" in next(line for line in said.out.splitlines() if line.startswith("phases.0.num_steps"))
    document = cli("plan", "moss", "--resolved", "--json").json
    assert document["run"]["model"]["width"] == 64
    assert document["origin"]


@pytest.mark.acceptance(84)
def test_a_schedule_longer_than_its_limits_is_warned_of(cli: Homing) -> None:
    said = cli("plan", "moss", "--set", "limits.spend=$0.03", "--set", "phases.0.steps=100000000")
    assert "exceeds the spend limit" in said.err


def test_a_run_file_that_is_not_there_exits_2(cli: Homing) -> None:
    said = cli("plan", "fern")
    assert said.code == 2
    assert "Traceback" not in said.err


@pytest.mark.slow
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


@pytest.mark.acceptance(64)
def test_two_offers_are_compared_and_the_cheapest_to_finish_is_recommended(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = [offer("T4", rate="0.50"), offer("H100", rate="3.00", as_of=0.0), offer("L4", rate="0.10", disk_bytes=1)]
    open_shops(monkeypatch, local=Shop(offers))
    long = ["--set", "phases.0.steps=1000000000", "--set", "checkpoint.every=100000000"]
    said = cli("plan", "moss", *long)
    assert "Cheapest to finish: local 1x_h100" in said.err
    assert "local 1x_t4 would cost $" in said.err
    assert "Skipped offer: local 1x_l4 (1x L4, $0.10/h) has 1 B of" in said.err
    assert "rate of 1970-01-01" in said.out
    phases = said.out[said.out.index("Time and cost by phase") :]
    assert [line.split()[0] for line in phases.splitlines()[1:]] == ["phase", "boot", "pretrain", "home", "all"]
    document = cli("plan", "moss", "--json", *long).json
    best, other = document["offers"]
    assert best["more_usd"] == "0", "and not 0E-17"
    assert Decimal(other["more_usd"]) == Decimal(other["cost_usd"]) - Decimal(best["cost_usd"])
    assert [part["name"] for part in best["phases"]] == ["boot and start", "pretrain", "home"]
    assert document["left_out"][0]["why"].startswith("has 1 B")


def family_row(said: str) -> str:
    return " ".join(next(line for line in said.splitlines() if line.startswith("family")).split())


def learned(monkeypatch: pytest.MonkeyPatch, *rows: LearnedRow) -> None:
    table = dataclasses.replace(load_table(), learned=rows)
    monkeypatch.setattr("homing.api.runs.plan_run.load_table", lambda: table)


def test_the_family_trade_off_is_one_row_without_a_figure_if_not_measured(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = LearnedRow("quality.json", "H200", "stock", 300.0, 1000, 0.61234, 3)
    swift = LearnedRow("quality.json", "H200", "swift", 80.0, 1000, 0.57, 2)
    learned(monkeypatch, stock, swift)  # not after the same seconds
    row = family_row(cli("plan", "moss").out)
    assert row == "family stock: opens in transformers and llama.cpp"
    learned(monkeypatch, stock, dataclasses.replace(swift, seconds=300.0))
    said = cli("plan", "moss", "--json").json["family"]
    assert said.endswith("0.612 bits per byte after 5m00s of one H200, with swift 0.570 (seeds: 3 and 2)")
    file = Path("runs/moss.yaml")
    file.write_text(file.read_text().replace("arch: llama", "family: swift").replace("tied: true", "tied: false"))
    said = cli("plan", "moss", "--json").json["family"]
    assert said.startswith("swift: opens in homing, and in transformers with a custom modeling file; no GGUF")
    assert said.endswith("0.570 bits per byte after 5m00s of one H200, with stock 0.612 (seeds: 2 and 3)")


@pytest.mark.parametrize(
    ("card", "sets", "is_reported"),
    [
        ("H100", {}, True),
        ("A100", {}, False),  # which has none
        ("H100", {"model.depth": "12"}, False),  # smaller than any that gained
        ("H100", {"train.precision": "bf16"}, False),  # the user chose it
    ],
)
def test_fp8_is_named_with_what_was_measured_where_it_would_gain(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, card: str, sets: dict[str, str], is_reported: bool
) -> None:
    open_shops(monkeypatch, local=Shop([offer(card, rate="3.00")]))
    Path("runs/moss.yaml").write_text(
        "name: moss\nmodel: {depth: 26}\ndata: {dir: data/moss}\n"
        "cloud: {providers: [local]}\nphases: [{kind: pretrain, steps: 100}]\n"
    )
    changed = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    said = cli("plan", "moss", "--json", *changed).json["precision"]
    wanted = ", ".join(
        f"{row.shape.num_layers} x {row.shape.width} {gain:.2f}x as fast on {row.card}"
        for row, gain in load_table().gains_of_fp8()
    )
    assert wanted
    assert said == (f"bf16; measured with train.precision=fp8: {wanted}" if is_reported else None)


def test_the_limit_it_names_is_not_below_its_own_worst_case(cli: Homing) -> None:
    said = cli("plan", "moss", "--json")
    worst = Decimal(said.json["offers"][0]["worst_usd"])
    named = Decimal(cli("plan", "moss").err.split("--spend-limit ")[-1].split()[0])
    assert named >= worst


def test_the_next_command_names_the_run_as_it_was_named(cli: Homing) -> None:
    Path("runs/moss.yaml").rename("fern.yaml")
    said = cli("plan", "fern.yaml", "--set", "phases.0.steps=12")
    assert "Next: homing launch fern.yaml --set phases.0.steps=12 --spend-limit" in said.err
    said = cli("plan", "fern.yaml", "--set", "data.dir=data/none")
    assert "homing prep fern.yaml --set data.dir=data/none" in said.out


def test_what_would_take_days_on_this_computer_is_sent_on_to_a_rented_one(cli: Homing) -> None:
    long = ("--set", "phases.0.steps=200000000")
    said = cli("plan", "moss", *long)
    assert "takes a long time on this computer" in said.err
    assert "Next: homing plan moss --set phases.0.steps=200000000 --set cloud.providers=runpod" in said.err
    assert "takes a long time on this computer" not in cli("plan", "moss").err
    large = ("--set", "model.layers=64", "--set", "model.width=16384", "--set", "model.heads=128")
    said = cli("plan", "moss", *large)
    assert said.code == 3
    assert "Rent a GPU: homing plan moss" in said.err
    assert "--set model.heads=128 --set cloud.providers=runpod" in said.err


def test_text_that_is_not_there_is_said_and_prep_comes_next(cli: Homing) -> None:
    Path("runs/fern.yaml").write_text(Path("runs/moss.yaml").read_text().replace("moss", "fern"))
    said = cli("plan", "fern")
    assert "warning: data.text: no file or folder 'fern.txt'" in said.err
    assert "Next: homing prep fern" in said.err


CLOUDS = ("RUNPOD_API_KEY", "SHADEFORM_API_KEY", "MODAL_TOKEN_ID", "AWS_ACCESS_KEY_ID")


@pytest.fixture
def keyless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in CLOUDS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.acceptance(62)
@pytest.mark.usefixtures("keyless")
def test_plan_without_a_key_uses_dated_list_prices_that_are_no_offers(cli: Homing) -> None:
    said = cli("plan", "moss", "--set", "cloud.providers=[runpod]", "--set", "cloud.gpu=H100")
    assert said.code == 0, said.err
    price = find_price("runpod", "H100")
    assert price is not None
    for word in (
        "1x H100",
        f"${price.usd_per_hour}/h",
        "modelled: ",
        f"list price of {price.date}",
        "estimated without querying providers",
    ):
        assert word in said.out
    assert "No API key for RunPod. Create one at https://" in said.err
    assert "launch" not in said.err
    document = cli("plan", "moss", "--set", "cloud.providers=[runpod]", "--json").json
    assert document["schema"] == "homing.plan-listed/1"
    assert document["is_offer"] is False
    h100 = next(row for row in document["cards"] if row["card"] == "H100")
    assert Decimal(h100["cost_usd"]) == cost(price.usd_per_hour, h100["seconds"])
    assert h100["speed_source"] in ("measured", "modelled")


@pytest.mark.usefixtures("keyless")
def test_plan_without_a_key_warns_about_a_text_that_is_read_too_often(cli: Homing) -> None:
    said = cli("plan", "moss", "--set", "cloud.providers=[runpod]", "--set", "phases.0.steps=20000")
    assert said.code == 0, said.err
    assert re.search(r"phases\.0 reads .* times", said.err)


@pytest.mark.acceptance(8)
@pytest.mark.usefixtures("keyless")
def test_plan_without_a_key_says_why_the_chosen_card_is_left_out(cli: Homing) -> None:
    asked = ("plan", "moss", "--set", "cloud.providers=[aws]", "--set", "cloud.gpu=T4")
    assert cli(*asked).code == 0
    said = cli(*asked, "--set", "train.precision=bf16")
    assert said.code == 3
    assert "1x T4 cannot compute in bf16 (train.precision: fp32 would work there, or auto)." in said.err


@pytest.mark.usefixtures("keyless")
def test_plan_for_a_cloud_without_list_prices_needs_a_rate_for_dollars(cli: Homing) -> None:
    asked = ("plan", "moss", "--set", "cloud.providers=[shadeform]", "--set", "cloud.gpu=H100", "--json")
    (row,) = cli(*asked).json["cards"]
    assert (row["rate_usd_per_hour"], row["cost_usd"]) == (None, None)
    assert row["seconds"] > 0
    (own,) = cli(*asked, "--rate", "$2.50").json["cards"]
    assert Decimal(own["cost_usd"]) == cost(Decimal("2.50"), own["seconds"])
    dear = cli(*asked[:-1], "--rate", "2.50", "--spend-limit", "0.02")
    assert "over the limit of $0.02" in dear.out
    for wrong in ("soon", "0", "-1"):
        assert cli(*asked, f"--rate={wrong}").code == 2


@pytest.mark.usefixtures("keyless")
def test_a_list_price_never_reaches_launch(cli: Homing, homing_home: Path) -> None:
    for provider, name in (("runpod", "RunPod"), ("shadeform", "Shadeform")):
        said = cli("launch", "moss", "--set", f"cloud.providers=[{provider}]", "--spend-limit", "1", "--yes")
        assert said.code == 2
        assert f"No {name} API key found." in said.err
    assert Home(homing_home, World()).ledger.lines() == []


@pytest.mark.usefixtures("keyless")
def test_list_prices_are_hidden_if_a_provider_can_be_asked(cli: Homing) -> None:
    said = cli("plan", "moss", "--set", "cloud.providers=[local, runpod]")
    assert said.code == 0, said.err
    assert "list price" not in said.out
    assert "Could not query runpod: No RunPod API key found." in said.err


def test_a_plan_that_does_not_finish_inside_its_limit_says_where_it_lands(cli: Homing) -> None:
    said = cli("plan", "moss", "--set", "phases.0.steps=1000000", "--spend-limit", "0.05").err
    assert re.search(r"It does not finish within \$0.05; it ends early at about step [\d,]+ of 1,000,000", said)
    assert "at worst" not in said
    small = cli("plan", "moss", "--set", "phases.0.steps=1000000", "--spend-limit", "0.0001").err
    assert re.search(
        r"within \$0.0001; it ends early at about step 0 of 1,000,000; the minimum spend limit there is", small
    )


def test_with_list_prices_it_also_says_why_launch_refuses_the_run(cli: Homing) -> None:
    said = cli("plan", "moss", "--set", "phases.0.steps=2000000", "--set", "train.device=cpu", "--rate", "2.50")
    assert said.code == 0
    assert "`homing launch` refuses this run. Phase pretrain would read its text" in said.err
