"""`homing watch`: what it prints and how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing
from tests.cloud.rig import trainer_argv


@pytest.fixture
def cli(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Homing]:
    lay_out(tmp_path, monkeypatch, steps=12, step_s=0.02)
    yield typing(capsys, monkeypatch)
    clear(homing_home)


def test_it_prints_lines_with_money_until_the_end_and_names_the_next_verbs(cli: Homing) -> None:
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    said = cli("watch", "moss", "--every", "1")
    assert said.code == 0
    assert "step 12/12 | loss 0.417 | 6.4k tok/s | mfu 41% | $" in said.out
    assert "once upon a time" in said.out
    assert said.out.strip().endswith("done: All steps are done.")
    assert "Training complete. Fetch it: homing fetch moss" in said.err
    lines = [json.loads(line) for line in cli("watch", "--json").out.splitlines()]
    assert {line["schema"] for line in lines} == {"homing.watch/1"}
    assert lines[-1]["kind"] == "end"
    assert lines[-1]["data"]["state"] == "done"


@pytest.mark.slow
def test_a_failed_run_exits_1(cli: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "homing.cloud.boot.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=9, step_s=0.0, how="fail"),
    )
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    said = cli("watch", "moss")
    assert said.code == 1
    assert "failed: The loss is not finite." in said.out
    assert "homing logs moss" in said.err


def test_a_stopped_run_of_several_phases_says_in_which_and_what_all_of_them_would_take(
    cli: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Path("runs/moss.yaml").read_text()
    Path("runs/moss.yaml").write_text(lines.replace("train:", "  - {kind: mid, steps: 7, batch_tokens: 128}\ntrain:"))
    monkeypatch.setattr(
        "homing.cloud.boot.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=5000, step_s=0.02),
    )
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    assert cli("stop", "moss").code == 0
    said = cli("watch", "moss").err
    assert "Stopped in pretrain at step " in said
    assert " of 20. What it has learned: homing fetch moss" in said
    found = re.search(r"To the end: about \$([\d.]+) more: homing launch moss --resume --spend-limit ([\d.]+)", said)
    assert found, said
    assert 0 < float(found[1]) < float(found[2])


@pytest.mark.parametrize("every", ["0", "-5", "soon", "2w"])
def test_a_bad_interval_is_refused(cli: Homing, every: str) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert cli("watch", "moss", f"--every={every}").code == 2


def test_with_no_run_yet_it_says_so_and_where_the_sum_is_told(cli: Homing) -> None:
    said = cli("watch")
    assert said.code == 2
    assert "no run yet" in said.err
    named = cli("watch", "moss")
    assert "moss has not been launched yet" in named.err
    assert "how to begin: homing plan moss\n" in named.err


@pytest.mark.slow
def test_a_smoke_run_that_came_through_is_noted(cli: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cloud.rig import make_data

    from homing.config import has_smoke_passed

    make_data(Path("data/moss-smoke"))
    assert cli("launch", "moss", "--smoke", "--spend-limit", "1", "--yes").code == 0
    assert cli("watch", "moss-smoke").code == 0
    assert has_smoke_passed(Path("runs/moss.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "where", "said"),
    [
        (["watch", "moss"], "homing.cli.watch.watch", "moss goes on. Stop it: homing stop moss"),
        (["stop", "moss"], "homing.cli.stop.wait_for_stop", "the request stays and is obeyed"),
    ],
)
def test_leaving_off_waiting_says_what_goes_on(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, verb: list[str], where: str, said: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    cli("launch", "moss", "--spend-limit", "1", "--yes")
    monkeypatch.setattr("homing.cli.stop.ask_to_stop", lambda home, row: 1)  # the short run may have ended meanwhile
    monkeypatch.setattr(where, interrupted)
    told = cli(*verb)
    assert told.code == 130
    assert said in told.err
