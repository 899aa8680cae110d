"""`homing runs` and what it shows of money."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with

from homing.cloud.destroy import destroy_run
from homing.cloud.providers.local.provider import Local
from homing.wire import codec, file_names
from homing.wire.event_lines import Metric, Outcome
from homing.world import World

cli = cli_with(steps=100000)


def test_with_nothing_there_nothing_bills(cli: Homing) -> None:
    said = cli("runs")
    assert said.code == 0
    assert "Nothing is billing." in said.err


def test_a_home_without_launches_says_so_and_one_with_a_lost_ledger_names_its_runs(
    cli: Homing, homing_home: Path
) -> None:
    for _ in range(2):  # the first call creates an owner and an empty ledger
        assert f"No runs were launched from this homing home directory ({homing_home}" in cli("runs").err
    folder = homing_home / "runs/moss-20260101-120000-aaaa"
    folder.mkdir(parents=True)
    (folder / "launch.json").write_text("{}")
    said = cli("runs")
    assert "warning: The ledger has no record of 1 run launched from this computer." in said.err
    assert f"homing adopt STORE {folder.name}" in said.err
    assert "No runs were launched" not in said.err
    assert cli("runs", "--json").json["problems"]


@pytest.mark.acceptance(121)
def test_every_run_is_listed_with_its_instance_and_dollars(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    said = cli("runs")
    assert "moss-" in said.out
    assert "$1.00" in said.out
    assert "1 run on this computer, free of charge. End: homing destroy moss-" in said.err
    document = cli("runs", "--json").json
    assert document["schema"] == "homing.runs/1"
    assert document["runs"][0]["state"] == "running"
    assert [line["billing"] for line in document["billing"]] == ["yes"]


@pytest.mark.regression("local-billing-alarm")
def test_a_run_on_this_computer_raises_no_billing_alarm(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    said = cli("runs")
    assert "may still be billing" not in said.err
    assert "Nothing is billing." in said.err
    (row,) = [line for line in said.out.splitlines() if line.startswith("moss-")]
    assert row.split()[-1] == "no"
    monkeypatch.setattr(Local, "destroy", lambda self, instance_id: None)
    monkeypatch.setattr("homing.api.runs.end_runs.destroy_run", lambda home, row: destroy_run(home, row, deadline_s=0))
    ended = cli("destroy", "moss", "--yes")
    assert not re.search("may still (cost money|be billing)", ended.err)
    assert "$0.36/h" not in ended.err
    assert "on this computer may still be running" in ended.err
    assert cli("explain", "model.depth").code == 0, "no alarm after a verb that has nothing to do with it"
    monkeypatch.undo()


def test_what_was_trained_here_is_listed_too(cli: Homing, homing_home: Path) -> None:
    from tests.cloud.rig import make_run

    for name, outcome in (("a", Outcome("done", "All steps are done.", 0, "pretrain", 20)), ("b", None), ("c", None)):
        folder = homing_home / "runs" / f"moss-20260101-120000-{name}"
        folder.mkdir(parents=True)
        (folder / file_names.TRAINER_LOCK).touch()
        (folder / file_names.RUN).write_text(codec.dumps(make_run(homing_home)))
        if outcome is not None:
            (folder / file_names.OUTCOME).write_text(codec.dumps(outcome))
    metric = Metric(t=0.0, phase="pretrain", step=7, num_steps=20, num_tokens=1)
    (homing_home / "runs/moss-20260101-120000-c" / file_names.METRICS).write_text(codec.dumps(metric) + "\n")
    (homing_home / "runs/moss-20260101-120000-d").mkdir()  # launched from elsewhere: no trainer was ever here
    with open(homing_home / "runs/moss-20260101-120000-c" / file_names.TRAINER_LOCK) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = cli("runs")
        document = cli("runs", "--json").json
    lines = {line.split()[0][-1]: line for line in said.out.splitlines() if "this computer" in line}
    assert sorted(lines) == ["a", "b", "c"]
    assert "20/20" in lines["a"]
    assert "7/20" in lines["c"]
    states = {each["run"][-1]: each["state"] for each in document["trained"]}
    assert states == {"a": "done", "b": "unfinished", "c": "training"}
    assert "Nothing is billing." in said.err


@pytest.mark.slow
def test_a_provider_that_cannot_be_asked_is_not_shown_as_nothing(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    from homing.cloud.providers.local.provider import Local
    from homing.errors import ProviderRefused

    cli("launch", "moss", "--spend-limit", "1", "--yes")
    with monkeypatch.context() as patch:

        def away(self: Local) -> list[object]:
            raise ProviderRefused("key refused")

        patch.setattr("homing.cloud.ledger.meter.FREE_PROVIDERS", frozenset())  # treat it as a rented machine
        patch.setattr(Local, "list_owned", away)
        said = cli("runs")
    assert "Could not query" in said.err
    assert "maybe" in said.out


@pytest.mark.slow
def test_a_damaged_ledger_is_restored_and_every_verb_works(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    for verb in (["runs"], ["status", "moss"], ["guard", "--once"], ["stop", "moss", "--no-wait"], ["destroy", "moss"]):
        for path in homing_home.glob("ledger.sqlite*"):
            path.write_bytes(b"no database at all" * 500)
        said = cli(*verb, *(["--yes"] if verb[0] == "destroy" else []))
        assert said.code == 0, said.err
        assert "Traceback" not in said.err
        assert "It was restored from its backup of" in said.err
    assert cli("runs", "--json").json["billing"] == []


def test_a_home_that_cannot_be_used_is_said_without_a_traceback(
    cli: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HOMING_HOME", str(tmp_path / "file"))
    for verb in (["runs"], ["status"], ["plan", "moss"], ["launch", "moss", "--spend-limit", "1", "--yes"]):
        said = cli(*verb)
        assert said.code in (1, 2, 7), said.err
        assert "Traceback" not in said.err
        assert "fix" in said.err


def test_status_watches_a_trainer_at_work_here_until_it_ends(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.cloud.rig import make_run

    folder = homing_home / "runs/moss-20260101-120000-a"
    folder.mkdir(parents=True)
    (folder / file_names.RUN).write_text(codec.dumps(make_run(homing_home)))
    slept: list[float] = []

    def train_on(world: World, seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            outcome = Outcome("done", "All steps are done.", 0, "pretrain", 20)
            (folder / file_names.OUTCOME).write_text(codec.dumps(outcome))

    monkeypatch.setattr(World, "sleep", train_on)
    with open(folder / file_names.TRAINER_LOCK, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = cli("status", folder.name, "--watch", "30", "--json")
    states = [json.loads(line)["state"] for line in said.out.splitlines()]
    assert (states, slept) == (["training", "training", "done"], [30.0, 30.0])
