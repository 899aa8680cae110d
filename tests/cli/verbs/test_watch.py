"""`homing watch`: what it prints and how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with
from tests.cloud.rig import TRAINER, trainer_argv

from homing.cli import output
from homing.cli.verbs.watch import _folded, _show
from homing.cloud.watch.follow import Report
from homing.wire import file_names

cli = cli_with(steps=12)


@pytest.mark.slow
@pytest.mark.acceptance(120, 151)
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
def test_watch_of_a_fetched_run_says_where_the_model_is_and_how_to_use_it(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    assert cli("fetch", "moss").code == 0
    said = cli("watch", "moss")
    assert "Training complete. Model saved in models/moss (pretrain step " in said.err
    assert "Chat with it: homing chat moss   Use it elsewhere: homing export moss" in said.err
    assert "homing fetch" not in said.err
    manifest = Path("models/moss", file_names.MANIFEST)
    manifest.write_text(manifest.read_text().replace('"is_final": true', '"is_final": false'))
    assert "; fetch the latest: homing fetch moss" in cli("watch", "moss").err


@pytest.mark.acceptance("P1")
@pytest.mark.slow
def test_a_failed_run_exits_1(cli: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=9, step_s=0.0, how="fail"),
    )
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    said = cli("watch", "moss")
    assert said.code == 1
    assert "failed: The loss is not finite." in said.out
    assert "homing logs moss" in said.err


def test_a_run_that_ended_before_its_first_checkpoint_is_not_offered_to_be_fetched(
    cli: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=9, step_s=600.0),
    )
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    assert cli("destroy", "moss", "--yes").code == 0
    said = cli("watch", "moss").err
    assert "No checkpoint reached the store." in said
    assert "homing fetch" not in said
    assert cli("fetch", "moss").code != 0


@pytest.mark.acceptance(123)
@pytest.mark.slow
def test_a_stopped_run_names_its_phase_and_the_total_of_all_phases(
    cli: Homing, homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Path("runs/moss.yaml").read_text()
    Path("runs/moss.yaml").write_text(lines.replace("train:", "  - {kind: mid, steps: 7, batch_tokens: 128}\ntrain:"))
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=5000, step_s=0.02),
    )
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    assert cli("stop", "moss").code == 0
    said = cli("watch", "moss").err
    assert "Stopped in pretrain at step " in said
    assert " of 20. Fetch what it trained: homing fetch moss" in said
    # The limit of $1 is enough, so none is named: one that was would lower it.
    found = re.search(r"To finish: about \$([\d.]+) more, within its limit of \$1.00: (.*)\n", said)
    assert found, said
    assert (0 < float(found[1]) < 1, found[2]) == (True, "homing launch moss --resume")
    # To begin anew is paid for too: here on a machine that takes ten hours to boot.
    (note,) = (homing_home / "runs").glob("*/launch.json")
    order = json.loads(note.read_text())
    order["offer"]["boot_s"] = 36_000.0
    note.write_text(json.dumps(order))
    slow = re.search(r"about \$([\d.]+) more: homing launch moss --resume --spend-limit ([\d.]+)", cli("watch").err)
    boot_usd = 10 * float(order["offer"]["rate_usd_per_hour"])
    assert slow
    assert float(slow[1]) >= boot_usd
    assert float(slow[2]) >= boot_usd


@pytest.mark.slow
def test_a_stopped_run_is_at_the_step_of_its_checkpoint(
    cli: Homing, homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of numbers come only every few steps, and the trainer may stop between two."""
    rare = TRAINER.replace('    line("metrics.jsonl"', '    step % 9 == 1 and line("metrics.jsonl"')
    rare = rare.replace('if ask().get("stop")', 'if step % 9 != 1 and ask().get("stop")')  # however slow the machine is
    monkeypatch.setattr("tests.cloud.rig.TRAINER", rare)
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=5000, step_s=0.2),
    )
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    assert cli("stop", "moss").code == 0
    said = cli("watch", "moss")
    (step,) = {json.loads(path.read_text())["step"] for path in homing_home.glob("**/outcome.json")}
    assert step % 9 != 1, "else this would show nothing"
    assert f"Stopped at step {step} of 20." in said.err
    assert f"step {step}/5,000 | " in said.out.strip().splitlines()[-2]


@pytest.mark.acceptance(110)
def test_a_bad_interval_is_refused(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    for every in ("0", "-5", "soon", "2w"):
        assert cli("watch", "moss", f"--every={every}").code == 2, every


def test_watch_without_runs_says_so_and_where_to_see_the_total(cli: Homing) -> None:
    said = cli("watch")
    assert said.code == 2
    assert "No runs yet" in said.err
    named = cli("watch", "moss")
    assert "moss has not been launched yet" in named.err
    assert "See what it costs: homing plan moss\n" in named.err


@pytest.mark.acceptance(4)
@pytest.mark.slow
def test_how_a_smoke_run_ended_is_noted(cli: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cloud.rig import make_data

    from homing.config.resolve.smoke_profile import has_smoke_failed, has_smoke_passed

    make_data(Path("data/moss-smoke"))
    assert cli("launch", "moss", "--smoke", "--spend-limit", "1", "--yes").code == 0
    assert cli("watch", "moss-smoke").code == 0
    assert has_smoke_passed(Path("runs/moss.yaml"))
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=9, step_s=0.0, how="fail"),
    )
    assert cli("launch", "moss", "--smoke", "--spend-limit", "1", "--yes").code == 0
    assert cli("watch", "moss-smoke").code == 1
    assert has_smoke_failed(Path("runs/moss.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "where", "said"),
    [
        (["watch", "moss"], "homing.api.runs.watch_run.watch", "moss keeps running. Stop it: homing stop moss"),
        (["stop", "moss"], "homing.api.runs.stop_run.wait_for_stop", "the stop request remains active"),
    ],
)
def test_leaving_off_waiting_says_what_goes_on(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, verb: list[str], where: str, said: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    cli("launch", "moss", "--spend-limit", "1", "--yes")
    monkeypatch.setattr(
        "homing.api.runs.stop_run.ask_to_stop", lambda home, row: 1
    )  # the short run may have ended meanwhile
    monkeypatch.setattr(where, interrupted)
    done = cli(*verb)
    assert done.code == 130
    assert said in done.err


def test_a_sample_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    output.configure(loudness=0, is_json=False)
    _show(Report("sample", "a\x1b[2Jb\tc\x07\n\u00e4 \u200d", {}))
    assert capsys.readouterr().out == "    a\ufffd[2Jb\tc\ufffd\n    \u00e4 \u200d\n"


def test_on_a_narrow_terminal_a_line_is_broken_at_its_bars_and_no_figure_in_two() -> None:
    line = (
        "step 1,200/20,000 | loss 3.214 | 412k tok/s | mfu 41% | GPU 97%, GPU memory 62% | $1.83 of $12.00 | eta 2h10m"
    )
    assert _folded(line, 200) == line
    rows = _folded(line, 80).split("\n")
    assert rows == [
        "step 1,200/20,000 | loss 3.214 | 412k tok/s | mfu 41% | GPU 97%, GPU memory 62%",
        "    | $1.83 of $12.00 | eta 2h10m",
    ]
    assert _folded(line, 20).replace("\n   ", "") == line, "nothing is lost"
