"""A run to its Report, from what is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.kept_run import RUN_ID, WEIGHTS_SHA256, add, launched, trained, two_phases, write_run_dir

from homing.cloud.contact import action_log
from homing.cloud.home import Home
from homing.report import read_report, render_markdown
from homing.report.report_data import Validation
from homing.wire import codec, file_names
from homing.wire.event_lines import Metric
from homing.world import World


@pytest.fixture
def home(homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.chdir(tmp_path)
    homing_home.mkdir()
    return Home(homing_home, World())


def test_a_locally_trained_run_is_reported_from_its_folder(home: Home, tmp_path: Path) -> None:
    write_run_dir(home.run_dir(RUN_ID), two_phases(tmp_path))
    report = read_report(home, trained())
    assert report.is_finished
    assert report.is_trained_here
    assert (report.began_at, report.ended_at, report.spend_usd) == (100.0, 160.0, None)
    assert report.made is not None
    assert (report.made.seed, report.made.num_params, report.made.model["width"]) == (7, 100_000, 64)
    assert report.machines == ["homing 0.1.0 trains moss on cuda (NVIDIA H200), torch 2.9."], "each once"
    pretrain, mid = report.phases
    assert (pretrain.kind, pretrain.step, pretrain.num_steps, pretrain.num_tokens) == ("pretrain", 20, 20, 1280)
    assert (pretrain.best, pretrain.last) == (Validation(20, 1.0, 1.0), Validation(20, 1.0, 1.0))
    assert (pretrain.tokens_per_s, pretrain.mfu, pretrain.seconds) == (1050.0, 0.4, 10.0), "medians; steps x their time"
    assert pretrain.curve[0] == (1, 5.0)
    assert (mid.step, mid.choices) == (10, {"precision": "bf16"})
    assert [(each.kind, each.step) for each in report.happenings] == [("micro_batch_lowered", 2)]
    assert [(each.step, each.text) for each in report.samples] == [
        (5, "once at 5"),
        (15, "once at 15"),
        (20, "once at 20"),
    ]
    (kept,) = report.kept
    assert (kept.where, kept.called) == (
        str(home.run_dir(RUN_ID) / "checkpoints/mid/step-00000010"),
        ["latest", "best"],
    )
    assert kept.weights == {file_names.WEIGHTS: WEIGHTS_SHA256}
    assert report.problems == []


def test_data_is_reported_only_from_the_manifest_that_the_run_used(home: Home, tmp_path: Path) -> None:
    write_run_dir(home.run_dir(RUN_ID), two_phases(tmp_path))
    (data,) = read_report(home, trained()).data
    assert (data.of, data.vocab_size, data.num_files, data.files[0]["path"]) == ("the run", 512, 1, "moss.txt")
    assert data.splits["val"] == {"num_tokens": 32, "num_documents": 1, "num_text_bytes": 64}
    manifest = tmp_path / "data" / file_names.MANIFEST
    manifest.write_text(manifest.read_text().replace("moss.txt", "other.txt"))
    (data,) = read_report(home, trained()).data
    assert data.problem == "the data in its folder has been prepared again since the run"
    assert data.files == []
    assert data.splits["train"] == {"num_tokens": 1024}, "as the run itself says"
    manifest.unlink()
    assert read_report(home, trained()).data[0].problem == "it is neither in the store nor on this computer"


def test_a_launched_run_is_reported_from_its_store_with_attempts_and_dollars(home: Home, tmp_path: Path) -> None:
    write_run_dir(tmp_path / "store/runs" / RUN_ID, two_phases(tmp_path))
    subject = launched(home, f"file:{tmp_path}/store")
    action_log.note(home, RUN_ID, "relaunch", "relaunched", "It continues as attempt 2.")
    report = read_report(home, subject)
    assert report.phases[0].step == 20
    assert (report.spend_usd, report.spend_limit_usd, report.is_at_most) == ("2.00", "12", True)
    assert [(each.number, each.spend_usd, each.is_at_most) for each in report.attempts] == [
        (1, "0.90", False),
        (2, "1.10", True),
    ]
    assert report.offer["device"] == "NVIDIA H200"
    assert [each.kind for each in report.happenings] == ["micro_batch_lowered", "relaunched"]
    assert report.kept[0].where == f"file:{tmp_path}/store/runs/{RUN_ID}/checkpoints/mid/step-00000010"
    page = render_markdown(report)
    assert "Total: at most $2.00 of $12.00 (the limit)." in page
    assert "At most: neither homing nor the provider knows when the instance ended" in page
    assert (
        "| 1 | fake | 1x H200 | 1970-01-01 00:01:30Z | 1970-01-01 00:16:30Z | gone | preempted by the provider |"
        in page
    )


def test_without_its_store_the_report_uses_fetched_files_and_says_so(home: Home, tmp_path: Path) -> None:
    subject = launched(home, f"file:{tmp_path}/away")
    write_run_dir(home.run_dir(RUN_ID), two_phases(tmp_path))
    report = read_report(home, subject)
    assert report.phases[0].step == 20
    assert report.spend_usd == "2.00"
    (problem,) = report.problems
    assert problem.startswith(f"file:{tmp_path}/away could not be read (")
    (tmp_path / "away").mkdir()
    (problem,) = read_report(home, subject).problems
    assert "it has no data for this run" in problem


def test_models_of_this_run_are_listed(home: Home, tmp_path: Path) -> None:
    write_run_dir(home.run_dir(RUN_ID), two_phases(tmp_path))
    manifest = (home.run_dir(RUN_ID) / "checkpoints/mid/step-00000010" / file_names.MANIFEST).read_text()
    for name, text in (("moss", manifest), ("fern", manifest.replace(RUN_ID, "fern-1")), ("bare", "{")):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / file_names.MANIFEST).write_text(text)
    kept = read_report(home, trained()).kept
    assert [each.where for each in kept if each.called == ["fetched"]] == ["models/moss"]


def test_an_unfinished_run_tells_how_far_it_is_and_that_it_is_not_done(home: Home, tmp_path: Path) -> None:
    folder = home.run_dir(RUN_ID)
    folder.mkdir(parents=True)
    (folder / file_names.RUN).write_text(codec.dumps(two_phases(tmp_path)))
    add(folder, file_names.METRICS, Metric(1.0, "pretrain", 3, 20, 192, loss=4.0))
    with open(folder / file_names.METRICS, "a") as file:
        file.write('{"torn')
    report = read_report(home, trained("unfinished"))
    page = render_markdown(report)
    assert "NOT FINISHED. The run is unfinished." in page
    assert "| pretrain | 3 of 20 |" in page
    assert "| mid | not started, of 10 |" in page
    assert report.ended_at is None


def test_nothing_stored_is_said_to_be_absent_and_nothing_is_made_up(home: Home) -> None:
    home.run_dir(RUN_ID).mkdir(parents=True)
    report = read_report(home, trained("unfinished"))
    page = render_markdown(report)
    for words in (
        "The settings (run.json) could not be read.",
        "No prepared data is recorded.",
        "No metrics are recorded.",
        "The trainer did not record the hardware.",
        "No checkpoint or model was found.",
    ):
        assert words in page
    assert report.phases == []
    assert "Problems" not in page


def test_a_damaged_document_is_named_and_the_rest_is_reported(home: Home, tmp_path: Path) -> None:
    folder = home.run_dir(RUN_ID)
    write_run_dir(folder, two_phases(tmp_path))
    (folder / file_names.RUN).write_text("{")
    (folder / file_names.OUTCOME).write_text("[]")
    report = read_report(home, trained())
    assert report.made is None
    assert [phase.step for phase in report.phases] == [20, 10], "by their lines alone"
    assert any(file_names.RUN in problem for problem in report.problems)
    assert any(file_names.OUTCOME in problem for problem in report.problems)
    assert "Problems" in render_markdown(report)
