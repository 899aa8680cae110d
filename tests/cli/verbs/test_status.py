"""`homing status`."""

from __future__ import annotations

import json
import shlex
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, cli_with, lay_out, typing

from homing.api.lookup.status import next_words
from homing.cli import run_verb
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.reconcile.run_status import Status

cli = cli_with(steps=100_000)


def test_a_store_with_shell_characters_is_quoted_in_the_adopt_command() -> None:
    store = "s3://a/b?endpoint=http://127.0.0.1:9&region=x"
    row = RunRow("moss-1", "moss", "adopted", 0.0, store, "0" * 64, "1")
    said = next_words(Status(row, [], None, Decimal(0), None), "moss")
    assert said.endswith(f": homing adopt {shlex.quote(store)} moss-1")


@pytest.mark.acceptance(109, 113, "X21")
def test_one_run_now_with_its_instance_and_dollars(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.cloud.providers.local.provider.Local.page", "https://cloud.test/instances")
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    said = cli("status")
    assert said.code == 0
    for word in ("running", "billing yes", "$0.36/h", "of $1.00", "page       https://cloud.test/instances"):
        assert word in said.out
    assert "homing watch moss" in said.err
    status = cli("status", "moss", "--json").json
    assert status["schema"] == "homing.status/1"
    assert status["is_billing"] is True
    assert status["page"] == "https://cloud.test/instances"
    assert status["instances"][0]["billing"] == "yes"
    assert status["heartbeat"]["state"] in ("booting", "fetching", "training")


@pytest.mark.acceptance(109)
@pytest.mark.slow
def test_a_store_that_is_away_is_said_and_not_shown_as_nothing(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    (homing_home / "store").rename(homing_home / "gone")
    said = cli("status", "moss")
    (homing_home / "gone").rename(homing_home / "store")
    assert "Could not read the store" in said.err
    assert "billing yes" in said.out


@pytest.mark.acceptance(110)
@pytest.mark.slow
def test_it_looks_again_until_the_run_has_ended(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    live = cli("status", "moss").out
    for word in ("guards ", "agent and dead-man", " so far."):
        assert word in live
    cli("stop", "moss", "--no-wait")
    said = cli("status", "moss", "--watch", "1", "--json")
    rounds = [json.loads(line) for line in said.out.splitlines()]
    assert rounds[-1]["state"] == "stopped"
    assert not rounds[-1]["is_billing"]
    assert cli("status", "moss", "--watch").code == 0, "without its seconds"
    assert run_verb._fill_watch(["status", "--watch", "moss"]) == ["status", "--watch", "60", "moss"]
    assert cli("status", "moss", "--watch", "0.1").code == 2
    over = cli("status", "moss").out
    for word in ("all, verified; the newest checkpoint is pretrain step", " total. "):
        assert word in over
    for word in ("guards ", "so far", "eta "):
        assert word not in over
    assert "eta" not in cli("status", "moss").out


@pytest.mark.acceptance(126)
@pytest.mark.slow
def test_status_shows_the_last_output_of_a_failed_run_after_the_instance_is_gone(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_out(tmp_path, monkeypatch, steps=10, step_s=0.02, how="fail")
    cli = typing(capsys, monkeypatch)
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert cli("watch", "moss").code == 1
    said = cli("status", "moss")
    assert "failed: The loss is not finite." in said.out
    assert "Traceback: boom" in said.out
    assert cli("status", "moss", "--json").json["outcome"]["log_tail"].endswith("Traceback: boom")
    clear(homing_home)


def test_an_unknown_run_lists_those_known(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    said = cli("status", "fern", "--json")
    assert said.code == 2
    assert json.loads(said.out)["why"] == "Known: moss."
