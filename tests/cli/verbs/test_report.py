"""`homing report`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with
from tests.lm.tiny import make_data
from tests.report.kept_run import RUN_ID, WEIGHTS_SHA256, two_phases, write_run_dir

import homing
from homing.api.lookup.find_models import find_model
from homing.wire import codec, file_names
from homing.wire.event_lines import Outcome

TINY = """
name: tiny
data: {text: [text/*.txt]}
tokenizer: {vocab_size: 272}
model: {arch: qwen3, layers: 1, width: 32, heads: 2, head_size: 16, ffn_width: 64, context: 32, tied: true}
phases:
  - {kind: pretrain, steps: 6, batch_tokens: 128, lr: 0.01, warmup_steps: 1}
train: {device: cpu, threads: 1, log_every: 1}
"""

cli = cli_with(steps=12)
endless = cli_with(steps=100_000)


@pytest.fixture
def kept(homing_home: Path, tmp_path: Path) -> Path:
    """A run that was trained here, and is done."""
    folder = homing_home / "runs" / RUN_ID
    write_run_dir(folder, two_phases(tmp_path))
    (folder / file_names.TRAINER_LOCK).touch()
    return folder


def test_a_page_about_a_run_that_was_trained_here_is_on_stdout(cli: Homing, kept: Path) -> None:
    said = cli("report", "moss")
    assert said.code == 0
    assert said.out.startswith("<!-- homing report/1 -->\n\n# moss\n\nThe run is done: Every phase is trained.\n")
    for words in (
        "| parameters | 100,000 |",
        "| mid | 10 of 10 |",
        "once at 20",
        "homing rented nothing for this run",
        WEIGHTS_SHA256,
    ):
        assert words in said.out
    assert f"homing chat {RUN_ID}" in said.out
    assert "![" not in said.out, "a picture that does not exist"
    assert f"homing report {RUN_ID} --out moss.html" in said.err
    assert cli("report").out == said.out, "the newest where none is named"


@pytest.mark.regression("name-means-newest-finished")
def test_a_later_run_that_was_stopped_is_not_the_one_that_a_name_means(cli: Homing, kept: Path, tmp_path: Path) -> None:
    later = "moss-20260102-120000-beef"
    folder = kept.with_name(later)
    write_run_dir(folder, dataclasses.replace(two_phases(tmp_path), id=later))
    (folder / file_names.TRAINER_LOCK).touch()
    (folder / file_names.OUTCOME).write_text(codec.dumps(Outcome("stopped", "Stopped by a person.", 75, "pretrain", 1)))
    said = cli("report", "moss", "--json")
    assert said.json["run"] == RUN_ID, "the newest that is finished"
    assert f"moss@{later}" in said.err, "how to ask for the other one"
    assert cli("report", "moss@beef", "--json").json["run"] == later
    assert cli("report", later, "--json").json["run"] == later


@pytest.mark.regression("name-means-newest-finished")
@pytest.mark.slow
def test_the_newest_finished_run_is_meant_also_before_its_model_is_here(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    cli("fetch", "moss")
    first = json.loads(Path("models/moss/manifest.json").read_bytes())["run_id"]
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    second = cli("report", "moss", "--json").json["run"]
    assert second > first
    refused = cli("export", "moss")
    assert refused.code != 0
    assert f"The newest finished run of moss is {second}" in refused.err, "and no older model in its place"
    assert "homing fetch moss" in refused.err
    assert f"moss@{first}" in refused.err
    assert cli("fetch", "moss", "--json").json["model_dir"] == f"models/{second}"
    assert find_model("moss") == Path("models") / second


def test_it_is_written_as_html_or_as_markdown_with_its_picture(cli: Homing, kept: Path) -> None:
    said = cli("report", "moss", "--out", "out/moss.html")
    assert (said.code, said.out) == (0, "")
    assert "<svg " in Path("out/moss.html").read_text()
    said = cli("report", "moss", "--out", "moss.md")
    assert "Written: moss.md and moss.svg" in said.err
    assert "](moss.svg)" in Path("moss.md").read_text()
    assert "<svg " in Path("moss.svg").read_text()
    assert cli("report", "moss", "--out", "moss.md").code == 0, "again, over its own"


def test_report_does_not_overwrite_a_file_that_it_did_not_write(cli: Homing, kept: Path) -> None:
    for name in ("README.md", "moss.svg"):
        Path(name).write_text("mine")
    said = cli("report", "moss", "--out", "README.md")
    assert said.code == 2
    assert "README.md already exists" in said.err
    assert "--out README-report.md" in said.err
    assert cli("report", "moss", "--out", "moss.md").code == 2, "nor its picture"
    assert not Path("moss.md").exists()
    assert Path("README.md").read_text() == Path("moss.svg").read_text() == "mine"


def test_another_ending_is_refused(cli: Homing, kept: Path) -> None:
    said = cli("report", "moss", "--out", "moss.pdf")
    assert said.code == 2
    assert "--out moss.html" in said.err


def test_the_same_as_data(cli: Homing, kept: Path) -> None:
    document = cli("report", "moss", "--json", "--out", "moss.html").json
    assert document["schema"] == "homing.report/1"
    assert (document["run"], document["state"], document["is_finished"]) == (RUN_ID, "done", True)
    assert [phase["kind"] for phase in document["phases"]] == ["pretrain", "mid"]
    assert document["files"] == ["moss.html"]


def test_figures_of_an_evaluation_stand_in_it(cli: Homing, kept: Path) -> None:
    score = {"name": "acc", "value": 0.5, "low": 0.4, "high": 0.6, "num_units": 10}
    model = {"phase": "mid", "step": 10, "files": {"model.safetensors": WEIGHTS_SHA256}}
    evals = {"schema": "homing.eval/1", "models": [model], "results": [[{"name": "quiz", "scores": [score]}]]}
    Path("evals.json").write_text(json.dumps(evals))
    assert "| mid 10 | quiz |  | acc | 0.5000 | 0.4000 to 0.6000 | 10 |" in cli("report", "--eval", "evals.json").out
    assert cli("report", "moss", "--eval", "moss.txt").code == 2


def test_an_unknown_run_is_a_usage_error(cli: Homing) -> None:
    assert cli("report", "fern").code == 2


def test_next_after_a_run_without_a_checkpoint_starts_over(endless: Homing, homing_home: Path) -> None:
    assert endless("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    assert endless("destroy", "moss", "--yes").code == 0
    for saved in homing_home.rglob("checkpoints"):
        shutil.rmtree(saved)  # on a slow machine the run may have saved one before it was destroyed
    assert endless("report", "moss", "--json").json["next"] == ["homing launch moss"]


@pytest.mark.slow
def test_a_launched_run_from_its_first_steps_to_its_receipt(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert cli("watch", "moss").code == 0
    document = cli("report", "moss", "--json").json
    (attempt,) = document["attempts"]
    assert (attempt["provider"], attempt["state"], document["spend_limit_usd"]) == ("local", "gone", "1")
    assert document["phases"][0]["step"] == 12
    assert document["problems"] == []
    page = cli("report", "moss").out
    assert "of $1.00 (the limit)." in page
    assert "homing fetch moss" in page
    assert "once upon a time" in page
    cli("fetch", "moss")
    fetched = cli("report", "moss").out
    assert "| models/moss | pretrain 12 | fetched |" in fetched
    assert "homing fetch moss" not in fetched


def test_a_live_run_is_reported_as_far_as_it_is(endless: Homing) -> None:
    endless("launch", "moss", "--spend-limit", "1", "--yes")
    page = endless("report", "moss").out
    assert "NOT FINISHED. The run is running." in page
    assert " of $1.00 so far (the limit)." in page
    assert "homing watch moss" in page
    assert "homing launch" not in page


@pytest.mark.slow
def test_a_report_of_a_real_homing_train_run(cli: Homing) -> None:
    Path("runs/tiny.yaml").write_text(TINY)
    make_data(Path("data/tiny"))
    subprocess.run([sys.executable, "-m", "homing.cli", "train", "tiny"], check=True, capture_output=True, timeout=120)
    document = cli("report", "tiny", "--json").json
    (phase,) = document["phases"]
    assert (phase["step"], len(phase["curve"]), phase["last"]["step"]) == (6, 6, 6)
    assert phase["choices"]["device"] == "cpu"
    assert "torch" in document["machines"][0]
    assert [sample["step"] for sample in document["samples"]] == [6]
    assert [each["called"] for each in document["kept"]] == [["latest", "best"]]
    assert document["data"][0]["problem"] == ""
    assert document["happenings"] == [], "a run in which nothing happened: its events are routine"
    assert document["problems"] == []


@pytest.mark.regression("maintainers-report")
def test_the_report_for_maintainers_has_events_and_no_private_data(
    cli: Homing, kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "canary-of-the-account")
    path = kept / file_names.EVENTS
    last = json.loads(path.read_text().splitlines()[-1])
    secrets = (
        "canary-of-the-account rpa_ABCDEFGH12345678 hf_abcdefgh12345678 me@example.org 203.0.113.7 Bearer abcd1234efgh"
    )
    spoken = {**last, "text": f"{last['text']} {secrets} {Path.home()}/work", "t": last["t"] + 1}
    with path.open("a") as file:
        file.write(json.dumps(spoken) + "\n")
    said = cli("report", "moss", "--for-maintainers")
    assert said.code == 0, said.err
    assert "# Report for the maintainers" in said.out
    assert '"homing":' in said.out
    assert '"happenings":' in said.out
    for secret in (*secrets.split(" ")[:5], "abcd1234efgh"):
        assert secret not in said.out
    if str(Path.home()) != "/root":
        assert str(Path.home()) not in said.out
    assert '"samples"' not in said.out
    written = tmp_path / "for-them.md"
    assert cli("report", "moss", "--for-maintainers", "--out", str(written)).code == 0
    assert "canary" not in written.read_text()


def test_the_python_api_writes_the_page_of_the_verb(cli: Homing, kept: Path) -> None:
    assert cli("report", "moss", "--out", "typed.html").code == 0
    assert homing.Run("moss").report() == Path("moss.html")
    assert homing.Run("moss").report(to="called.html") == Path("called.html")
    pages = {Path(name).read_text() for name in ("typed.html", "moss.html", "called.html")}
    assert len(pages) == 1
    with pytest.raises(homing.UsageError, match="unknown file extension"):
        homing.Run("moss").report(to="moss.pdf")
