"""The agent as it really runs: from its zip, with real processes, a double trainer and a store in a folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.instance.agent.conftest import Instance, wait_until

from homing.instance.agent.end_billing import end_billing
from homing.instance.agent.folder import Folder
from homing.instance.agent.supervise import CHILD_ENV, Agent
from homing.store.read_lease import lease_key
from homing.wire import codec, file_names
from homing.wire.boot_json import EndBilling, Input
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.control_files import Heartbeat, Request
from homing.wire.event_lines import Outcome
from homing.wire.run_record import Lease
from homing.world import HttpRequest, HttpResponse, NetworkError, World


def check_ended_well(instance: Instance) -> None:
    """True of every end: billing ended last, after the last words were in the store, and nothing runs on."""
    assert instance.has_ended_billing()
    last = instance.in_store(Heartbeat, file_names.HEARTBEAT)
    assert last.state == "ended"
    assert last.is_pushed
    assert instance.in_store(Outcome, file_names.OUTCOME) == instance.outcome()
    assert instance.kinds()[-1] == "billing_ended"
    assert "pushed" in instance.kinds()
    wait_until(lambda: instance.processes() == [])


@pytest.mark.acceptance(124, "X5")
def test_a_run_that_is_done_is_pushed_and_then_ends_billing(instance: Instance) -> None:
    assert instance.run() == 0
    check_ended_well(instance)
    assert instance.outcome().state == "done"
    assert instance.outcome().is_final
    assert instance.outcome().reason == "double trainer: done"
    assert 20 in instance.steps_in_store()
    manifest = codec.loads(CheckpointManifest, instance.store.read("models/amber/manifest.json"))
    assert (manifest.step, manifest.is_final) == (20, True)
    heartbeat = instance.heartbeat()
    assert (heartbeat.step, heartbeat.num_steps, heartbeat.phase, heartbeat.problem) == (20, 20, "pretrain", "")
    assert heartbeat.eta_s == 1.0, "as the trainer said, and not by steps alone"
    assert 0 < float(heartbeat.spend_usd) < 0.05
    assert instance.store.exists("runs/amber-1/logs/agent.log")
    assert instance.store.exists("runs/amber-1/logs/trainer.log")


@pytest.mark.acceptance(74)
@pytest.mark.slow
def test_a_crash_is_restarted_from_its_checkpoint_while_it_gets_further(instance: Instance) -> None:
    instance.train_with(crash_at=12, crashes=1)
    assert instance.run() == 0
    check_ended_well(instance)
    assert instance.kinds().count("trainer_restarted") == 1
    assert "resumed" in instance.kinds()


@pytest.mark.acceptance(74)
@pytest.mark.slow
def test_a_crash_at_the_same_step_again_is_a_failure(instance: Instance) -> None:
    instance.train_with(crash_at=12)
    assert instance.run() == 1
    check_ended_well(instance)
    assert instance.outcome().state == "failed"
    assert instance.outcome().step == 11
    assert not instance.outcome().is_final
    assert instance.kinds().count("trainer_restarted") == 1
    assert instance.steps_in_store()[-1] == 10
    assert not instance.store.exists("models/amber/manifest.json")


@pytest.mark.slow
def test_a_trainer_that_never_makes_a_step_or_says_it_is_final_is_not_restarted(instance: Instance) -> None:
    instance.change(trainer_argv=[sys.executable, "-c", "raise SystemExit(1)"])
    assert instance.run() == 1
    check_ended_well(instance)
    assert "trainer_restarted" not in instance.kinds()


@pytest.mark.slow
def test_a_failure_that_the_trainer_calls_final_is_not_restarted(instance: Instance) -> None:
    instance.train_with(bad_exit=7)
    assert instance.run() == 1
    assert "trainer_restarted" not in instance.kinds()
    assert instance.outcome().reason == "double trainer: failed"


def test_a_stop_asked_from_home_becomes_a_checkpoint_and_a_stopped_run(instance: Instance) -> None:
    instance.train_with(steps=100_000, save_every=1000)
    agent = instance.start()
    instance.trainer_pid()
    instance.ask(serial=1, stop=True, reason="enough")
    assert agent.wait(60) == file_names.EXIT_STOPPED
    check_ended_well(instance)
    assert instance.outcome().state == "stopped"
    assert instance.outcome().is_final
    assert "trainer_killed" not in instance.kinds()
    stopped_at = instance.outcome().step
    assert instance.steps_in_store() == [stopped_at]
    assert [e.text for e in instance.events() if e.kind == "stop_asked"] == [
        "Asking the trainer to save and stop: enough"
    ]


def begun_ago(instance: Instance, seconds: float) -> None:
    """Billing began earlier, so that a limit with a reserve of seconds is near at once."""
    instance.change(started_at=time.time() - seconds)


@pytest.mark.acceptance(122)
def test_the_spend_limit_stops_with_a_checkpoint_inside_the_limit(instance: Instance) -> None:
    # A dollar a second: of $110 the last 11 are the reserve, and $96 are spent already.
    instance.train_with(steps=100_000, save_every=1000)
    instance.change(rate_usd_per_hour="3600", spend_limit_usd="110.00", stop_grace_s=2.0)
    begun_ago(instance, 96)
    assert instance.run() == file_names.EXIT_STOPPED
    check_ended_well(instance)
    text = next(e.text for e in instance.events() if e.kind == "limit_reached")
    assert text.startswith("The spend limit of $110.00 is near")
    assert instance.steps_in_store() == [instance.outcome().step]
    ended_at = (instance.root / "billing-ended").stat().st_mtime
    assert ended_at - instance.boot.started_at <= 110
    assert float(instance.heartbeat().spend_usd) <= 110


@pytest.mark.slow
def test_a_limit_raised_from_home_counts_from_then_on(instance: Instance) -> None:
    instance.train_with(steps=100, step_s=0.05)
    instance.change(time_limit_s=100.0)
    begun_ago(instance, 87)
    instance.ask(serial=1, time_limit_s=600.0, spend_limit_usd="55.5")
    assert instance.run() == 0
    assert "request_taken" in instance.kinds()
    assert instance.heartbeat().spend_limit_usd == "55.5"


@pytest.mark.slow
def test_a_request_with_an_invalid_amount_is_refused_and_training_continues(instance: Instance) -> None:
    instance.train_with(steps=60)
    instance.ask(serial=1, spend_limit_usd="lots")
    assert instance.run() == 0
    assert "request_refused" in instance.kinds()
    assert instance.heartbeat().spend_limit_usd == "100"


@pytest.mark.acceptance(122)
@pytest.mark.slow
def test_the_time_limit_ends_a_trainer_that_obeys_nothing(instance: Instance) -> None:
    instance.train_with(steps=100_000, deaf=1, save_every=10)
    instance.change(time_limit_s=110.0, stop_grace_s=0.4)
    begun_ago(instance, 96)
    assert instance.run() == file_names.EXIT_STOPPED
    check_ended_well(instance)
    assert "trainer_killed" in instance.kinds()
    assert instance.outcome().state == "stopped"
    assert instance.steps_in_store()


@pytest.mark.acceptance(125, "X24")
@pytest.mark.slow
def test_a_trainer_without_progress_is_ended_by_the_idle_limit(instance: Instance) -> None:
    instance.train_with(steps=100_000, silent=1, save_every=1e9)
    instance.change(idle_limit_s=1.5)
    assert instance.run() == file_names.EXIT_STOPPED
    check_ended_well(instance)
    assert "idle limit is 1.5 s" in instance.outcome().reason or instance.outcome().reason == "double trainer: stopped"
    assert any("idle limit" in e.text for e in instance.events() if e.kind == "limit_reached")


@pytest.mark.slow
def test_a_killed_agent_is_restarted_and_resumes_from_the_checkpoint(instance: Instance) -> None:
    instance.train_with(steps=120, step_s=0.03)
    first = instance.start()
    trainer = instance.trainer_pid()
    wait_until(lambda: instance.heartbeat().step > 10)
    first.kill()
    first.wait()
    assert trainer in instance.processes()  # the trainer does not need the agent
    assert instance.run() == 0
    check_ended_well(instance)
    assert "leftovers_ended" in instance.kinds()
    assert "resumed" in instance.kinds()
    assert not World().signal(trainer, 0)


@pytest.mark.slow
def test_an_agent_killed_after_the_outcome_only_ends_what_is_left_to_end(instance: Instance) -> None:
    instance.change(end_billing=EndBilling(kind="command", argv=[sys.executable, "-c", "raise SystemExit(1)"]))
    first = instance.start()
    wait_until(lambda: "end_billing_failed" in instance.kinds())
    first.kill()
    first.wait()
    touch = f"open({str(instance.root / 'billing-ended')!r}, 'w').close()"
    instance.change(end_billing=EndBilling(kind="command", argv=[sys.executable, "-c", touch]))
    num_starts = instance.kinds().count("phase_started")
    assert instance.run() == 0
    check_ended_well(instance)
    assert instance.kinds().count("phase_started") == num_starts
    assert "resumed" not in instance.kinds()


@pytest.mark.acceptance(124)
@pytest.mark.slow
def test_ending_billing_is_retried_until_it_works_and_is_reported_to_home(instance: Instance) -> None:
    flag = instance.root / "allowed"
    code = f"import pathlib, sys; sys.exit(0 if pathlib.Path({str(flag)!r}).exists() else 3)"
    instance.change(end_billing=EndBilling(kind="command", argv=[sys.executable, "-c", code]))
    agent = instance.start()

    def messages() -> bool:
        key = "runs/amber-1/heartbeat.json"
        return (
            instance.store.exists(key) and "STILL BILLING" in instance.in_store(Heartbeat, file_names.HEARTBEAT).problem
        )

    wait_until(messages)
    assert agent.poll() is None
    flag.touch()
    assert agent.wait(60) == 0
    assert instance.kinds()[-1] == "billing_ended"


@pytest.mark.slow
def test_a_dead_sync_is_started_again(instance: Instance) -> None:
    instance.train_with(steps=150, step_s=0.03)
    agent = instance.start()
    instance.trainer_pid()

    def watching() -> list[int]:
        marked = World().marked(CHILD_ENV, f"{instance.boot.mark}/watch")
        return [process.pid for process, _ in marked]

    wait_until(watching)
    killed = watching()[0]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: any(pid != killed for pid in watching()))
    assert agent.wait(60) == 0
    check_ended_well(instance)
    assert "sync_restarted" in instance.kinds()


@pytest.mark.acceptance(105)
@pytest.mark.slow
def test_training_continues_while_the_store_is_down_and_the_end_waits_for_it(
    instance: Instance, tmp_path: Path
) -> None:
    instance.train_with(steps=60)
    agent = instance.start()
    instance.trainer_pid()
    (tmp_path / "store").rename(tmp_path / "away")
    wait_until(lambda: (instance.run_dir / file_names.OUTCOME).exists() and "sync_failed" in instance.kinds())
    assert instance.outcome().state == "done"
    assert agent.poll() is None
    assert not instance.has_ended_billing()
    wait_until(lambda: "not verified" in instance.heartbeat().problem)
    (tmp_path / "away").rename(tmp_path / "store")
    assert agent.wait(60) == 0
    check_ended_well(instance)
    assert instance.steps_in_store()[-1] == 60


@pytest.mark.slow
def test_a_store_that_stays_away_does_not_hold_the_machine_past_its_limit(instance: Instance, tmp_path: Path) -> None:
    instance.train_with(steps=10)
    instance.change(time_limit_s=50.0, stop_grace_s=1.0)
    begun_ago(instance, 41)
    agent = instance.start()
    instance.trainer_pid()
    (tmp_path / "store").rename(tmp_path / "away")
    assert agent.wait(60) in (file_names.EXIT_FAILED, file_names.EXIT_STOPPED)
    assert instance.outcome().state != "done", "its model could not be fetched"
    assert (instance.root / "billing-ended").stat().st_mtime - instance.boot.started_at <= 50
    assert instance.has_ended_billing()
    assert "ended_unsaved" in instance.kinds()
    assert not instance.heartbeat().is_pushed


@pytest.mark.slow
def test_inputs_that_cannot_be_fetched_are_tried_again_until_the_limit(instance: Instance, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "away")
    agent = instance.start()
    wait_until(lambda: "sync_failed" in instance.kinds() or instance.kinds().count("push_failing"))
    (tmp_path / "away").rename(tmp_path / "store")
    assert agent.wait(60) == 0
    check_ended_well(instance)


@pytest.mark.acceptance(77)
@pytest.mark.slow
def test_an_input_that_the_store_does_not_have_ends_the_run_as_failed_with_its_log_in_the_store(
    instance: Instance,
) -> None:
    gone = hashlib.sha256(b"shard").hexdigest()
    instance.change(inputs=[*instance.boot.inputs, Input(f"objects/{gone}", "data/train-00000.bin", 5, gone)])
    assert instance.run() == file_names.EXIT_FAILED
    check_ended_well(instance)
    outcome = instance.in_store(Outcome, file_names.OUTCOME)
    assert (outcome.state, outcome.is_final) == ("failed", True)
    assert f"Cannot fetch data/train-00000.bin: objects/{gone} is not in" in outcome.reason
    assert "try 3 of 3" in outcome.log_tail, "the log that tells it, not the trainer's, which never began"
    assert f"objects/{gone}" in instance.store.read(f"runs/{instance.boot.run_id}/logs/sync.log").decode()
    assert instance.kinds().count("input_missing") == 1
    assert not instance.steps_in_store()


@pytest.mark.slow
def test_a_preemption_notice_becomes_a_checkpoint_that_is_pushed(instance: Instance) -> None:
    instance.train_with(steps=100_000, save_every=1e9)
    agent = instance.start()
    instance.trainer_pid()
    wait_until(lambda: instance.heartbeat().step > 2)
    agent.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert agent.wait(60) == file_names.EXIT_STOPPED
    assert time.monotonic() - began < 8
    check_ended_well(instance)
    assert instance.outcome().state == "stopped"
    assert not instance.outcome().is_final  # another attempt is needed
    assert instance.steps_in_store() == [instance.outcome().step]


@pytest.mark.slow
def test_what_the_trainer_started_ends_with_it(instance: Instance) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    instance.change(trainer_argv=[sys.executable, "-c", code])
    assert instance.run() == 0
    check_ended_well(instance)


@pytest.mark.acceptance(126)
@pytest.mark.slow
def test_an_error_inside_the_agent_still_ends_trainer_push_and_billing(instance: Instance) -> None:
    instance.train_with(steps=100_000)
    instance.change(trainer_argv=["/no/such/interpreter"])
    assert instance.run() == 1
    check_ended_well(instance)
    assert instance.outcome().reason.startswith("The agent failed: FileNotFoundError")
    assert "Traceback" in (instance.run_dir / "logs/agent.log").read_text()


def test_the_key_that_ends_billing_is_hidden_from_the_children(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_KEY", "canary-1234")
    code = f"import os, json; json.dump(dict(os.environ), open({str(instance.root / 'env.json')!r}, 'w'))"
    instance.change(trainer_argv=[sys.executable, "-c", code])
    instance.change(end_billing=EndBilling(kind="command", argv=["true"], header_env={"Authorization": "POD_KEY"}))
    assert instance.run() == 0
    env = json.loads((instance.root / "env.json").read_text())
    assert "POD_KEY" not in env
    assert env[file_names.MARK_ENV] == instance.boot.mark
    assert env["OMP_NUM_THREADS"] == "1"
    assert "canary-1234" not in "".join(
        p.read_text(errors="replace") for p in instance.run_dir.rglob("*") if p.is_file()
    )


@pytest.mark.slow
def test_a_command_that_ends_the_agent_too_is_not_waited_for(instance: Instance) -> None:
    code = (
        "import os, pathlib, signal, time; parent = os.getppid(); os.kill(parent, signal.SIGTERM)\n"
        "while os.getppid() == parent: time.sleep(0.01)\n"
        f"pathlib.Path({str(instance.root / 'billing-ended')!r}).touch()"
    )
    instance.change(end_billing=EndBilling(kind="command", argv=[sys.executable, "-c", code]))
    instance.run()
    wait_until(instance.has_ended_billing)
    assert instance.in_store(Heartbeat, file_names.HEARTBEAT).state == "ended"


class FastWorld(World):
    """A real machine whose clock runs sixty times as fast: minutes of waiting in seconds."""

    def now(self) -> float:
        return START + (time.time() - START) * 60

    def boottime(self) -> float:
        return time.monotonic() * 60

    def monotonic(self) -> float:
        return time.monotonic() * 60

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / 60)


START = time.time()


@pytest.mark.slow
def test_a_stuck_trainer_is_killed_and_restarted_from_its_checkpoint(instance: Instance) -> None:
    instance.train_with(hang_at=17)
    instance.change(heartbeat_s=2.0, rate_usd_per_hour="0.01", started_at=START)
    (instance.root / "work" / file_names.BOOT).write_text(codec.dumps(instance.boot))
    assert Agent(Folder(instance.boot, FastWorld())).run() == 0
    assert instance.has_ended_billing()
    assert instance.outcome().state == "done"
    stall = next(event.text for event in instance.events() if event.kind == "stalled")
    assert stall.startswith("The trainer is stuck: no step for 12")
    assert instance.kinds().count("trainer_restarted") == 1
    assert "resumed" in instance.kinds()
    assert instance.steps_in_store()[-1] == 20


class Refusing(World):
    """A provider that answers as configured, one answer per call."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.asked = list(answers), []  # type: ignore[var-annotated]

    def http(self, request: HttpRequest) -> HttpResponse:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, int)
        return HttpResponse(answer, {}, b"")


@pytest.mark.slow
def test_an_http_request_ends_billing_only_with_a_yes(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_KEY", "canary")
    end = EndBilling(
        "request", method="DELETE", url="http://127.0.0.1:1/pods/7", header_env={"Authorization": "POD_KEY"}
    )
    instance.change(end_billing=end, trainer_argv=[sys.executable, "-c", ""])
    (instance.root / "work" / file_names.BOOT).write_text(codec.dumps(instance.boot))
    world = Refusing(500, NetworkError("reset"), 404, 200)
    assert Agent(Folder(instance.boot, world)).run() == 0
    assert world.answers == []
    assert {(r.method, r.url, r.headers["Authorization"]) for r in world.asked} == {("DELETE", end.url, "canary")}
    assert instance.kinds().count("end_billing_failed") == 3
    assert instance.kinds()[-1] == "billing_ended"
    assert "canary" not in (instance.run_dir / file_names.EVENTS).read_text()


@pytest.mark.parametrize("end", [EndBilling("request", header_env={"A": "NOT_SET"}), EndBilling("pigeon")])
def test_what_cannot_end_billing_says_why(instance: Instance, end: EndBilling) -> None:
    instance.change(end_billing=end)
    assert "cannot end by" in end_billing(Folder(instance.boot, World()), 1, lambda: None)


def test_after_a_try_that_broke_off_a_signal_does_not_end_the_agent(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.change(end_billing=EndBilling("command", argv=["true"]))
    agent = Agent(Folder(instance.boot, World()))
    was_leaving: list[bool] = []

    def on_a_full_disk(folder: Folder, tries: int, tick: object) -> str:
        if tries == 1:
            raise OSError(28, "No space left on device")
        return ""

    monkeypatch.setattr("homing.instance.agent.end_billing.end_billing", on_a_full_disk)
    monkeypatch.setattr(agent.world, "sleep", lambda seconds: was_leaving.append(agent.is_leaving))
    agent._end_billing()
    assert was_leaving == [False]


@pytest.mark.slow
def test_a_second_agent_on_the_same_folder_leaves_everything_to_the_first(instance: Instance) -> None:
    instance.train_with(steps=60)
    first = instance.start()
    trainer = instance.trainer_pid()
    second = instance.start()
    assert second.wait(20) == 0
    assert "Another agent is already running" in (instance.root / "agent.out").read_text()
    assert World().signal(trainer, 0)
    assert not instance.has_ended_billing()
    assert first.wait(60) == 0
    check_ended_well(instance)
    assert "leftovers_ended" not in instance.kinds()


def test_with_no_time_left_the_last_words_stay_here_and_billing_ends(instance: Instance) -> None:
    instance.change(time_limit_s=50.0)
    begun_ago(instance, 49.9)
    agent = Agent(Folder(instance.boot, World()))
    agent._say_goodbye()
    assert instance.heartbeat().state == "ended"
    assert not instance.store.exists("runs/amber-1/heartbeat.json")


def test_an_agent_that_fails_near_the_limit_does_not_wait_past_it_for_a_deaf_trainer(instance: Instance) -> None:
    instance.train_with(steps=100_000, deaf=1)
    instance.change(time_limit_s=100.0, stop_grace_s=60.0)
    begun_ago(instance, 94)
    agent = Agent(Folder(instance.boot, World()))
    agent._start("trainer", instance.boot.trainer_argv)
    began = time.monotonic()
    agent._end_children()
    assert time.monotonic() - began < 6
    assert agent.children == {}
    wait_until(lambda: instance.processes() == [])


@pytest.mark.slow
def test_an_instance_that_another_has_superseded_pushes_nothing_more_and_ends_billing(instance: Instance) -> None:
    instance.train_with(steps=100_000, step_s=0.02)
    agent = instance.start()
    instance.trainer_pid()
    wait_until(lambda: instance.store.exists("runs/amber-1/heartbeat.json"))  # nothing is pushed once it is superseded
    lease = Lease(1, "amber-1", "bbbbbb", "attic", "another-owner", time.time())
    instance.store.put_bytes(lease_key("amber-1", 1), codec.dumps(lease).encode())
    assert agent.wait(60) == file_names.EXIT_STOPPED
    assert instance.has_ended_billing()
    assert "superseded" in instance.kinds()
    assert "pushed" not in instance.kinds()
    assert "superseded" in instance.outcome().reason
    assert not instance.store.exists("runs/amber-1/outcome.json")
    assert instance.in_store(Heartbeat, file_names.HEARTBEAT).state != "ended"
    wait_until(lambda: instance.processes() == [])


def serve_notice() -> tuple[HTTPServer, dict[str, int]]:
    said = {"status": 404, "asked": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said["asked"] += 1
            self.send_response(said["status"])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, said


@pytest.mark.slow
def test_a_notice_at_the_machines_own_address_becomes_a_checkpoint_and_a_preempted_outcome(instance: Instance) -> None:
    server, said = serve_notice()
    instance.train_with(steps=100_000, save_every=1e9)
    instance.change(notice_url=f"http://127.0.0.1:{server.server_port}/notice")
    agent = instance.start()
    instance.trainer_pid()
    wait_until(lambda: said["asked"] and instance.heartbeat().step > 3)
    assert agent.poll() is None, "404 is no notice"
    said["status"] = 200
    assert agent.wait(60) == file_names.EXIT_STOPPED
    server.shutdown()
    server.server_close()
    outcome = instance.outcome()
    assert (outcome.state, outcome.is_preempted, outcome.is_final) == ("stopped", True, False)
    assert "preempted" in instance.kinds()
    assert instance.steps_in_store()
    assert instance.in_store(Outcome, file_names.OUTCOME).is_preempted


@pytest.mark.slow
def test_a_notice_address_that_does_not_answer_disturbs_nothing(instance: Instance) -> None:
    instance.change(notice_url="http://127.0.0.1:1/notice")
    assert instance.run() == 0
    check_ended_well(instance)
    assert not instance.outcome().is_preempted


@pytest.mark.acceptance(126)
@pytest.mark.slow
def test_a_failure_leaves_its_last_words_where_they_outlive_the_instance(instance: Instance) -> None:
    code = "print('a line before')\nraise ValueError('the shards are torn')"
    instance.change(trainer_argv=[sys.executable, "-c", code])
    assert instance.run() == 1
    outcome = instance.in_store(Outcome, file_names.OUTCOME)
    assert outcome.reason == "The trainer ended with exit code 1: ValueError: the shards are torn"
    assert outcome.log_tail.startswith("Traceback (most recent call last)")
    assert "a line before" not in outcome.log_tail
    event = next(event for event in instance.events() if event.kind == "run_failed")
    assert event.data["log_tail"] == outcome.log_tail


@pytest.mark.acceptance(126)
@pytest.mark.slow
def test_a_failed_instance_is_kept_for_a_person_and_a_stop_from_home_ends_it(instance: Instance) -> None:
    instance.change(trainer_argv=[sys.executable, "-c", "raise SystemExit(1)"], keep_on_failure_s=600.0)
    agent = instance.start()
    wait_until(
        lambda: "kept" in instance.kinds() and instance.in_store(Heartbeat, file_names.HEARTBEAT).state == "kept"
    )
    assert instance.in_store(Outcome, file_names.OUTCOME).state == "failed", (
        "its words are in the store before the wait"
    )
    assert not instance.has_ended_billing()
    instance.ask(serial=1, stop=True, reason="Seen enough.")
    assert agent.wait(60) == 1
    check_ended_well(instance)


@pytest.mark.slow
def test_a_kept_instance_ends_when_its_time_is_over_and_inside_its_limit(instance: Instance) -> None:
    instance.change(trainer_argv=[sys.executable, "-c", "raise SystemExit(1)"], keep_on_failure_s=1.0)
    assert instance.run() == 1
    check_ended_well(instance)


@pytest.mark.slow
def test_a_run_that_did_not_fail_is_not_kept(instance: Instance) -> None:
    instance.change(keep_on_failure_s=600.0)
    assert instance.run() == 0
    assert "kept" not in instance.kinds()


@pytest.mark.slow
def test_a_diverged_run_raises_one_alert_and_continues(instance: Instance) -> None:
    instance.train_with(steps=120, lost_at=5, save_every=60)
    assert instance.run() == 0
    alerts = [event for event in instance.events() if event.kind == "alert"]
    assert len(alerts) == 1
    assert "loss diverged" in alerts[0].text


@pytest.mark.acceptance(119)
@pytest.mark.slow
def test_a_diverged_run_is_stopped_with_a_checkpoint_where_the_run_file_says_so(instance: Instance) -> None:
    instance.train_with(steps=100_000, lost_at=5)
    instance.change(on_divergence="stop")
    assert instance.run() == file_names.EXIT_STOPPED
    check_ended_well(instance)
    assert instance.outcome().is_final
    assert "stop_asked" in instance.kinds()


@pytest.mark.acceptance("X1")
@pytest.mark.slow
def test_warnings_are_said_once_each_also_by_a_second_agent(instance: Instance) -> None:
    instance.train_with(steps=100_000, step_s=0.05)
    instance.change(time_limit_s=1000.0)
    begun_ago(instance, 650)
    agent = instance.start()
    wait_until(lambda: "limit_warning" in instance.kinds())
    agent.kill()
    wait_until(lambda: "agent_restarted" in instance.kinds())
    wait_until(lambda: "leftovers_ended" in instance.kinds())
    instance.trainer_pid()
    time.sleep(1.0)
    assert instance.kinds().count("limit_warning") == 1


@pytest.mark.acceptance(125, "X24")
@pytest.mark.slow
def test_utilization_is_in_the_heartbeat_and_in_the_event_of_an_idle_stop(instance: Instance) -> None:
    instance.train_with(steps=100_000, silent=1, save_every=1e9)
    instance.change(idle_limit_s=1.5)
    assert instance.run() == file_names.EXIT_STOPPED
    assert set(instance.heartbeat().use) >= {"cpu", "memory"}
    assert all(share >= 0 for share in instance.heartbeat().use.values())
    event = next(event for event in instance.events() if event.kind == "limit_reached")
    assert set(event.data["use"]) >= {"cpu", "memory"}


@pytest.mark.slow
def test_new_limits_are_written_down_for_the_dead_man(instance: Instance) -> None:
    instance.train_with(steps=100_000)
    agent = instance.start()
    instance.trainer_pid()
    instance.ask(serial=1, spend_limit_usd="7.50", time_limit_s=5000.0)
    wait_until(lambda: (instance.run_dir / file_names.LIMITS).exists())
    taken = codec.loads(Request, (instance.run_dir / file_names.LIMITS).read_bytes())
    assert (taken.spend_limit_usd, taken.time_limit_s, taken.stop) == ("7.50", 5000.0, False)
    wait_until(lambda: instance.heartbeat().spend_limit_usd == "7.50" and instance.heartbeat().time_limit_s == 5000.0)
    agent.kill()


def test_no_key_appears_in_events_outcome_or_log(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to the store; what a provider or a library put into an exception may hold a key."""
    monkeypatch.setenv("STORE_SECRET", "canary-of-the-store")
    instance.change(secret_names=["STORE_SECRET", "NOT_SET"])
    instance.run_dir.mkdir(parents=True, exist_ok=True)
    folder = Folder(instance.boot, World())
    folder.event("push_failing", "refused canary-of-the-store")
    assert "canary" not in (instance.run_dir / file_names.EVENTS).read_text()
    assert "refused ***" in (instance.run_dir / file_names.EVENTS).read_text()
    try:
        raise OSError("with canary-of-the-store")
    except OSError as exc:
        messages = (type(exc), exc, exc.__traceback__)
    record = folder.record("x", logging.ERROR, "f", 1, "asked %s", ("canary-of-the-store",), messages)
    text = logging.Formatter("%(message)s").format(record)
    assert "canary" not in text
    assert "OSError: with ***" in text
