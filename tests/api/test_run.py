"""`homing.Run` and `homing.load`: the whole trip by the Python API, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, lay_out, typing
from tests.cloud.rig import clear

import homing
from homing.cloud.home import Home
from homing.world import World


@pytest.fixture(autouse=True)
def printed_notices() -> None:
    """The library alone: nothing listens to its notices."""


@pytest.fixture
def folder(tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield lay_out(tmp_path, monkeypatch, steps=12, step_s=0.02)
    clear(homing_home)


def test_a_trip_on_the_local_provider_prints_nothing(
    folder: Path, homing_home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = homing.Run.from_file("moss")
    assert run.plan().best.offer.provider == "local"
    launched = run.launch(spend_limit=1, confirm=True)
    assert launched["provider"] == "local"
    kinds = [event.kind for event in run.watch(every_s=1.0)]
    assert kinds[-1] == "end"
    assert run.status()["state"] == "done"
    assert run.metrics()[-1]["step"] == 12
    assert run.events()
    assert run.fetch() == Path("models/moss")
    run.destroy()
    (line,) = run.receipt()
    assert (line["state"], line["billing"]) == ("gone", "no")
    assert [each.name for each in homing.runs()] == [launched["run"]]
    assert launched["run"] in repr(homing.runs())
    assert "<table>" in homing.runs()._repr_html_()
    assert capfd.readouterr() == ("", "")
    assert Home(homing_home, World()).ledger.open_lines() == []


def test_a_plan_without_an_account_has_list_prices(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    planned = homing.Run("moss", sets=["cloud.providers=[runpod]"]).plan()
    assert planned.is_without_key
    assert planned.offers == []
    assert any(each.rate_usd_per_hour is not None for each in planned.listed)
    with pytest.raises(homing.NoOffer, match="No provider was queried"):
        _ = planned.best


def test_plan_and_watch_take_the_options_of_their_verbs(
    folder: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = homing.Run("moss").plan(rate=2, spend_limit="3.50")
    assert planned.loaded.run.limits.spend_usd == "3.5"
    assert {each.rate_usd_per_hour for each in planned.listed} == {Decimal(2)}
    asked: dict[str, object] = {}
    monkeypatch.setattr(
        "homing.api.runs.watch_run.watch_run", lambda run, **given: iter(asked.update(given, run=run) or ())
    )
    assert list(homing.Run("moss").watch(trackers=["tensorboard"], tracker_name="mine")) == []
    assert asked == {"run": "moss", "every_s": 30.0, "trackers": ["tensorboard"], "tracker_name": "mine"}


def test_a_launch_without_confirm_names_rate_and_limit_and_starts_nothing(folder: Path, homing_home: Path) -> None:
    with pytest.raises(homing.UsageError) as refused:
        homing.Run("moss").launch(spend_limit=1)
    assert "/h, limit $1.00?" in refused.value.why
    assert "confirm=True" in refused.value.fix
    assert Home(homing_home, World()).ledger.lines() == []


def test_a_launch_without_a_limit_is_refused(folder: Path) -> None:
    with pytest.raises(homing.UsageError, match="No spend limit"):
        homing.Run("moss").launch(confirm=True)


@pytest.mark.slow
def test_the_command_line_and_the_api_leave_the_same_behind(
    folder: Path, homing_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli: Homing = typing(capsys, monkeypatch)
    for _ in range(2):
        before = {row.id for row in Home(homing_home, World()).ledger.runs()}
        if before:
            run = homing.Run("moss")
            run.launch(spend_limit=1, confirm=True)
            list(run.watch(every_s=1.0))
            run.fetch()
            run.destroy()
        else:
            assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
            assert cli("watch", "moss").code == 0
            assert cli("fetch", "moss").code == 0
            assert cli("destroy", "moss").code == 0
    ledger = Home(homing_home, World()).ledger
    rows = ledger.runs()
    left = [
        {
            (row.state, row.exit_code, row.fetched_step),
            tuple((line.state, line.billing, line.provider, line.rate_usd_per_hour) for line in ledger.lines(row.id)),
            tuple(sorted(path.name for path in (homing_home / "runs" / row.id).iterdir())),
        }
        for row in rows
    ]
    assert len(rows) == 2
    assert left[0] == left[1]


def test_a_new_run_file_is_that_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("moss grows on stones\n" * 50)
    homing.Run.new("first", text=["a.txt"])
    by_api = Path("runs/first.yaml").read_text()
    cli: Homing = typing(capsys, monkeypatch)
    assert cli("new", "first", "--from", "tiny", "--text", "a.txt", "--force").code == 0
    assert Path("runs/first.yaml").read_text() == by_api


def test_every_public_name_is_there_and_importing_loads_none_of_them() -> None:
    assert all(getattr(homing, name) is not None for name in homing.__all__)
    assert issubclass(homing.StillBilling, homing.HomingError)
    code = (
        "import sys, homing\n"
        "assert set(homing.__all__) <= set(dir(homing))\n"
        "homing.Run, homing.load, homing.runs\n"
        "print([m for m in ('torch', 'pydantic', 'boto3', 'typer', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_prep_verify_and_train_on_this_computer_make_a_model(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("The moss grows on the stones by the river.\n" * 500)
    homing.Run.new("first", text=["a.txt"])
    sets = ["phases.0.steps=2", "tokenizer.vocab_size=280", "train.device=cpu"]
    run, lines = homing.Run.from_file("first", sets=sets), list[str]()
    assert run.prep()["vocab_size"] == 280
    assert run.verify()["problems"] == []
    assert run.train(on_line=lines.append)["state"] == "done"
    assert lines
    assert homing.load("first", device="cpu").generate("The moss", tokens=4, seed=1)
    assert capfd.readouterr() == ("", "")
