"""`homing train`: the run directory, resuming and starting over, and the report of each ending."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from homing.api.train_here import _refuse_if_changed, ended_as, newest_unfinished
from homing.cli.verbs import train as verb
from homing.cloud.ledger.ledger import Ledger, LedgerLine, RunRow
from homing.config.resolve.smoke_profile import has_smoke_passed
from homing.errors import DataError, UsageError
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, Pointer
from homing.wire.event_lines import Metric, Outcome
from homing.world import World

sys.path.insert(0, str(Path(__file__).parents[2] / "lm"))

from tiny import make_data, make_run

RUN_FILE = """
name: tiny
data: {text: [text/*.txt]}
tokenizer: {vocab_size: 272}
model: {arch: qwen3, layers: 1, width: 32, heads: 2, head_size: 16, ffn_width: 64, context: 32, tied: true}
phases:
  - {kind: pretrain, steps: STEPS, batch_tokens: 128, lr: 0.01, warmup_steps: 1}
train: {device: cpu, threads: 1, log_every: 1}
checkpoint: {every: 1000}
"""


def print_outcome(run_dir: Path, outcome: Outcome) -> None:
    verb._print_outcome(ended_as(run_dir, outcome, "homing train moss", is_interrupted=False), "moss", is_smoke=False)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "runs").mkdir(parents=True)
    monkeypatch.chdir(folder)
    write_run_file(folder, steps=3)
    return folder


def write_run_file(folder: Path, *, steps: int) -> None:
    (folder / "runs/tiny.yaml").write_text(RUN_FILE.replace("STEPS", str(steps)))


def homing(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "homing.cli", *argv], capture_output=True, text=True, timeout=120)


def run_dirs() -> list[Path]:
    return sorted((Path(os.environ["HOMING_HOME"]) / "runs").iterdir())


def test_unprepared_data_is_answered_with_the_command_that_prepares_it(project: Path) -> None:
    with pytest.raises(DataError) as caught:
        verb.command("tiny")
    assert caught.value.fix == "homing prep tiny"
    assert not Path(os.environ["HOMING_HOME"]).exists()


@pytest.mark.parametrize("is_over", [False, True])
def test_train_warns_of_a_live_launched_run_of_that_name_with_its_cost(
    project: Path, capsys: pytest.CaptureFixture[str], is_over: bool
) -> None:
    ledger = Ledger(Path(os.environ["HOMING_HOME"]) / "ledger.sqlite", World())
    line = LedgerLine("m1", "tiny-1", "tiny", 1, "runpod", "h100", "2.49", "12", 1.0)
    ledger.intend(RunRow("tiny-1", "tiny", "running", 1.0, "s3://far/away", "f" * 64, "12"), line)
    ledger.begin_create("m1", 1.0)
    if is_over:
        ledger.close("m1", at=2.0, spend_usd=Decimal(1), note="destroyed")
        ledger.set_run("tiny-1", state="done")
    with pytest.raises(DataError):
        verb.command("tiny")
    said = capsys.readouterr().err
    assert ("tiny-1 was launched and is still running on runpod at $2.49/h" in said) is not is_over
    assert ("homing stop tiny-1" in said) is not is_over


def test_train_warns_of_an_ended_run_that_may_bill_with_the_command_that_ends_it(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(Path(os.environ["HOMING_HOME"]) / "ledger.sqlite", World())
    line = LedgerLine("m1", "tiny-1", "tiny", 1, "runpod", "h100", "2.49", "12", 1.0)
    ledger.intend(RunRow("tiny-1", "tiny", "running", 1.0, "s3://far/away", "f" * 64, "12"), line)
    ledger.begin_create("m1", 1.0)
    ledger.set_run("tiny-1", state="failed")
    with pytest.raises(DataError):
        verb.command("tiny")
    said = capsys.readouterr().err
    assert "tiny-1 was launched and is failed; its instance on runpod may still be billing, at $2.49/h" in said
    assert "homing destroy tiny-1" in said
    assert "homing stop" not in said, "it would be refused"
    assert "still running" not in said


def test_a_disk_that_is_too_small_is_found_before_the_first_step(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data(project / "data/tiny")
    monkeypatch.setattr("homing.world.World.free_bytes", lambda world, path: 5_000_000)
    path = project / "runs/tiny.yaml"
    path.write_text(path.read_text().replace("width: 32", "width: 128"))
    with pytest.raises(UsageError) as caught:
        verb.command("tiny")
    assert caught.value.what == "Not enough disk space for the checkpoints of tiny."
    assert "has 5.00 MB free" in caught.value.why
    assert "checkpoint.keep_last" in caught.value.fix
    assert "HOMING_HOME" in caught.value.fix
    assert not Path(os.environ["HOMING_HOME"]).exists()


def test_of_unprepared_data_the_one_that_is_missing_is_named(project: Path) -> None:
    make_data(project / "data/tiny")
    (project / "chats.jsonl").write_text('[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]\n')
    phase = "  - {kind: sft, steps: 2, batch_tokens: 128, data: {chat: [chats.jsonl]}}\ntrain:"
    path = project / "runs/tiny.yaml"
    path.write_text(path.read_text().replace("train:", phase))
    with pytest.raises(DataError) as caught:
        verb.command("tiny")
    assert caught.value.why == f"{project / 'data/tiny/sft/manifest.json'} does not exist."


def test_resume_and_fresh_cannot_be_combined(project: Path) -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        verb.command("tiny", resume=True, fresh=True)


def test_resume_with_nothing_to_go_on_with_is_an_error(project: Path) -> None:
    make_data(project / "data/tiny")
    with pytest.raises(UsageError, match="no unfinished run"):
        verb.command("tiny", resume=True)


def test_a_second_trainer_is_refused_before_anything_is_written(project: Path) -> None:
    make_data(project / "data/tiny")
    run_dir = Path(os.environ["HOMING_HOME"]) / "runs/tiny-20260101-000000-abcd"
    run_dir.mkdir(parents=True)
    with open(run_dir / file_names.TRAINER_LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="Another trainer is running"):
            verb.command("tiny")
    assert not (run_dir / file_names.RUN).exists()


def test_only_a_run_that_was_trained_here_and_is_not_done_is_gone_on_with(tmp_path: Path) -> None:
    def make(name: str, *, state: str | None, is_ours: bool = True) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if is_ours:
            (folder / file_names.TRAINER_LOCK).touch()
        if state:
            (folder / file_names.OUTCOME).write_text(codec.dumps(Outcome(state, "", 0)))
        return folder

    killed = make("tiny-20260101-000001-aaaa", state=None)
    make("tiny-20260101-000003-cccc", state="stopped", is_ours=False)
    make("tiny-big-20260101-000004-dddd", state="stopped")
    assert newest_unfinished(tmp_path, "tiny") == killed
    stopped = make("tiny-20260101-000005-eeee", state="stopped")
    assert newest_unfinished(tmp_path, "tiny") == stopped
    make("tiny-20260101-000006-ffff", state="done")
    assert newest_unfinished(tmp_path, "tiny") is None


def test_settings_that_this_homing_lacks_cannot_be_put_back(tmp_path: Path) -> None:
    make_data(tmp_path)
    run = make_run(tmp_path)
    folder = tmp_path / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(2)
    folder.mkdir(parents=True)
    document = json.loads(codec.dumps(run))
    document["model"]["colour"] = "blue"
    (folder / file_names.RUN).write_text(json.dumps(document))
    manifest = CheckpointManifest("tiny", "tiny-1", "pretrain", 2, 1, False, "another", 7, [])
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))
    with pytest.raises(UsageError) as caught:
        _refuse_if_changed(run, tmp_path, "homing train tiny --set seed=7 --fresh")
    assert (
        caught.value.fix
        == "Start over: homing train tiny --set seed=7 --fresh   Or resume with the version of homing that wrote it."
    )


@pytest.mark.acceptance(149, 151)
@pytest.mark.slow
def test_a_run_trains_to_its_end_and_says_what_comes_next(project: Path) -> None:
    make_data(project / "data/tiny")
    done = homing("train", "tiny")
    assert done.returncode == 0, done.stderr
    (run_dir,) = run_dirs()
    assert "Training Complete | state done" in done.stdout
    for way in (f"generate {run_dir.name}", f"chat {run_dir.name}", f"eval {run_dir.name}", f"export {run_dir.name}"):
        assert f"  homing {way} " in done.stderr
    assert "  homing train tiny --phase sft " in done.stderr
    log = (run_dir / file_names.LOGS / "trainer.log").read_text().splitlines()
    assert [line for line in log if line in done.stdout.splitlines()] == done.stdout.splitlines()
    assert (run_dir / file_names.RUN_FILE).read_text() == (project / "runs/tiny.yaml").read_text()
    assert json.loads((run_dir / file_names.RUN).read_text())["id"] == run_dir.name


@pytest.mark.slow
def test_json_prints_one_document_and_smoke_leaves_its_note(project: Path) -> None:
    make_data(project / "data/tiny-smoke")
    write_run_file(project, steps=4)
    done = homing("train", "tiny", "--smoke", "--json", "--set", "tokenizer.vocab_size=272")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "homing.train/1"
    assert document["state"] == "done"
    assert document["val_loss"] is not None
    assert Path(document["checkpoint"]).is_dir()
    assert has_smoke_passed(project / "runs/tiny.yaml")


@contextmanager
def in_training(project: Path, *, steps: int, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """`homing train tiny`, at its fifth step; `before` is done by the shell that starts it."""
    make_data(project / "data/tiny")
    write_run_file(project, steps=steps)
    argv = ["bash", "-c", f'{before or ":"}; exec "$0" -m homing.cli train tiny', sys.executable]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        next(line for line in child.stdout if line.startswith("step 5/"))
        yield child


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(project: Path) -> None:
    with in_training(project, steps=400) as child:
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Resume: homing train tiny" in err
    done = homing("train", "tiny", "--resume")
    assert done.returncode == 0, done.stderr
    (run_dir,) = run_dirs()
    lines = (run_dir / file_names.METRICS).read_text().splitlines()
    assert [codec.loads(Metric, line).step for line in lines] == list(range(1, 401))


@pytest.mark.slow
def test_under_nohup_a_terminal_that_closes_ends_nothing(project: Path) -> None:
    with in_training(project, steps=60, before='trap "" HUP') as child:
        child.send_signal(signal.SIGHUP)
        child.communicate(timeout=120)
    assert child.returncode == 0


@pytest.mark.slow
@pytest.mark.regression("orphaned-trainer")
def test_a_trainer_stops_with_a_checkpoint_when_homing_train_is_killed(project: Path) -> None:
    with in_training(project, steps=100_000) as child:
        child.kill()
    (run_dir,) = run_dirs()
    try:
        deadline = time.monotonic() + 60
        while trainers_of(run_dir) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert trainers_of(run_dir) == [], "no process is left that could stop it"
    finally:
        for pid in trainers_of(run_dir):
            os.kill(pid, signal.SIGKILL)
    assert codec.loads(Outcome, (run_dir / file_names.OUTCOME).read_bytes()).state == "stopped"
    assert list(run_dir.glob("checkpoints/pretrain/step-*/manifest.json"))


def trainers_of(run_dir: Path) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = each.read_bytes().split(b"\0")
            if b"homing.lm.train" in words and str(run_dir).encode() in words:
                found.append(int(each.parent.name))
    return found


@pytest.mark.slow
def test_a_stop_from_another_terminal_saves_and_says_how_to_go_on(project: Path) -> None:
    with in_training(project, steps=100_000) as child:
        assert json.loads(homing("status", "tiny", "--json").stdout)["state"] == "training"
        stopped = homing("stop", "tiny", "--json")
        assert stopped.returncode == 0, stopped.stderr
        _, err = child.communicate(timeout=120)
    assert child.returncode == 0, "a stop on request is no error"
    assert "error" not in err
    assert "Stopped from another terminal." in err
    assert "Resume: homing train tiny" in err
    document = json.loads(stopped.stdout)
    assert (document["state"], document["again"]) == ("stopped", "homing train tiny")
    assert (run_dirs()[0] / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(document["step"])).is_dir()
    assert json.loads(homing("watch", "tiny", "--json").stdout.splitlines()[-1])["data"]["step"] == document["step"]


@pytest.mark.acceptance("X25", "P1")
@pytest.mark.slow
def test_a_time_limit_exits_with_5_and_a_failure_with_1(project: Path) -> None:
    make_data(project / "data/tiny")
    write_run_file(project, steps=100_000)
    limited = homing("train", "tiny", "--set", "train.time_limit=1s", "--phase", "pretrain")
    assert limited.returncode == 5, limited.stderr
    assert "time limit" in limited.stderr
    assert "Resume: homing train tiny --set train.time_limit=1s --phase pretrain" in limited.stderr
    before = (run_dirs()[0] / file_names.RUN).read_bytes()
    changed = homing("train", "tiny", "--set", "seed=99")
    assert changed.returncode == 2
    assert "seed: 1337 in the checkpoint, 99 now" in changed.stderr
    assert "fix Start over: homing train tiny --set seed=99 --fresh " in changed.stderr
    assert (run_dirs()[0] / file_names.RUN).read_bytes() == before  # refused before anything was written
    next((project / "data/tiny").glob("train-*.bin")).write_bytes(b"")
    failed = homing("train", "tiny")
    assert failed.returncode == 1
    assert "Prepare it again: homing prep tiny --force" in failed.stderr, "the trainer knows what was typed"
    assert "Fix that, then resume from the last checkpoint: homing train tiny" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.acceptance(101)
@pytest.mark.slow
def test_a_phase_by_itself_after_one_of_adapters_begins_with_both_put_together(project: Path) -> None:
    make_data(project / "data/tiny")
    adapter = "  - {kind: mid, method: lora, steps: 2, batch_tokens: 128}\n"
    rl = "rl: {tasks: [{kind: arithmetic}], answer_tokens: 4, prompts_per_step: 2, samples_per_prompt: 2}"
    text = RUN_FILE.replace("STEPS", "2").replace("context: 32", "context: 64")
    text = text.replace("train:", f"{adapter}  - {{kind: rl, steps: 1, {rl}}}\ntrain:")
    (project / "runs/tiny.yaml").write_text(text)
    assert homing("train", "tiny", "--phase", "pretrain+mid", "--quiet").returncode == 0
    done = homing("train", "tiny", "--phase", "rl", "--json")
    assert done.returncode == 0, done.stderr
    folder = Path(json.loads(done.stdout)["checkpoint"])
    assert (folder / file_names.WEIGHTS).is_file(), "whole weights, not another adapter"
    lineage = codec.loads(CheckpointManifest, (folder / file_names.MANIFEST).read_bytes()).lineage
    assert [(stage.phase, stage.method) for stage in lineage] == [("pretrain", "full"), ("mid", "lora"), ("rl", "full")]


def test_the_end_shows_the_last_sample_of_the_phase_that_was_trained_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "moss-20260101-000000-abcd"
    outcome = Outcome("done", "", 0, phase="sft", step=12)
    print_outcome(run_dir, outcome)
    assert "sample" not in capsys.readouterr().err
    (run_dir / file_names.SAMPLES).mkdir(parents=True)
    for name in ("pretrain-00000900", "sft-00000006", "sft-00000012"):
        (run_dir / file_names.SAMPLES / f"{name}.txt").write_text(f"[Who are you?] {name}\nfor one\n\n")
    print_outcome(run_dir, outcome)
    assert "A sample:\n  [Who are you?] sft-00000012\n  for one\n\nNext:" in capsys.readouterr().err


def test_the_end_says_which_checkpoint_the_other_verbs_will_open_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phase_dir = tmp_path / "moss-20260101-000000-abcd" / file_names.CHECKPOINTS / "rl"
    for step in (2, 5):
        (phase_dir / file_names.step_dir(step)).mkdir(parents=True)
        (phase_dir / file_names.step_dir(step) / file_names.WEIGHTS).write_bytes(b"w")
    (phase_dir / file_names.LATEST).write_text(codec.dumps(Pointer(5, val_loss=0.99)))
    outcome = Outcome("done", "", 0, phase="rl", step=5)
    for best, said in ((2, True), (5, False)):
        (phase_dir / file_names.BEST).write_text(codec.dumps(Pointer(best, val_loss=0.9722)))
        print_outcome(phase_dir.parents[1], outcome)
        err = capsys.readouterr().err
        assert f"Model saved in {phase_dir / file_names.step_dir(5)}" in err
        opened = f"chat, generate, eval and export open {phase_dir / file_names.step_dir(2)}"
        assert (opened in err) == said
        assert ("best of 2, by missing reward 0.9722" in err) == said


def test_the_end_names_a_plan_for_a_rented_gpu_that_works_without_an_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_outcome(tmp_path, Outcome("done", "", 0, phase="sft", step=5))
    plan = next(line for line in capsys.readouterr().err.splitlines() if "homing plan" in line)
    assert "--set cloud.providers=runpod" in plan


def test_the_sample_at_the_end_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / file_names.SAMPLES).mkdir()
    (tmp_path / file_names.SAMPLES / "rl-00000005.txt").write_text("once\x1b[2J\nupon")
    print_outcome(tmp_path, Outcome("done", "", 0, phase="rl", step=5))
    assert "A sample:\n  once\ufffd[2J\n  upon\n" in capsys.readouterr().err


# --- more steps for a model that is there -----------------------------------------------------------------------------


@pytest.mark.regression("extend-a-run")
@pytest.mark.slow
def test_a_finished_run_is_extended_from_its_weights_with_a_schedule_of_its_own(project: Path) -> None:
    make_data(project / "data/tiny")
    none = homing("train", "tiny", "--extend", "4")
    assert none.returncode == 2
    assert "There is no trained pretrain phase of tiny to extend" in none.stderr
    assert homing("train", "tiny").returncode == 0
    (first,) = run_dirs()
    more = homing("train", "tiny", "--extend", "4")
    assert more.returncode == 0, more.stderr
    _, second = run_dirs()
    run = json.loads((second / file_names.RUN).read_text())
    (phase,) = run["phases"]
    assert phase["init_from"] == str(first / "checkpoints/pretrain/step-00000003")
    assert (phase["num_steps"], phase["schedule"]["warmup_steps"]) == (4, 1)
    assert run["seed"] != json.loads((first / file_names.RUN).read_text())["seed"], "another order of the text"
    assert f"pretrain continues from step 3 of {first.name}, with 4 more steps of 128 tokens." in more.stderr
    assert (
        "New schedule: 1 step of warm-up to a learning rate of 0.01, constant to step 2,"
        " then decay down to 5% of it at step 4." in more.stderr
    )
    assert (second / "checkpoints/pretrain/step-00000004").is_dir()
    assert codec.loads(Outcome, (second / file_names.OUTCOME).read_bytes()).state == "done"


@pytest.mark.slow
def test_a_stopped_extension_resumes_and_a_stopped_run_can_be_extended(project: Path) -> None:
    from homing.api.extend_run import extending_sets
    from homing.config.load import load_run
    from homing.config.resolve.phase_weights import newest_weights

    make_data(project / "data/tiny")
    assert homing("train", "tiny").returncode == 0
    (first,) = run_dirs()
    loaded = load_run("tiny")
    sets, is_begun = extending_sets(loaded, 4, first)
    assert not is_begun, "the first run is no extension"
    extension = first.with_name("tiny-20990101-000000-abcd")
    extension.mkdir()
    (extension / file_names.RUN).write_text(codec.dumps(load_run("tiny", sets).run))
    assert extending_sets(loaded, 4, extension) == (sets, True)
    assert extending_sets(loaded, 5, extension)[1] is False, "another number of steps is another extension"
    manifest = first / "checkpoints/pretrain/step-00000003" / file_names.MANIFEST
    manifest.write_text(manifest.read_text().replace('"is_final": true', '"is_final": false'))
    assert newest_weights("tiny", "pretrain") == manifest.parent, "where no run is finished, the newest checkpoint"


def test_one_run_of_a_name_is_extended_if_it_is_selected_by_the_end_of_its_id(project: Path) -> None:
    from homing.api.extend_run import extending_sets, run_to_extend
    from homing.config.load import load_run

    make_data(project / "data/tiny")
    loaded = load_run("tiny")
    runs = Path(os.environ["HOMING_HOME"]) / "runs"
    for run_id in ("tiny-20260101-000000-1a2b", "tiny-20260102-000000-ffff"):
        step = runs / run_id / "checkpoints/pretrain/step-00000003"
        step.mkdir(parents=True)
        (runs / run_id / file_names.RUN).write_text(codec.dumps(replace(loaded.run, id=run_id)))
        manifest = CheckpointManifest("tiny", run_id, "pretrain", 3, 1, True, "", 7, [])
        (step / file_names.MANIFEST).write_text(codec.dumps(manifest))
    older = "tiny-20260101-000000-1a2b"
    for typed in ("tiny@1a2b", "tiny@a2b", older):
        assert run_to_extend(typed) == ("tiny", older)
        (_, init_from, *_), _ = extending_sets(loaded, 4, None, older)
        assert older in init_from
    assert run_to_extend("tiny") == ("tiny", "")
    assert "ffff" in extending_sets(loaded, 4, None)[0][1], "the newest run, if none is selected"
    with pytest.raises(UsageError, match="tiny has no local run zz"):
        run_to_extend("tiny@zz")
    with pytest.raises(UsageError, match="selects one run of tiny, but this command needs a run file"):
        load_run("tiny@1a2b")
