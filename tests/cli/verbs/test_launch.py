"""`homing launch`: what it asks, refuses and says."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cli.control_rig import Homing, cli_with
from tests.cloud.rig import marked_now

from homing.api.lookup.find_runs import usd
from homing.api.runs.launch_run import Confirmed, LaunchOptions, launch
from homing.cloud.home import Home
from homing.cloud.providers.local.provider import Local
from homing.config.load import load_run
from homing.config.resolve.smoke_profile import mark_smoke
from homing.doctor.check import Balance
from homing.errors import UsageError
from homing.hf_config import config_of
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.world import Retries, World

cli = cli_with(steps=100_000)


@pytest.mark.acceptance(148)
def test_without_a_spend_limit_it_exits_2_also_with_yes(cli: Homing) -> None:
    said = cli("launch", "moss", "--yes")
    assert said.code == 2
    named = re.search(r"homing launch moss --spend-limit (\d+\.\d+)$", said.err, re.M)
    assert named, said.err
    assert cli("launch", "moss", "--spend-limit", named[1], "--dry-run").code == 0, "the sum that it names suffices"


@pytest.mark.acceptance("X20")
@pytest.mark.parametrize("how", ["--yes", "--dry-run"])
def test_a_limit_above_the_known_balance_is_refused_unless_allowed(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    balance = Balance(Decimal("4.99"), Decimal(0))
    monkeypatch.setattr("homing.cloud.providers.local.provider.Local.balance", lambda self: balance, raising=False)
    said = cli("launch", "moss", "--spend-limit", "5", how)
    assert said.code == 2
    assert "$4.99 left at local; this run may cost $5.00" in said.err
    assert "add: --allow low-balance" in said.err
    assert cli("runs", "--json").json["runs"] == []
    allowed = cli("launch", "moss", "--spend-limit", "5", "--dry-run", "--allow", "low-balance")
    assert allowed.code == 0
    assert "warning: $4.99 left at local" in allowed.err
    assert "left at" not in cli("launch", "moss", "--spend-limit", "4.50", "--dry-run").err


@pytest.mark.parametrize("allow", [(), ("low-balance",)], ids=["refused", "allowed"])
def test_the_balance_of_the_next_offer_is_checked_before_the_user_is_asked_about_it(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, allow: tuple[str, ...]
) -> None:
    asked: list[str] = []

    class Answers(Confirmed):
        def agrees_to_next(self, *_: object) -> bool:
            asked.append("next")
            return True

    def sold_out(ready: Any, offers: Any, home: Any, *, notify: Any, agree: Any) -> Any:
        balance = Balance(Decimal("0.99"), Decimal(0))
        monkeypatch.setattr(Local, "balance", lambda self: balance, raising=False)
        raise UsageError(what="agreed" if agree(offers[0], ready) else "not agreed")

    monkeypatch.setattr("homing.api.runs.launch_run.launch_any", sold_out)
    options = LaunchOptions(spend_limit_usd=Decimal(1), allow=allow)
    with pytest.raises(UsageError) as caught:
        launch("moss", options, answers=Answers(confirm=True))
    assert (caught.value.what, asked) == (("agreed", ["next"]) if allow else ("not agreed", []))


def test_extend_selects_one_run_by_the_end_of_its_id(cli: Homing, homing_home: Path) -> None:
    loaded = load_run("moss")
    for run_id in ("moss-20260101-000000-1a2b", "moss-20260102-000000-ffff"):
        step = homing_home / "runs" / run_id / "checkpoints/pretrain/step-00000003"
        step.mkdir(parents=True)
        (homing_home / "runs" / run_id / file_names.RUN).write_text(
            codec.dumps(dataclasses.replace(loaded.run, id=run_id))
        )
        manifest = CheckpointManifest("moss", run_id, "pretrain", 3, 1, True, "", 7, [])
        (step / file_names.MANIFEST).write_text(codec.dumps(manifest))
    for typed, end in (("moss@1a2b", "1a2b"), ("moss", "ffff")):
        said = cli("launch", typed, "--extend", "4", "--spend-limit", "1", "--dry-run")
        assert f"-000000-{end}/checkpoints/pretrain/step-00000003" in said.err, "the weights, which are no real ones"
        assert "no model.safetensors" in said.err


def test_more_than_100_passes_over_the_text_are_refused_unless_allowed(cli: Homing) -> None:
    nonsense = ["moss", "--set", "phases.0.steps=2000000", "--set", "train.device=cpu"]
    for more in (["--yes"], ["--dry-run"], ["--yes", "--allow", "low-balance"]):
        said = cli("launch", *nonsense, "--spend-limit", "9", *more)
        assert said.code == 2
        assert re.search(r"would read its text [\d,]+ times; the maximum is 100", said.err), said.err
        assert "After about 4 passes, a model learns little more" in said.err
    shorter = re.search(r"homing plan moss (.*?)   To launch anyway", said.err)
    assert shorter, said.err
    assert cli("runs", "--json").json["runs"] == []
    assert cli("launch", *nonsense, "--spend-limit", "999", "--dry-run", "--allow", "many-passes").code == 0
    assert cli("launch", "moss", *shorter[1].split(), "--spend-limit", "9", "--dry-run").code == 0, "the fix works"


def test_epochs_in_the_run_file_say_the_number_of_passes_and_are_not_refused(cli: Homing) -> None:
    file = Path("runs/moss.yaml")
    file.write_text(file.read_text().replace("steps: 20", "epochs: 200"))
    assert cli("launch", "moss", "--spend-limit", "9", "--dry-run").code == 0


def test_an_unknown_word_after_allow_is_refused_with_the_known_ones(cli: Homing) -> None:
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--allow", "everything")
    assert said.code == 2
    assert "--allow everything: unknown" in said.err
    assert "many-passes" in said.err


def test_gpu_stands_for_the_key_of_the_run_file(cli: Homing) -> None:
    said = cli("launch", "moss", "--spend-limit", "1", "--dry-run", "--gpu", "H200")
    assert said.code == 3, "this computer has no such GPU"
    assert "H200" in said.err


@pytest.mark.parametrize("limit", ["nothing", "0", "-3", "$0.0001"])
def test_a_limit_that_is_none_is_refused(cli: Homing, limit: str) -> None:
    assert cli("launch", "moss", "--yes", f"--spend-limit={limit}").code == 2


@pytest.mark.regression("spend-limit-size")
@pytest.mark.parametrize(
    "how", [["--spend-limit", "1e30"], ["--set", "limits.spend=1e30"], ["--spend-limit=9e99999999"]]
)
def test_an_enormous_limit_is_refused_in_words(cli: Homing, how: list[str]) -> None:
    said = cli("launch", "moss", "--dry-run", *how)
    assert said.code == 2
    assert "the maximum is $1,000,000,000.00" in said.err
    assert "Traceback" not in said.err


@pytest.mark.acceptance(52)
def test_with_no_terminal_and_no_yes_it_refuses_and_names_the_money(cli: Homing) -> None:
    said = cli("launch", "moss", "--spend-limit", "1")
    assert said.code == 2
    assert "at $0.36/h, limit $1.00?" in said.err
    assert cli("runs", "--json").json["runs"] == []


@pytest.mark.parametrize("more", [["--yes"], ["--dry-run"]])
def test_on_this_computer_what_trains_must_be_installed_before_anything_is_created(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.setattr("homing.api.extras.find_spec", lambda name: None if name == "torch" else object())
    said = cli("launch", "moss", "--spend-limit", "1", *more)
    assert said.code == 2
    assert "`homing launch` on this computer needs the extra `lm`." in said.err
    assert "pip install" in said.err
    assert cli("runs", "--json").json["runs"] == []


def test_a_name_that_cannot_be_one_is_answered_with_one_that_can(cli: Homing) -> None:
    said = cli("launch", "moss", "--spend-limit", "1", "--name", "Moss No 2", "--yes")
    assert said.code == 2
    assert "a-z, 0-9 and -, at most 32 characters" in said.err
    assert "fix Use --name moss-no-2" in said.err


@pytest.mark.acceptance(1)
def test_a_shape_that_cannot_be_is_refused_before_anything_is_created(cli: Homing) -> None:
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--set", "model.heads=5")
    assert said.code == 2
    assert "model.heads" in said.err
    assert cli("runs", "--json").json["runs"] == []


@pytest.mark.acceptance(91)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_bad_lines_of_an_rl_task_are_reported_before_renting(cli: Homing, more: list[str]) -> None:
    run_file = Path("runs/moss.yaml")
    rl = "  - {kind: rl, steps: 2, rl: {answer_tokens: 8, tasks: [{kind: gsm8k, file: sums.jsonl}]}}\n"
    run_file.write_text(run_file.read_text().replace("train:", rl + "train:"))
    Path("sums.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?", "answer": "4"}\n{')
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", *more)
    assert said.code == 2
    assert str(Path("sums.jsonl").absolute()) in said.err
    assert "line 2: the answer has no ####; line 3:" in said.err
    assert cli("runs", "--json").json["runs"] == []


def test_failure_and_guard_options_are_in_the_request(cli: Homing) -> None:
    assert cli("launch", "moss", "--spend-limit", "1", "--dry-run", "--keep-on-failure", "soon").code == 2
    said = cli("launch", "moss", "--spend-limit", "1", "--dry-run", "--keep-on-failure", "30m", "--one-guard", "--json")
    assert said.code == 0
    assert said.json["armed"] == ["agent", "dead-man"]
    assert said.json["request"]["keep_on_failure_s"] == 1800.0


@pytest.mark.acceptance(66)
def test_a_dry_run_prints_the_request_and_leaves_nothing(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "canary-7f3a")
    monkeypatch.setattr("homing.cloud.providers.rest.RETRIES", Retries(tries=4, first_s=0.01, longest_s=60.0))
    said = cli("launch", "moss", "--spend-limit", "1", "--dry-run", "--json")
    assert said.code == 0
    assert said.json["request"]["mark"].startswith("homing-")
    assert said.json["worst_case_usd"] == "1"
    assert "canary-7f3a" not in said.out + said.err
    assert not (homing_home / "store").exists()
    assert not (homing_home / "local").exists()
    assert cli("launch", "moss", "--dry-run").code == 2
    people = cli("launch", "moss", "--spend-limit", "1", "--dry-run")
    lines = people.out.splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 120 + len(str(homing_home))
    assert "spend limit  $1.00, worst case $1.00" in people.out
    assert "PATH" not in people.out
    assert "objects/" not in people.out
    whole = cli("launch", "moss", "--spend-limit", "1", "--dry-run", "-v").out
    assert "env.PATH" in whole
    assert "<- objects/" in whole


@pytest.mark.acceptance(68, 75)
def test_it_launches_and_a_second_of_that_name_is_refused(cli: Homing) -> None:
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--json")
    assert said.code == 0, said.err
    assert said.json["name"] == "moss"
    assert "Worst case: $1.00" in said.err
    assert "Nothing is rented" in said.err
    assert "not armed" not in said.err, "on this computer nothing of that is a danger"
    assert "homing watch moss" in said.err
    again = cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert again.code == 2
    assert "already live" in again.err
    other = cli("launch", "moss", "--spend-limit", "1", "--yes", "--name", "fern", "--json")
    assert other.json["name"] == "fern"


def test_the_limit_may_stand_in_the_run_file_and_the_flag_wins(cli: Homing) -> None:
    in_file = cli("launch", "moss", "--dry-run", "--json", "--set", "limits.spend=$3")
    assert in_file.json["request"]["spend_limit_usd"] == "3"
    both = cli("launch", "moss", "--dry-run", "--json", "--set", "limits.spend=$3", "--spend-limit", "5")
    assert both.json["request"]["spend_limit_usd"] == "5"


@pytest.mark.acceptance(3, 75)
def test_unprepared_data_is_refused_with_the_steps_that_are_missing(cli: Homing) -> None:
    Path("data/moss/manifest.json").unlink()
    said = cli("launch", "moss", "--spend-limit", "1.50", "--yes")
    assert said.code == 2
    assert "Its text is not tokenized" in said.err
    assert "homing prep moss && homing verify moss && homing launch moss --spend-limit 1.50\n" in said.err


@pytest.mark.acceptance(4)
@pytest.mark.parametrize("how", ["--yes", "--dry-run", "--json"])
def test_a_big_first_run_without_a_smoke_run_is_refused_unless_allowed(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("homing.api.runs.refused_launch.needs_smoke_first", lambda run: True)
    said = cli("launch", "moss", "--spend-limit", "1", how)
    assert said.code == 2
    assert "its smoke run has not passed yet" in said.err
    assert "homing launch moss --smoke" in said.err
    assert cli("launch", "moss", "--spend-limit", "1", "--dry-run", "--allow", "no-smoke").code == 0


@pytest.mark.acceptance(4)
def test_a_large_run_with_a_failed_smoke_profile_is_refused_also_with_yes(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.api.runs.refused_launch.needs_smoke_first", lambda run: True)
    file = Path("runs/moss.yaml")
    mark_smoke(file, is_passed=False)
    said = cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert said.code == 2
    assert "failed, so the full run was not started" in said.err
    assert "homing launch moss --smoke" in said.err
    assert cli("runs", "--json").json["runs"] == []
    file.write_text(file.read_text() + "# fixed\n")
    changed = cli("launch", "moss", "--spend-limit", "1", "--dry-run", "--allow", "no-smoke")
    assert changed.code == 0, "another file has not been tried yet"


@pytest.mark.parametrize("name", ["Moss!", "../x", ""])
def test_a_name_that_cannot_be_one_is_refused(cli: Homing, name: str) -> None:
    assert cli("launch", "moss", "--spend-limit", "1", "--yes", "--name", name).code == 2


def test_nothing_to_resume_is_said(cli: Homing) -> None:
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--resume")
    assert said.code == 2
    assert "no run" in said.err


def test_without_a_run_it_exits_2(cli: Homing) -> None:
    assert cli("launch").code == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launch_that_gets_a_signal_undoes_what_it_started(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def end_us(*args: Any) -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # a system that goes down does not ask once
        signal.pause()

    before = signal.getsignal(number)
    monkeypatch.setattr("homing.cloud.launch.launch._first_heartbeat", end_us)
    said = cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert said.code == 130, said.err
    home = Home(homing_home, World())
    assert marked_now(home) == []
    (line,) = home.ledger.lines()
    assert (line.billing, line.state) == ("no", "gone")
    assert home.ledger.find("moss").state == "failed"
    assert signal.getsignal(number) is before


def interrupted(*args: Any, **more: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_before_anything_is_created_says_so(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("homing.api.runs.launch_run.make_plan", "homing.cloud.launch.launch.push_code"):
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupted)
            said = cli("launch", "moss", "--spend-limit", "1", "--yes")
        assert said.code == 130, said.err
        assert said.err.endswith("Interrupted: nothing was created.\n"), where
        assert "failed" not in said.err


def test_an_interrupt_after_the_create_call_says_what_is_gone_and_what_it_cost(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.cloud.launch.launch._first_heartbeat", interrupted)
    said = cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert said.code == 130, said.err
    (line,) = Home(homing_home, World()).ledger.lines()
    assert (
        f"Interrupted: {line.instance_id} destroyed, confirmed by the provider; spent {usd(line.spend_usd)}."
        in said.err
    )
    assert "The launch was interrupted; destroying everything it started" in said.err
    assert "failed" not in said.err


def test_an_interrupt_without_a_confirmed_end_names_what_bills_and_the_command(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.cloud.launch.launch._first_heartbeat", interrupted)
    monkeypatch.setattr("homing.cloud.ledger.meter.FREE_PROVIDERS", frozenset())  # treat it as a rented machine
    with monkeypatch.context() as patch:
        patch.setattr("homing.cloud.launch.launch.destroy_lines", interrupted)  # the user pressed it twice
        said = cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert said.code == 6, said.err
    (line,) = Home(homing_home, World()).ledger.lines()
    assert f"{line.instance_id} at $0.36/h" in said.err
    assert f"fix homing destroy {line.run_id}" in said.err
    assert cli("destroy", "moss", "--yes").code == 0


def test_a_verb_that_has_no_last_word_says_that_it_was_interrupted(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.api.runs.plan_run.make_plan", interrupted)
    said = cli("plan", "moss")
    assert (said.code, said.err) == (130, "Interrupted.\n")


# --- choosing among offers ---


class Terminal:
    """A user who types these lines, one per question."""

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self._lines.pop(0) + "\n" if self._lines else ""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """This computer offered twice, at two rates; the list names those that are sold out."""
    import dataclasses
    from decimal import Decimal

    from homing.cloud.providers.local.provider import Local
    from homing.errors import NoOffer

    sold_out: list[str] = []
    offers, create = Local.offers, Local.create

    def both(self: Local, needs: Any) -> list[Any]:
        rates = {"left": "0.36", "right": "0.40"}
        return [
            dataclasses.replace(offer, name=name, rate_usd_per_hour=Decimal(rate))
            for offer in offers(self, needs)
            for name, rate in rates.items()
        ]

    def sometimes(self: Local, request: Any) -> Any:
        if request.offer.name in sold_out:
            raise NoOffer(f"{request.offer.name} is sold out.")
        monkeypatch.setenv("HOMING_LOCAL_RATE", str(request.offer.rate_usd_per_hour))
        return create(self, request)

    monkeypatch.setattr(Local, "offers", both)
    monkeypatch.setattr(Local, "create", sometimes)
    return sold_out


@pytest.mark.acceptance(50, 129)
def test_launch_selects_by_number_and_shows_the_extra_cost_of_a_choice(
    cli: Homing, two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("7", "2", "n"))
    said = cli("launch", "moss", "--spend-limit", "1")
    assert said.code == 0
    assert "Select instance [1-2] or 'q' to quit:" in said.err
    assert "'7' is not one of the choices" in said.err
    assert "more than on the cheapest, local left" in said.err
    assert "at $0.40/h, limit $1.00?" in said.err
    assert "Nothing was started" in said.err


def test_a_script_names_one_exact_machine_and_nothing_else_is_taken(cli: Homing, two: list[str]) -> None:
    said = cli("launch", "moss", "--spend-limit", "1", "--dry-run", "--instance-type", "right", "--json")
    assert said.json["request"]["offer"] == "right"
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--region", "mars", "--instance-type", "right")
    assert said.code == 3
    assert "No provider currently offers --region mars --instance-type right" in said.err
    assert cli("runs", "--json").json["runs"] == []


@pytest.mark.acceptance(50)
@pytest.mark.parametrize("answer", ["q", "Q", "quit", ""])
def test_q_costs_nothing_and_is_success(
    cli: Homing, two: list[str], monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(*([answer] if answer else [])))
    said = cli("launch", "moss", "--spend-limit", "1")
    assert said.code == 0
    assert "Nothing was started" in said.err
    assert cli("ledger", "--json").json["lines"] == []


def test_with_yes_the_best_is_taken_and_one_that_is_gone_leads_to_the_next(
    cli: Homing, two: list[str], homing_home: Path
) -> None:
    two.append("left")
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--json")
    assert said.code == 0, said.err
    assert "local left is gone: left is sold out." in said.err
    assert said.json["rate_usd_per_hour"] == "0.40"
    (run,) = cli("runs", "--json").json["runs"]
    assert run["state"] == "running"
    lines = cli("ledger", "--json").json["lines"]
    assert [(line["attempt"], line["offer"], line["billing"]) for line in lines] == [
        (1, "left", "no"),
        (2, "right", "yes"),
    ]


@pytest.mark.acceptance(70)
def test_a_machine_that_never_comes_is_destroyed_and_leads_to_the_next(
    cli: Homing, two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from homing.cloud.providers.local.provider import Local
    from homing.errors import StartTimeout

    def hand_over(self: Local, request: Any, instance_id: str) -> None:
        if request.offer.name == "left":
            raise StartTimeout("It was not reached within 30m.")

    monkeypatch.setattr(Local, "hand_over", hand_over)
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--json")
    assert said.code == 0, said.err
    assert "local left never came up and was destroyed: It was not reached within 30m." in said.err
    lines = cli("ledger", "--json").json["lines"]
    assert [(line["offer"], line["billing"]) for line in lines] == [("left", "no"), ("right", "yes")]


def test_the_next_is_not_taken_above_the_rate_that_was_allowed_and_nothing_is_left(cli: Homing, two: list[str]) -> None:
    two.append("left")
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--set", "limits.rate=0.38")
    assert said.code == 3
    assert "right" not in [line["offer"] for line in cli("ledger", "--json").json["lines"]]


def test_when_all_are_gone_it_says_so_and_nothing_bills(cli: Homing, two: list[str]) -> None:
    two += ["left", "right"]
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 3
    assert {line["billing"] for line in cli("ledger", "--json").json["lines"]} == {"no"}


@pytest.mark.acceptance("X19")
def test_a_dear_hour_is_asked_for_by_name_also_with_yes(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOMING_LOCAL_RATE", "33.60")
    said = cli("launch", "moss", "--spend-limit", "50", "--yes")
    assert said.code == 2
    assert "--set limits.rate=33.60" in said.err
    monkeypatch.setattr("sys.stdin", Terminal("n"))
    said = cli("launch", "moss", "--spend-limit", "50", "--yes")
    assert said.code == 0
    assert "costs $33.60/h. Continue?" in said.err
    assert cli("ledger", "--json").json["lines"] == []


def test_errors_name_the_run_as_it_was_named(cli: Homing) -> None:
    Path("runs/moss.yaml").rename("fern.yaml")
    said = cli("launch", "fern.yaml", "--dry-run")
    assert "homing launch fern.yaml --spend-limit" in said.err
    said = cli("launch", "fern.yaml", "--dry-run", "--spend-limit", "0.0001")
    assert "too low" in said.err
    assert "homing launch fern.yaml --spend-limit" in said.err
    said = cli("launch", "fern.yaml", "--dry-run", "--spend-limit", "1", "--cloud", "aws")
    assert "homing plan fern.yaml" in said.err
    said = cli("launch", "fern.yaml", "--dry-run", "--spend-limit", "1", "--set", "limits.rate=0.01")
    assert said.code == 3
    said = cli("launch", "fern.yaml", "--dry-run", "--spend-limit", "1", "--set", "data.dir=data/none")
    prep, verify, launch = (
        f"homing {verb} fern.yaml --set data.dir=data/none" for verb in ("prep", "verify", "launch")
    )
    assert f"fix {prep} && {verify} && {launch} --spend-limit 1\n" in said.err


def test_what_a_provider_refuses_is_tried_again_in_the_words_that_were_typed(
    cli: Homing, two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from homing.cloud.providers.local.provider import Local
    from homing.errors import CreateFailed

    def hand_over(self: Local, request: Any, instance_id: str) -> None:
        raise CreateFailed("It did not take its files.", fix=f"Try again: {request.order.words.to('launch')}")

    monkeypatch.setattr(Local, "hand_over", hand_over)
    Path("runs/moss.yaml").rename("fern.yaml")
    said = cli("launch", "fern.yaml", "--spend-limit", "1", "--yes", "--set", "phases.0.steps=7")
    assert "fix Try again: homing launch fern.yaml --set phases.0.steps=7\n" in said.err
    said = cli("launch", "moss", "--resume", "--spend-limit", "1", "--yes")
    assert "fix Try again: homing launch moss --resume\n" in said.err


def test_a_resume_at_an_expensive_rate_needs_an_answer_at_a_terminal(
    cli: Homing, two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two += ["left", "right"]
    assert cli("launch", "moss", "--spend-limit", "50", "--yes").code == 3
    monkeypatch.setattr("homing.cli.verbs.launch.is_dear", lambda offer, limit: True)
    said = cli("launch", "moss", "--spend-limit", "50", "--yes", "--resume")
    assert "fix homing launch moss --resume   and confirm at a terminal\n" in said.err


def test_a_run_file_that_was_never_launched_is_named_by_its_path(cli: Homing) -> None:
    Path("runs/moss.yaml").rename("fern.yaml")
    said = cli("status", "fern.yaml")
    assert "homing plan fern.yaml" in said.err


def test_a_phase_that_is_not_prepared_is_named(cli: Homing) -> None:
    chat = "  - {kind: sft, steps: 5, batch_tokens: 128, data: {chat: [chat.jsonl]}}\ntrain:"
    file = Path("runs/moss.yaml").rename("fern.yaml")
    file.write_text(file.read_text().replace("train:", chat, 1))
    said = cli("launch", "fern.yaml", "--dry-run", "--spend-limit", "1")
    assert said.code == 2
    assert "The conversations of phase sft are not tokenized" in said.err
    assert "homing prep fern.yaml" in said.err
    assert "'chat.jsonl'" in said.err


def test_the_weights_that_a_phase_starts_from_are_named_as_a_person_knows_them(cli: Homing) -> None:
    start = Path("models/moss")
    start.mkdir(parents=True)
    (start / "config.json").write_text(json.dumps(config_of(load_run("moss").run.model)))
    (start / file_names.TOKENIZER).write_bytes(Path("data/moss", file_names.TOKENIZER).read_bytes())
    (start / file_names.WEIGHTS).write_bytes(b"")
    begun = ("launch", "moss", "--spend-limit", "1", "--dry-run", "--set", "phases.0.init_from=models/moss")
    assert "pretrain starts from models/moss.\n" in cli(*begun).err, "the origin of foreign weights is unknown"
    manifest = CheckpointManifest("moss", "moss-20260101-000000-abcd", "pretrain", 1200, 0, True, "", 1, [])
    (start / file_names.MANIFEST).write_text(codec.dumps(manifest))
    start = "pretrain starts from models/moss, pretrain step 1,200 of moss-20260101-000000-abcd."
    assert f"{start}\n" in cli(*begun).err
    assert cli(*begun, "--json").json["starts"] == [start]
