"""`watch`, `status`, `logs`, `stop` and `tensorboard` of runs that were trained on this computer."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing
from tests.cloud.rig import make_run, trainer_argv

from homing.api.lookup.local_runs import STARTED, hold
from homing.config.home_and_run_files import PROJECT_NOTE, project_note
from homing.wire import codec, file_names
from homing.wire.control_files import Control
from homing.wire.event_lines import Event, Metric, Outcome
from homing.world import World

NAME = "moss-20260101-120000-abcd"
BEGAN = Event(1.0, "trainer", "phase_started", "Phase pretrain begins.", "pretrain", 0)


@pytest.fixture
def cli(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Homing]:
    lay_out(tmp_path, monkeypatch, steps=6, step_s=0.02)
    yield typing(capsys, monkeypatch)
    clear(homing_home)


def begin(homing_home: Path, name: str = NAME) -> Path:
    """What `homing train moss --smoke` leaves behind once its trainer has begun."""
    folder = homing_home / "runs" / name
    (folder / file_names.LOGS).mkdir(parents=True)
    (folder / file_names.TRAINER_LOCK).touch()
    (folder / file_names.RUN).write_text(codec.dumps(make_run(homing_home / "made")))
    (folder / STARTED).write_text(json.dumps({"again": "homing train moss --smoke"}))
    add(folder, file_names.EVENTS, BEGAN)
    return folder


def add(folder: Path, name: str, *documents: object) -> None:
    with open(folder / name, "a", encoding="utf-8") as file:
        file.writelines(codec.dumps(each) + "\n" for each in documents)  # type: ignore[arg-type]


def step(number: int, loss: float, **figures: float) -> Metric:
    return Metric(float(number), "pretrain", number, 20, 64 * number, loss, tokens_per_s=6400.0, **figures)  # type: ignore[arg-type]


def end(folder: Path, state: str, reason: str, at: int) -> None:
    code = {"done": 0, "stopped": 75, "failed": 1}[state]
    (folder / file_names.OUTCOME).write_text(codec.dumps(Outcome(state, reason, code, "pretrain", at, 99.0)))


@contextmanager
def at_work(folder: Path, lock: str = file_names.TRAINER_LOCK) -> Iterator[None]:
    with open(folder / lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def meanwhile(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], None]) -> None:
    """Each wait of the verb is the time in which the trainer does its next act."""
    left = list(acts)
    monkeypatch.setattr(World, "sleep", lambda self, seconds: left.pop(0)())


def test_a_training_is_watched_from_another_terminal_to_its_end(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begin(homing_home)
    sampled = Event(6.0, "trainer", "sampled", "once", "pretrain", 5, {"path": "samples/pretrain-00000005.txt"})

    def learns() -> None:
        (folder / file_names.SAMPLES).mkdir()
        (folder / file_names.SAMPLES / "pretrain-00000005.txt").write_text("once upon a time")
        add(folder, file_names.EVENTS, sampled)
        add(folder, file_names.METRICS, step(5, 3.5, val_loss=3.6, eta_s=75.0, memory_bytes=2 * 10**9))

    def ends() -> None:
        add(folder, file_names.METRICS, step(20, 2.5))
        end(folder, "done", "Every phase is trained.", 20)

    meanwhile(monkeypatch, lambda: add(folder, file_names.METRICS, step(1, 5.0, eta_s=90.0)), learns, ends)
    with at_work(folder):
        said = cli("watch", "moss", "--every", "600")
    assert said.code == 0
    assert said.out.splitlines() == [
        "  step 0 | trainer: Phase pretrain begins.",
        "training on this computer, not billing | saved: no checkpoint yet",
        "before its first metrics",
        "  validation at step 5: loss 3.600",
        "    once upon a time",
        "step 20/20 | loss 2.500 | 6.4k tok/s",
        "  loss 5.000 at step 1, 2.500 at step 20, held-out 3.600",
        "done: Every phase is trained.",
    ], "a line at most so often"
    assert f"Chat with it: homing chat {NAME}" in said.err


def test_while_it_trains_a_line_has_its_eta_and_the_cards_memory(cli: Homing, homing_home: Path) -> None:
    folder = begin(homing_home)
    add(folder, file_names.METRICS, step(1, 5.0), step(5, 3.5, eta_s=75.0, memory_bytes=2 * 10**9))
    said = "step 5/20 | loss 3.500 | 6.4k tok/s"
    with at_work(folder):
        status = cli("status", NAME)
        document = cli("status", NAME, "--json").json
    assert f"{said} | GPU memory 2.00 GB | eta 1m15s" in status.out
    assert "loss 5.000 at step 1, 3.500 at step 5" in status.out
    assert f"Stop it: homing stop {NAME}" in status.err
    assert (document["state"], document["is_billing"], document["metric"]["eta_s"]) == ("training", False, 75.0)
    killed = cli("status", NAME)
    assert "unfinished" in killed.out
    assert f"{said}\n" in killed.out, "no trainer is running: there is no eta"


@pytest.mark.parametrize(
    ("state", "reason", "code", "next_"),
    [
        ("stopped", "SIGINT was received.", 0, "Start over: homing train moss --smoke\n"),
        (
            "stopped",
            "The time limit of 45m00s (train.time_limit) was reached.",
            5,
            "Start over: homing train moss --smoke\n",
        ),
        (
            "failed",
            "The loss is not finite.",
            1,
            f"See why: homing logs {NAME}   Start over: homing train moss --smoke\n",
        ),
        (
            None,
            "the last one left no error message.",
            1,
            f"See why: homing logs {NAME}   Start over: homing train moss --smoke\n",
        ),
    ],
)
def test_how_it_ended_is_the_exit_code_of_whoever_watched(
    cli: Homing, homing_home: Path, state: str | None, reason: str, code: int, next_: str
) -> None:
    folder = begin(homing_home)
    add(folder, file_names.METRICS, step(5, 3.5))
    if state:
        end(folder, state, reason, 7)
    said = cli("watch")
    assert said.code == code
    assert said.out.splitlines()[-1].endswith(reason)
    assert f"step {7 if state else 5}/20 | loss 3.500" in said.out
    assert said.err.endswith(next_)
    lines = [json.loads(line) for line in cli("watch", "--json").out.splitlines()]
    assert {line["schema"] for line in lines} == {"homing.watch/1"}
    assert lines[-1]["data"]["state"] == (state or "unfinished")


def test_one_that_failed_before_its_first_step_says_so_and_not_step_0(cli: Homing, homing_home: Path) -> None:
    folder = begin(homing_home)
    end(folder, "failed", "The disk refused.", 0)
    said = cli("status", "moss")
    assert "before its first step" in said.out
    assert "failed: The disk refused." in said.out
    assert "0/20" not in said.out + cli("runs").out + cli("watch", "moss").out


def test_from_the_moment_homing_train_has_begun_it_is_at_work(cli: Homing, homing_home: Path) -> None:
    """torch takes seconds to load, in which the trainer holds no lock and an older outcome may lie there."""
    folder = begin(homing_home)
    (folder / file_names.TRAINER_LOCK).unlink()
    end(folder, "stopped", "Of the attempt before.", 7)
    (folder / file_names.CONTROL).write_text(codec.dumps(Control(stop=True)))
    assert hold(folder, "homing train moss --set seed=2", World())
    said = cli("status", "moss", "--json").json
    assert (said["state"], said["again"]) == ("training", "homing train moss --set seed=2")
    assert not (folder / file_names.OUTCOME).exists()
    assert not (folder / file_names.CONTROL).exists(), "a stop that ended the attempt before does not end this one"


def test_its_log_is_read_and_followed_and_it_has_no_other_programs(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begin(homing_home)
    none = cli("logs", "moss")
    assert (none.code, none.out) == (0, "")
    assert str(folder / file_names.METRICS) in none.err
    log = folder / file_names.LOGS / "trainer.log"
    log.write_text("step 1\n")
    assert cli("logs", "moss").out == "step 1\n"

    def ends() -> None:
        with open(log, "a") as file:
            file.write("step 2\n")
        end(folder, "done", "Every phase is trained.", 20)

    meanwhile(monkeypatch, ends)
    with at_work(folder):
        assert cli("logs", "moss", "-f").out == "step 1\nstep 2\n"
    for program, why in (
        ("agent", "agent process runs only on rented instances"),
        ("kernel", "Known: trainer, agent, sync."),
    ):
        refused = cli("logs", "moss", program)
        assert refused.code == 2
        assert why in refused.err


def test_a_stop_is_laid_into_its_folder_and_waited_for(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begin(homing_home)
    add(folder, file_names.METRICS, step(5, 3.5))

    def obeys() -> None:
        control = codec.loads(Control, (folder / file_names.CONTROL).read_bytes())
        assert control.stop
        end(folder, "stopped", control.reason, 7)

    with at_work(folder):
        asked = cli("stop", "moss", "--no-wait", "--json").json
        assert (asked["run"], asked["is_stopped"]) == (NAME, False)
        meanwhile(monkeypatch, lambda: None, obeys)
        said = cli("stop", "moss")
    assert said.code == 0
    assert "Progress: pretrain step 7/20." in said.err
    assert "Start over: homing train moss --smoke" in said.err
    again = cli("stop", "moss")
    assert again.code == 2
    assert "is not training: it is stopped." in again.err


def test_a_stop_that_is_not_obeyed_says_what_else_ends_it(cli: Homing, homing_home: Path) -> None:
    folder = begin(homing_home)
    with at_work(folder):
        said = cli("stop", "moss", "--timeout", "0")
    assert said.code == 1
    assert "did not stop within" in said.err
    assert "Ctrl-C twice" in said.err


def test_leaving_off_watching_says_that_it_goes_on(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    meanwhile(monkeypatch, leave)
    with at_work(begin(homing_home)):
        said = cli("watch", "moss")
    assert said.code == 130
    assert f"moss keeps running. Stop it: homing stop {NAME}" in said.err


@pytest.mark.slow
def test_of_a_launched_and_a_trained_run_of_a_name_the_newer_is_meant_and_what_bills_before_all(
    cli: Homing, homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = begin(homing_home)
    launched = cli("launch", "moss", "--spend-limit", "1", "--yes", "--json").json["run"]
    assert cli("watch", launched).code == 0
    for typed in (["moss"], []):
        assert cli("status", *typed, "--json").json["run"] == launched, "begun after the other"
    assert cli("status", NAME, "--json").json["run"] == NAME, "an id is that very run"
    with at_work(older):
        assert cli("status", "moss", "--json").json["run"] == NAME, "it is at work, and the launched one is over"
        assert cli("status", "--json").json["run"] == NAME
    newer = begin(homing_home, "moss-20260301-120000-bbbb")
    assert cli("status", "moss", "--json").json["run"] == newer.name
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, str(work_dir), steps=100_000, step_s=0.02),
    )
    live = cli("launch", "moss", "--spend-limit", "1", "--yes", "--json").json["run"]
    with at_work(newer):
        said = cli("status", "moss", "--json")
    assert said.json["run"] == live
    assert f"Using {live}. {newer.name} is training on this computer; use its id to select it." in said.err


def test_one_of_another_folder_is_shown_and_stopped_only_by_its_id(
    cli: Homing, homing_home: Path, tmp_path: Path
) -> None:
    folder = begin(homing_home)
    reference = tmp_path / "upstream"
    (folder / PROJECT_NOTE).write_bytes(project_note(str(reference)))
    with at_work(folder):
        assert f"{NAME} was started in {reference}." in cli("status", "moss").err
        refused = cli("stop", "moss")
        assert refused.code == 2
        assert f"homing stop {NAME}" in refused.err
        assert not (folder / file_names.CONTROL).exists()
        assert cli("stop", NAME, "--no-wait").code == 0
    assert (folder / file_names.CONTROL).exists()


@pytest.mark.parametrize("verb", [("fetch",), ("destroy",), ("limit", "--spend", "3"), ("ssh",)])
def test_what_needs_a_machine_says_that_there_is_none_and_what_works(
    cli: Homing, homing_home: Path, verb: tuple[str, ...]
) -> None:
    begin(homing_home)
    said = cli(verb[0], "moss", *verb[1:])
    assert said.code == 2
    assert f"moss was trained locally and not launched: {NAME}, unfinished." in said.err
    assert f"Watch it: homing watch {NAME}" in said.err
    assert "Start over: homing train moss --smoke   All runs: homing runs" in said.err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_its_curves_are_in_tensorboard(cli: Homing, homing_home: Path) -> None:
    add(begin(homing_home), file_names.METRICS, step(1, 5.0), step(2, 4.0))
    said = cli("tensorboard", "moss", "--no-serve")
    assert said.code == 0, said.err
    assert (homing_home / "tensorboard" / NAME / "pretrain").is_dir()


def test_a_run_with_a_checkpoint_is_resumed_and_one_without_starts_over(cli: Homing, homing_home: Path) -> None:
    begin(homing_home)
    assert "Start over: homing train moss" in cli("status", NAME).err
    checkpoint = homing_home / "runs" / NAME / file_names.CHECKPOINTS / "pretrain/step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / file_names.MANIFEST).write_text("{}")
    assert "Resume: homing train moss" in cli("status", NAME).err
