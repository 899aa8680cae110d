"""Which run a name means: names are known to the whole home, run files belong to a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.control_rig import RUN_FILE, Homing, clear, lay_out, typing
from tests.cloud.rig import MOSS, make_data, trainer_argv

from homing.api.train_here import newest_unfinished
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import PREEMPTED, RunRow
from homing.config.home_and_run_files import PROJECT_NOTE, project_note
from homing.wire import codec, file_names
from homing.wire.event_lines import Outcome
from homing.world import World


@pytest.fixture
def w(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return lay_out(tmp_path, monkeypatch, steps=6, step_s=0.02)


@pytest.fixture
def cli(
    w: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Homing]:
    yield typing(capsys, monkeypatch)
    clear(homing_home)


def another_folder(tmp_path: Path) -> Path:
    """The same run file, word for word, on other text."""
    folder = tmp_path / "x"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs/moss.yaml").write_text(RUN_FILE)
    (folder / "moss.txt").write_bytes(MOSS)
    make_data(folder / "data/moss")
    manifest = folder / "data/moss" / file_names.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "made_by": "other text"}))
    return folder


def launched(cli: Homing) -> str:
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--json")
    assert said.code == 0, said.err
    assert cli("watch", "moss").code == 0
    return str(said.json["run"])


@pytest.mark.acceptance(131)
@pytest.mark.slow
def test_a_run_of_another_folder_is_not_brought_here_under_the_name_of_this_folders_own(
    cli: Homing, w: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = launched(cli)
    x = another_folder(tmp_path)
    monkeypatch.chdir(x)
    for argv in (
        ("fetch", "moss"),
        ("stop", "moss"),
        ("limit", "moss", "--spend", "3"),
        ("destroy", "moss", "--yes"),
    ):
        refused = cli(*argv)
        assert refused.code == 2, argv
        assert f"{reference} was started in {w}; the current folder is {x}." in refused.err
        assert (
            f"homing {argv[0]} {reference}{' --spend 3' * (argv[0] == 'limit')}   "
            "For the run file in this folder: homing plan moss" in refused.err
        )
    unnamed = cli("fetch")
    assert unnamed.code == 2
    assert "No run was started in this folder." in unnamed.err
    assert f"Use its id: {reference}" in unnamed.err
    assert not Path("models").exists()
    assert f"use its id: homing fetch {reference}" in cli("chat", "moss").err
    again = cli("launch", "moss", "--resume", "--spend-limit", "1", "--yes")
    assert again.code == 2
    assert f"homing launch {reference} --resume" in again.err
    for verb in ("status", "watch", "logs"):
        done = cli(verb, "moss")
        assert done.code == 0
        assert (
            f"warning: {reference} was started in {w}; runs/moss.yaml in this folder has not been launched yet."
            in done.err
        )

    by_id = cli("fetch", reference)
    assert by_id.out == f"models/{reference}\n", "never under the name of this folder's own run"
    assert "models/moss is reserved for the run moss of this folder" in by_id.err
    assert f"homing destroy {reference}" in by_id.err
    assert "--phase sft" not in by_id.err, "moss means another run here"
    assert f"Model saved in models/{reference} (pretrain step 6)" in cli("watch", reference).err

    own = launched(cli)
    assert own != reference
    assert cli("fetch", "moss", "--json").json["run"] == own
    monkeypatch.chdir(w)
    assert cli("status", "moss", "--json").json["run"] == reference, "older than the other folder's, and this one's"
    assert cli("fetch", "moss").out == "models/moss\n"


@pytest.mark.slow
def test_a_phase_does_not_start_from_another_folders_model_of_the_same_name(
    cli: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = launched(cli)
    cli("fetch", "moss")
    mine = Path("models/moss").absolute()
    sft = "\n  - {kind: mid, steps: 4, batch_tokens: 128, data: {text: [moss.txt]}}\ntrain:"
    x = another_folder(tmp_path)
    for folder in (mine.parents[1], x):
        (folder / "runs/moss.yaml").write_text(RUN_FILE.replace("\ntrain:", sft))
    own = cli("plan", "moss", "--set", "train.only=mid", "--resolved")
    assert "starts from" not in own.err
    shutil.copytree(mine, x / "models/moss")  # as an older homing fetched it
    monkeypatch.chdir(x)
    refused = cli("launch", "moss", "--phase", "mid", "--spend-limit", "1", "--yes")
    assert refused.code == 2
    assert f"{x}/models/moss belongs to another run moss, from {mine.parents[1]}." in refused.err
    assert f"--set phases.1.init_from={x}/models/moss" in refused.err
    assert reference


@pytest.mark.slow
def test_a_folder_that_was_moved_stays_its_own_and_one_without_a_run_file_has_no_other(
    cli: Homing, w: Path, homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launched(cli)
    moved = w.rename(tmp_path / "moved")
    monkeypatch.chdir(moved)
    said = cli("fetch", "moss")
    assert said.out == "models/moss\n"
    assert "started in" not in said.err
    bare = tmp_path / "bare"
    bare.mkdir()
    monkeypatch.chdir(bare)
    said = cli("fetch", "moss")
    assert said.out == "models/moss\n"
    assert f"{run} was started in {w}." in said.err
    monkeypatch.chdir(another_folder(tmp_path))
    assert cli("fetch", "moss").code == 2
    (homing_home / "runs" / run / "project.json").unlink()
    assert cli("fetch", "moss").code == 0, "the folder of an older run is unknown"


@pytest.mark.slow
@pytest.mark.parametrize("has_run_file", [True, False], ids=["run file", "bare"])
def test_what_changes_or_ends_a_run_of_another_folder_wants_its_id_which_works_from_anywhere(
    w: Path,
    homing_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_run_file: bool,
) -> None:
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=100_000, step_s=0.02),
    )
    cli = typing(capsys, monkeypatch)
    try:
        reference = str(cli("launch", "moss", "--spend-limit", "1", "--yes", "--json").json["run"])
        bare = tmp_path / "bare"
        bare.mkdir()
        monkeypatch.chdir(another_folder(tmp_path) if has_run_file else bare)
        for argv in (
            ("destroy", "moss", "--yes"),
            ("destroy", "moss", "--stored", "--yes"),
            ("stop", "moss"),
            ("limit", "moss", "--spend", "3"),
            ("launch", "moss", "--resume", "--spend-limit", "1", "--yes"),
        ):
            refused = cli(*argv)
            assert refused.code == 2, argv
            assert f"{reference} was started in {w}; the current folder is {Path.cwd()}." in refused.err
            assert f"homing {argv[0]} {reference}" in refused.err, "the very command"
        if not has_run_file:
            assert "A name selects a run started in this folder, and no such run is called moss." in refused.err
        (line,) = Home(homing_home, World()).ledger.lines(reference)
        assert line.destroyed_at is None, "it is not destroyed"
        assert f"Stop it: homing stop {reference}" in cli("status", reference).err, "what is said to type is what works"
        if has_run_file:
            taken = cli("launch", "moss", "--spend-limit", "1", "--yes")
            assert f"homing destroy {reference}" in taken.err, "its name is taken, and its id ends it"
        assert cli("destroy", reference, "--yes").code == 0
        (line,) = Home(homing_home, World()).ledger.lines(reference)
        assert line.destroyed_at is not None
        refused = cli("destroy", "moss")
        assert refused.code == 2, "also when it has ended: do not report that another run is gone"
        assert f"homing destroy {reference}" in refused.err
        monkeypatch.chdir(w)
        assert "nothing is billing" in cli("destroy", "moss").err
    finally:
        clear(homing_home)


@pytest.mark.slow
def test_a_copy_of_a_folder_may_use_its_run_and_each_has_its_own_from_then_on(
    cli: Homing, w: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launched(cli)
    copy = Path(shutil.copytree(w, tmp_path / "copy"))
    monkeypatch.chdir(copy)
    assert cli("fetch", "moss", "--json").json["run"] == first
    second = launched(cli)
    assert cli("status", "moss", "--json").json["run"] == second
    monkeypatch.chdir(w)
    assert cli("status", "moss", "--json").json["run"] == first


def test_an_unfinished_run_of_another_folder_is_not_gone_on_with(
    tmp_path: Path, homing_home: Path, w: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = homing_home / "runs"
    for run_id, folder in (("moss-20260101-120000-aaaa", w), ("moss-20260201-120000-bbbb", tmp_path)):
        (runs / run_id).mkdir(parents=True)
        (runs / run_id / file_names.TRAINER_LOCK).touch()
        (runs / run_id / PROJECT_NOTE).write_bytes(project_note(str(folder)))
    assert newest_unfinished(runs, "moss") == runs / "moss-20260101-120000-aaaa"
    monkeypatch.chdir(tmp_path)
    assert newest_unfinished(runs, "moss") == runs / "moss-20260201-120000-bbbb"


@pytest.mark.slow
def test_a_copied_run_file_that_kept_the_name_is_refused_and_a_renamed_one_means_its_run(cli: Homing, w: Path) -> None:
    launched(cli)
    shutil.copy("runs/moss.yaml", "runs/gg.yaml")
    for argv in (("launch", "gg", "--spend-limit", "1", "--yes"), ("status", "gg"), ("train", "gg"), ("chat", "gg")):
        refused = cli(*argv)
        assert refused.code == 2, argv
        assert "runs/gg.yaml and runs/moss.yaml both describe the run moss." in refused.err
        assert "Add to runs/gg.yaml: name: gg" in refused.err
    planned = cli("plan", "gg")
    assert (
        "warning: runs/gg.yaml refers to run moss, and so does runs/moss.yaml; set name: gg in runs/gg.yaml."
        in planned.err
    )
    dry = cli("launch", "gg", "--set", "name=gg", "--set", "data.dir=data/moss", "--spend-limit", "1", "--dry-run")
    assert dry.code == 0, dry.err
    assert cli("status", "moss").code == 0
    Path("runs/moss.yaml").unlink()
    assert cli("status", "gg", "--json").json["name"] == "moss"
    assert "warning: runs/gg.yaml refers to run moss, because it sets name: moss." in cli("plan", "gg").err


@pytest.mark.slow
def test_a_run_under_another_name_is_begun_again_from_the_file_that_it_was_begun_from(
    cli: Homing, w: Path, homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = cli("launch", "moss", "--name", "walk", "--spend-limit", "1", "--yes", "--json")
    assert cli("watch", "walk").code == 0
    assert "start a new run: homing launch moss --name walk" in cli("launch", "walk", "--resume").err
    unnamed = cli("plan", "walk")
    assert unnamed.code == 2
    assert "started from runs/moss.yaml" in unnamed.err
    assert "Use its file instead of walk: moss" in unnamed.err
    (w / "runs/moss.yaml").write_text(RUN_FILE.replace("0.01", "0.02"))
    copy = homing_home / "runs" / said.json["run"] / file_names.RUN_FILE
    assert f"start a new run: homing launch {copy} --name walk" in cli("launch", "walk", "--resume").err
    changed = cli("plan", "walk").err
    assert f"Its run file was deleted or has changed. homing kept a copy: {copy}" in changed
    assert f"instead of walk: {copy}" in changed
    monkeypatch.chdir(tmp_path)
    elsewhere = cli("plan", "walk")
    assert "has no run file in this folder" in elsewhere.err
    assert f"fix cd {w}   and run the command there" in elsewhere.err
    shutil.rmtree(w)
    gone = cli("plan", "walk").err
    assert "with --name" not in gone
    assert f"a copy: {copy}" in gone


def test_a_name_that_another_file_has_is_refused_with_both_files(cli: Homing, w: Path) -> None:
    (w / "runs/fern.yaml").write_text(RUN_FILE.replace("moss", "fern"))
    said = cli("launch", "moss", "--name", "fern", "--spend-limit", "1", "--yes")
    assert said.code == 2
    assert "runs/fern.yaml already uses this name, so runs/moss.yaml cannot" in said.err
    assert "homing launch moss --name fern-2   Or launch that file: homing launch fern" in said.err


def test_a_run_that_was_trained_here_is_named_with_its_folder_and_its_log(cli: Homing, homing_home: Path) -> None:
    folder = homing_home / "runs/moss-20260101-120000-abcd"
    folder.mkdir(parents=True)
    (folder / file_names.TRAINER_LOCK).touch()
    (folder / file_names.RUN).write_text("{}")
    shutil.copy("runs/moss.yaml", "runs/q.yaml")
    Path("runs/q.yaml").write_text(RUN_FILE.replace("name: moss", f"name: {folder.name}"))
    for typed in (folder.name, "q"):
        said = cli("status", typed)
        assert said.code == 0
        assert "on this computer; not billing" in said.out
        assert str(folder / file_names.METRICS) in said.out
        assert cli("status", typed, "--json").json["state"] == "unfinished"
        said = cli("fetch", typed)
        assert said.code == 2
        assert f"was trained locally and not launched: {folder.name}, unfinished." in said.err
        assert f"It has no instance and is not billing. Folder: {folder}\n" in said.err
    assert "moss has not been launched yet" in cli("status", "moss").err


def trained(homing_home: Path, folder: Path, state: str) -> str:
    """What `homing train moss` left behind, begun in `folder`, later than all that was launched."""
    run_id = "moss-20990101-120000-abcd"
    run_dir = homing_home / "runs" / run_id
    run_dir.mkdir(parents=True)
    (run_dir / file_names.TRAINER_LOCK).touch()
    (run_dir / PROJECT_NOTE).write_bytes(project_note(str(folder)))
    given = next(path for path in (homing_home / "runs").glob(f"moss-*/{file_names.RUN}"))
    (run_dir / file_names.RUN).write_text(given.read_text())
    outcome = Outcome(state, "Every phase is trained.", 0, phase="pretrain", step=6, t=1.0, is_final=True)
    (run_dir / file_names.OUTCOME).write_text(codec.dumps(outcome))
    return run_id


@pytest.mark.slow
def test_a_launched_run_that_waits_for_its_next_machine_comes_before_what_was_trained_here(
    cli: Homing, w: Path, homing_home: Path
) -> None:
    # `stop` would have left it to a guard, who rents.
    run, here = launched(cli), trained(homing_home, w, "done")
    assert cli("status", "moss", "--json").json["run"] == here
    Home(homing_home, World()).ledger.set_run(run, state="stopped", reason=f"{PREEMPTED}its owner took it")
    assert cli("stop", "moss", "--no-wait").code == 0
    row = Home(homing_home, World()).ledger.run(run)
    assert row is not None
    assert not row.may_go_on


@pytest.mark.slow
def test_a_name_means_this_folders_launched_run_and_not_one_that_another_folder_trained(
    cli: Homing, homing_home: Path, tmp_path: Path
) -> None:
    run = launched(cli)
    trained(homing_home, another_folder(tmp_path), "done")
    assert cli("status", "moss", "--json").json["run"] == run


def noted(homing_home: Path, run_id: str, folder: Path, at: float) -> None:
    """Write a finished run to the ledger that was started in this folder."""
    ledger = Home(homing_home, World()).ledger
    ledger.adopt_run(RunRow(run_id, "moss", "done", at, f"file:{homing_home}/store", "f" * 64, "1"), [], [])
    note = homing_home / "runs" / run_id / PROJECT_NOTE
    note.parent.mkdir(parents=True)
    note.write_bytes(project_note(str(folder)))


def test_without_a_name_only_runs_of_this_folder_are_meant(
    cli: Homing, w: Path, homing_home: Path, tmp_path: Path
) -> None:
    noted(homing_home, "moss-2", tmp_path / "x", 2.0)
    said = cli("watch")
    assert said.code == 2
    assert "No run was started in this folder." in said.err
    assert "Use its id: moss-2" in said.err
    noted(homing_home, "moss-1", w, 1.0)
    noted(homing_home, "moss-3", tmp_path / "x", 3.0)
    assert cli("status", "--json").json["run"] == "moss-1"


def test_without_a_checkpoint_nothing_is_offered_to_be_fetched_or_resumed(
    cli: Homing, w: Path, homing_home: Path
) -> None:
    ledger = Home(homing_home, World()).ledger
    for state in ("failed", "stopped"):
        noted(homing_home, f"moss-{state}", w, 1.0)
        ledger.set_run(f"moss-{state}", state=state, reason="said so", exit_code=1)
        said = cli("status", f"moss-{state}").err
        assert "No checkpoint was saved. Start over: homing launch moss" in said
        assert "--resume" not in said
        assert "homing fetch" not in said
