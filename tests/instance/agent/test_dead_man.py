"""The second guard on the instance: it starts the agent again, follows a changed limit, and ends billing by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.instance.agent.conftest import Instance, wait_until
from tests.instance.agent.test_watchdog import HOUR, Clock, make_boot

from homing.instance.agent.dead_man import AGAIN_S, FORGET_S, GRACE_S, PAUSES_S, SOURCE, DeadMan
from homing.instance.agent.end_billing import end_billing
from homing.instance.agent.folder import Folder
from homing.wire import codec, file_names
from homing.wire.boot_json import EndBilling
from homing.wire.control_files import Heartbeat, Request
from homing.wire.event_lines import Event, Outcome
from homing.wire.guard_timing import DEAD_MAN, END, reserve_s
from homing.world import Completed, World


class Machine(Clock):
    """A clock of our own, processes that are only counted, and an agent that lives or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.agent_lives, self.spawned, self.ran = True, [], []  # type: ignore[var-annotated]

    def is_locked(self, path: object) -> bool:
        return self.agent_lives

    def spawn(self, argv, env, cwd, log):  # type: ignore[no-untyped-def]
        self.spawned.append(list(argv))
        return 7

    def run(self, argv, timeout_s, env=None, stdin=""):  # type: ignore[no-untyped-def]
        self.ran.append((list(argv), timeout_s))
        return Completed(0, "", "")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "run/logs").mkdir(parents=True)
    return Machine()


def make(machine: Machine, tmp_path: Path, **changes: object) -> DeadMan:
    messages = {"work_dir": str(tmp_path), "rate_usd_per_hour": "1", "spend_limit_usd": "2", "agent_argv": ["a", "b"]}
    return DeadMan(Folder(make_boot(**{**messages, "sync_argv": ["sync"], **changes}), machine, SOURCE))


def test_it_ends_after_the_agents_turn_and_before_the_limit(machine: Machine, tmp_path: Path) -> None:
    dead_man = make(machine, tmp_path)
    machine.pass_s(2 * HOUR - reserve_s(END, 2 * HOUR) + 1)
    assert dead_man.why_end() == ""
    machine.pass_s(reserve_s(END, 2 * HOUR) - reserve_s(DEAD_MAN, 2 * HOUR))
    assert "spend limit of $2 is near" in dead_man.why_end()
    assert dead_man.limits.spend() < 2


def test_it_follows_a_changed_limit_and_a_damaged_one_means_that_of_boot(machine: Machine, tmp_path: Path) -> None:
    dead_man = make(machine, tmp_path)
    path = tmp_path / "run" / file_names.LIMITS
    path.write_text(codec.dumps(Request(serial=3, spend_limit_usd="5", time_limit_s=0.0)))
    machine.pass_s(2 * HOUR)
    assert dead_man.why_end() == ""
    for damage in ("", "{", '{"serial": 1, "spend_limit_usd": "NaN"}', '{"serial": 1, "spend_limit_usd": "lots"}'):
        path.write_text(damage)
        assert "spend limit of $2 " in dead_man.why_end(), damage
    path.write_text(codec.dumps(Request(serial=4, spend_limit_usd="1.5")))
    assert "spend limit of $1.5 " in dead_man.why_end()


def test_time_that_an_agent_saw_pass_counts_whatever_the_clock_says(machine: Machine, tmp_path: Path) -> None:
    beat = Heartbeat(1_000_000.0 + 2 * HOUR, "m", 1, "training", 1_000_000.0, "1", "2")
    (tmp_path / "run" / file_names.HEARTBEAT).write_text(codec.dumps(beat))
    assert make(machine, tmp_path).why_end()
    (tmp_path / "clock").unlink()
    (tmp_path / "run" / file_names.HEARTBEAT).write_text(codec.dumps(dataclasses.replace(beat, mark="another")))
    assert make(machine, tmp_path).why_end() == ""


def pass_with(machine: Machine, dead_man: DeadMan, seconds: float) -> str:
    for _ in range(int(seconds)):
        machine.pass_s(1)
        why = dead_man.why_end()
        if why:
            return why
    return ""


@pytest.mark.acceptance(74)
def test_a_dead_agent_is_started_again_some_times_with_pauses_then_the_run_has_failed(
    machine: Machine, tmp_path: Path
) -> None:
    dead_man = make(machine, tmp_path)
    machine.agent_lives = False
    for number, pause_s in enumerate(PAUSES_S):
        assert pass_with(machine, dead_man, pause_s - 2) == ""
        assert len(machine.spawned) == number
        pass_with(machine, dead_man, 3)
        assert machine.spawned == [["a", "b"]] * (number + 1)
    # A dead-man that was itself started anew still knows how often.
    dead_man = make(machine, tmp_path)
    assert pass_with(machine, dead_man, GRACE_S) == ""
    assert "the run has failed" in pass_with(machine, dead_man, 5)
    assert len(machine.spawned) == len(PAUSES_S)
    assert machine.ran[0][0] == ["sync", "--once"]
    outcome = codec.loads(Outcome, (tmp_path / "run" / file_names.OUTCOME).read_bytes())
    assert (outcome.state, outcome.is_final) == ("failed", False)


def test_an_outcome_that_is_there_is_not_written_over(machine: Machine, tmp_path: Path) -> None:
    done = Outcome("done", "All is trained.", 0, t=1.0)
    (tmp_path / "run" / file_names.OUTCOME).write_text(codec.dumps(done))
    (tmp_path / file_names.RESTARTS).write_text(f"{len(PAUSES_S)} {machine.boottime()}")
    machine.agent_lives = False
    assert pass_with(machine, make(machine, tmp_path), GRACE_S + 5)
    assert codec.loads(Outcome, (tmp_path / "run" / file_names.OUTCOME).read_bytes()) == done


def test_restarts_long_ago_are_forgotten(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / file_names.RESTARTS).write_text(f"{len(PAUSES_S)} {machine.boottime() - FORGET_S - 1}")
    machine.agent_lives = False
    pass_with(machine, make(machine, tmp_path), 5)
    assert len(machine.spawned) == 1


@pytest.mark.parametrize("ill", [("write", "append"), ("write", "append", "spawn")], ids=["full", "read-only"])
def test_on_an_ill_disk_a_dead_agent_is_given_up_as_soon_as_on_a_good_one(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ill: tuple[str, ...]
) -> None:
    # How often could not be written down, so it was never started again and the machine billed on to its limit.
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ill:
        monkeypatch.setattr(machine, name, fail)
    dead_man = make(machine, tmp_path)
    machine.agent_lives = False
    assert "the run has failed" in in_its_loop(machine, dead_man, sum(PAUSES_S) + GRACE_S + 10)
    assert machine.spawned == ([] if "spawn" in ill else [["a", "b"]] * len(PAUSES_S))


def in_its_loop(machine: Machine, dead_man: DeadMan, seconds: float) -> str:
    """Why it would end the machine within that time, continuing after a failure as its own loop does."""
    for _ in range(int(seconds)):
        machine.pass_s(1)
        with contextlib.suppress(OSError):
            why = dead_man.why_end()
            if why:
                return why
    return ""


def test_what_ends_billing_runs_where_its_log_cannot_be_written(tmp_path: Path) -> None:
    # A disk that was mounted anew for reading only: the command that ends the machine was never even started.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / file_names.LOGS).write_text("no folder, so nothing can be written in it")
    done = tmp_path / "done"
    end = EndBilling(kind="command", argv=[sys.executable, "-c", f"open({str(done)!r}, 'w').close()"])
    folder = Folder(make_boot(work_dir=str(tmp_path), end_billing=end), World(), SOURCE)
    assert end_billing(folder, 1, lambda: time.sleep(0.01)) == ""
    assert done.exists()


def test_a_failed_machine_that_is_to_be_kept_is_kept_inside_its_limit(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / file_names.RESTARTS).write_text(f"{len(PAUSES_S)} {machine.boottime()}")
    machine.agent_lives = False
    dead_man = make(machine, tmp_path, keep_on_failure_s=600.0)
    assert pass_with(machine, dead_man, 598) == ""
    assert pass_with(machine, dead_man, 5)
    dead_man = make(machine, tmp_path, keep_on_failure_s=9 * HOUR)
    machine.pass_s(2 * HOUR)
    assert "is near" in dead_man.why_end()


@pytest.mark.acceptance(124)
def test_who_is_still_here_after_an_accepted_end_ends_it_again(machine: Machine, tmp_path: Path) -> None:
    dead_man = make(machine, tmp_path)
    (tmp_path / file_names.BILLING_ENDED).write_text(str(machine.boottime()))
    machine.agent_lives = False
    assert pass_with(machine, dead_man, AGAIN_S - 2) == ""
    assert machine.spawned == [], "an agent that has ended its machine is not started again"
    assert "is still running" in pass_with(machine, dead_man, 5)


class Over(BaseException):
    """Ends a program that never ends."""


def test_an_end_that_was_accepted_and_did_nothing_makes_the_next_refusal_no_slower(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One 429 after several accepted ends was waited for as after many refusals, past the limit.
    dead_man = make(machine, tmp_path)
    machine.pass_s(2 * HOUR)
    answers, slept = ["", "", "", "", "", "busy", "busy", ""], []

    def end_billing(*_: object) -> str:
        if not answers:
            raise Over
        return answers.pop(0)

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("homing.instance.agent.dead_man.end_billing", end_billing)
    monkeypatch.setattr(machine, "sleep", sleep)
    with pytest.raises(Over):
        dead_man.run()
    assert max(slept) <= 2.0


# --- as it really runs ---


def dead_man_events(instance: Instance) -> list[Event]:
    return [event for event in instance.events() if event.source == "dead-man"]


@pytest.mark.slow
def test_it_is_there_before_the_first_heartbeat_and_there_is_only_one(instance: Instance) -> None:
    instance.train_with(steps=100_000)
    instance.start()
    instance.trainer_pid()
    assert instance.heartbeat().has_dead_man
    assert len(instance.dead_men()) == 1
    assert instance.start().wait(30) == 0  # a second boot command leaves both to the first
    wait_until(lambda: len(instance.dead_men()) == 1)


@pytest.mark.slow
def test_an_agent_that_was_killed_is_started_again_and_the_run_comes_home(instance: Instance) -> None:
    instance.train_with(steps=80, step_s=0.05)
    agent = instance.start()
    instance.trainer_pid()
    wait_until(lambda: instance.steps_in_store())
    agent.kill()
    wait_until(instance.has_ended_billing, 60)
    assert instance.outcome().state == "done"
    assert [event.kind for event in dead_man_events(instance)] == ["agent_restarted"]
    assert instance.steps_in_store()[-1] == 80


@pytest.mark.acceptance(122)
@pytest.mark.slow
def test_an_agent_that_cannot_live_never_outlives_the_limit(instance: Instance) -> None:
    """Killed again and again: the dead-man ends billing inside the limit, without it."""
    instance.train_with(steps=100_000)
    instance.change(time_limit_s=100.0)
    instance.change(started_at=time.time() - 90.0)
    agent = instance.start()
    wait_until(lambda: instance.dead_men())
    deadline = time.monotonic() + 30
    agent.kill()
    while not instance.has_ended_billing():
        assert time.monotonic() < deadline
        for pid in instance.processes():
            World().signal(pid, signal.SIGKILL)
        time.sleep(0.05)
    ended_after_s = (instance.root / "billing-ended").stat().st_mtime - instance.boot.started_at
    assert 90 < ended_after_s < 100
    wait_until(lambda: "dead_man_ends" in instance.kinds())


@pytest.mark.slow
def test_the_agent_starts_a_dead_man_that_was_killed_again(instance: Instance) -> None:
    instance.shorten(GUARD_S=1.0)
    instance.train_with(steps=100_000)
    instance.start()
    instance.trainer_pid()
    (first,) = instance.dead_men()
    World().signal(first, signal.SIGKILL)
    wait_until(lambda: instance.dead_men() not in ([], [first]), 40)
    assert "dead_man_restarted" in instance.kinds()


@pytest.mark.slow
def test_what_ends_billing_is_tried_until_it_works(instance: Instance) -> None:
    flag = instance.root / "allowed"
    code = f"import pathlib, sys; sys.exit(0 if pathlib.Path({str(flag)!r}).exists() else 3)"
    instance.change(end_billing=EndBilling(kind="command", argv=[sys.executable, "-c", code]))
    instance.change(time_limit_s=50.0, started_at=time.time() - 60.0)
    instance.change(trainer_argv=[sys.executable, "-c", ""], sync_argv=[sys.executable, "-c", ""])
    instance.start()
    wait_until(lambda: [e.kind for e in dead_man_events(instance)].count("end_billing_failed") >= 2, 60)
    flag.touch()
    wait_until(lambda: (instance.root / "work" / file_names.BILLING_ENDED).exists(), 60)
