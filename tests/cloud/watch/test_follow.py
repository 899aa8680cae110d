"""Heartbeats, metrics and events to what a person sees."""

from __future__ import annotations

import dataclasses
import json
import signal
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import make_draft, marked_now, trainer_argv

from homing.cloud.contact.heartbeats import RunReports, Tail
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.providers.base import Instance
from homing.cloud.providers.local.provider import Local
from homing.cloud.reconcile.run_status import Status, check_interval, figures_of, look
from homing.cloud.watch.follow import _Watch, watch
from homing.cloud.watch.progress import progress_line, to_finish
from homing.errors import ProviderRefused, StillBilling, StoreError, UsageError
from homing.store import FileStore, run_key
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat
from homing.wire.event_lines import Event, Metric
from homing.world import World


@pytest.mark.acceptance(118, "X24")
def test_the_progress_line_shows_step_loss_speed_dollars_and_eta() -> None:
    beat = Heartbeat(
        t=0.0,
        mark="m",
        attempt=1,
        state="training",
        started_at=0.0,
        rate_usd_per_hour="1",
        spend_usd="1.83",
        step=1200,
        num_steps=20000,
        loss=3.2141,
        tokens_per_s=412_000.0,
        mfu=0.41,
        eta_s=7800.0,
    )
    run = RunRow("moss-1", "moss", "running", 0.0, "file:/s", "", spend_limit_usd="12.00")
    status = Status(run, [], RunReports(beat, None), Decimal("1.83"), 0.0)
    said = "step 1,200/20,000 | loss 3.214 | 412k tok/s | mfu 41% | $1.83 of $12.00 | eta 2h10m"
    assert progress_line(status, beat) == said
    assert progress_line(status, None) == "$1.83 of $12.00"
    begun = dataclasses.replace(beat, step=0, num_steps=0, loss=None, mfu=None, tokens_per_s=None, eta_s=None)
    assert progress_line(status, begun) == "$1.83 of $12.00 | training, no metrics yet"
    assert progress_line(status, dataclasses.replace(begun, state="fetching")) == "$1.83 of $12.00 | fetching"
    bare = dataclasses.replace(beat, loss=None, mfu=None, tokens_per_s=None, eta_s=None)
    assert progress_line(status, bare) == "step 1,200/20,000 | $1.83 of $12.00"
    busy = dataclasses.replace(bare, use={"cpu": 0.3, "memory": 0.2, "gpu": 0.974, "gpu_memory": 0.62})
    assert progress_line(status, busy) == "step 1,200/20,000 | GPU 97%, GPU memory 62% | $1.83 of $12.00"
    over = dataclasses.replace(status, run=dataclasses.replace(run, state="done"))
    assert "card" not in progress_line(over, busy)
    chain = dataclasses.replace(status, phases=("pretrain", "sft", "rl"))
    assert progress_line(chain, dataclasses.replace(bare, phase="sft")).startswith("sft 2/3 | step 1,200/20,000 | ")
    alone = dataclasses.replace(status, phases=("sft",))
    assert progress_line(alone, dataclasses.replace(bare, phase="sft")).startswith("step 1,200/20,000 | ")


def test_the_rl_progress_line_shows_reward_and_pass_rates_instead_of_loss() -> None:
    beat = Heartbeat(0.0, "m", 1, "training", 0.0, "1", "1", phase="rl", step=4, num_steps=4, loss=0.0)
    run = RunRow("moss-1", "moss", "running", 0.0, "file:/s", "", spend_limit_usd="12.00")
    status = Status(run, [], RunReports(beat, None), Decimal("1.83"), 0.0)
    assert progress_line(status, beat) == "step 4/4 | $1.83 of $12.00", "a loss of 0 would say that all is learned"
    figures = {"reward": 0.25, "pass_at_16": 0.5}
    assert progress_line(status, beat, figures) == "step 4/4 | reward 0.250 | $1.83 of $12.00"
    figures |= {"val_pass_at_16": 0.3, "val_pass_at_1": 0.028}
    said = "step 4/4 | reward 0.250 | held-out pass@1 0.028, pass@16 0.300 | $1.83 of $12.00"
    assert progress_line(status, beat, figures) == said


def watching(home: Home) -> _Watch:
    (home.path / "store").mkdir(parents=True)
    run = RunRow("moss-1", "moss", "running", 0.0, f"file:{home.path}/store", "")
    home.ledger.intend(run, LedgerLine("m1", run.id, run.name, 1, "local", "o", "36", None, 1.0))
    return _Watch(home, run, 1.0)


def put(watched: _Watch, name: str, *documents: object) -> None:
    text = "".join(codec.dumps(each) + "\n" for each in documents)  # type: ignore[arg-type]
    watched.store.put_bytes(run_key("moss-1", name), text.encode())


def test_an_rl_evaluation_is_reported_by_reward_and_only_its_latest_progress(home: Home) -> None:
    watched = watching(home)
    evaluating = [
        Event(10.0 + done, "trainer", "evaluating", f"Evaluating: {done} of 9 rows.", "rl", 4) for done in (4, 8, 9)
    ]
    put(watched, file_names.EVENTS, *evaluating[:2])
    assert [report.text for report in watched.feed.reports(home.ledger.lines("moss-1"))] == [
        "step 4 | trainer: Evaluating: 8 of 9 rows."
    ]
    more = {"reward": 0.25, "val_reward": 0.028, "val_pass_at_1": 0.028, "val_pass_at_4": 0.111}
    put(watched, file_names.METRICS, Metric(20.0, "rl", 4, 4, 100, 0.0, val_loss=0.972, more=more))
    put(watched, file_names.EVENTS, *evaluating)
    messages = [report.text for report in watched.feed.reports(home.ledger.lines("moss-1"))]
    assert messages == ["validation at step 4: reward 0.028, held-out pass@1 0.028, pass@4 0.111"]
    beat = Heartbeat(20.0, "m1", 1, "training", 0.0, "36", "1", phase="rl", step=4, num_steps=4, loss=0.0)
    status = Status(watched.run, [], RunReports(beat, None), Decimal(1), 0.0)
    (line,) = watched._line(status, watched.line_due)
    assert line.text.startswith("step 4/4 | reward 0.250 | held-out pass@1 0.028, pass@4 0.111 | ")
    assert line.data["figures"] == more
    assert figures_of(home, watched.run, beat) == more, "what status shows"


def test_a_poll_that_fails_halfway_loses_no_reports(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    # Metrics are read before events. Once, a store failure between the two reads lost the metrics already read.
    watched = watching(home)
    put(watched, file_names.METRICS, Metric(20.0, "pretrain", 4, 8, 100, 2.0, val_loss=1.5))
    put(watched, file_names.EVENTS, Event(10.0, "trainer", "checkpoint_saved", "Saved.", "pretrain", 4))
    real = FileStore.read

    def unreadable(store: FileStore, key: str) -> bytes:
        if key.endswith(file_names.EVENTS):
            raise StoreError("It did not answer.")
        return real(store, key)

    status = look(home, watched.run)
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "read", unreadable)
        with pytest.raises(StoreError):
            list(watched._new_reports(status))
    messages = [report.text for report in watched._new_reports(status)]
    assert messages == ["step 4 | trainer: Saved.", "validation at step 4: loss 1.500"]
    assert list(watched._new_reports(status)) == []


def test_events_of_an_ended_attempt_are_not_repeated_as_those_of_the_next(home: Home) -> None:
    watched = watching(home)
    begun = Event(5.0, "trainer", "started", "It begins.")
    taken = Event(10.0, "lookout", "preempted", "The machine will be taken away.")
    asked = Event(11.0, "agent", "stop_asked", "SIGTERM was received.")
    put(watched, file_names.EVENTS, begun, taken)
    messages = [report.text for report in watched.feed.reports(home.ledger.lines("moss-1"))]
    assert messages == ["trainer: It begins.", "lookout: The machine will be taken away."]
    home.ledger.set_run("moss-1", state="stopped")
    home.ledger.close("m1", at=19.0, spend_usd=Decimal(1), note="")
    home.ledger.intend(watched.run, LedgerLine("m2", "moss-1", "moss", 2, "local", "o", "36", None, 20.0))
    # The second attempt rewrites the events it found at the start of the file; the last one of the first arrives late.
    anew = Event(25.0, "trainer", "resumed", "Resumed at step 21.")
    put(watched, file_names.EVENTS, taken, asked, anew)
    later = [(report.kind, report.text) for report in watched.feed.reports(home.ledger.lines("moss-1"))]
    assert later == [
        ("event", "from attempt 1: agent: SIGTERM was received."),
        ("event", "trainer: Resumed at step 21."),
    ]


def test_a_watch_sums_up_each_earlier_attempt_in_one_line(home: Home) -> None:
    watched = watching(home)
    home.ledger.begin_create("m1", 2.0)
    home.ledger.set_run("moss-1", state="stopped")
    home.ledger.close("m1", at=19.0, spend_usd=Decimal("0.0146"), note="")
    home.ledger.intend(watched.run, LedgerLine("m2", "moss-1", "moss", 2, "local", "o", "36", None, 20.0))
    samples = [f"samples/pretrain-{step}.txt" for step in (9, 29)]
    events = [
        Event(5.0, "trainer", "started", "It begins."),
        Event(6.0, "trainer", "sampled", "once", step=9, data={"path": samples[0]}),
        Event(10.0, "trainer", "checkpoint_saved", "Checkpoint saved.", step=21),
        Event(25.0, "trainer", "resumed", "Resumed at step 21.", step=21),
        Event(26.0, "trainer", "sampled", "upon", step=29, data={"path": samples[1]}),
    ]
    put(watched, file_names.EVENTS, *events)
    metrics = [Metric(float(t), "pretrain", step, 40, 100, 3.0, val_loss=3.0) for t, step in ((7, 10), (27, 30))]
    put(watched, file_names.METRICS, *metrics)
    for sample, text in zip(samples, ("once", "upon"), strict=True):
        watched.store.put_bytes(run_key("moss-1", sample), text.encode())
    messages = [report.text for report in watched.feed.reports(home.ledger.lines("moss-1"))]
    assert messages == [
        "attempt 1 ended: up to step 21, $0.0146",
        "step 21 | trainer: Resumed at step 21.",
        "upon",
        "validation at step 30: loss 3.000",
    ]
    put(watched, file_names.EVENTS, *events, Event(30.0, "trainer", "landing", "Landing."))
    assert [report.text for report in watched.feed.reports(home.ledger.lines("moss-1"))] == ["trainer: Landing."]


def test_the_number_of_ledger_reads_does_not_grow_with_the_events(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, asked = watching(home), list[str]()
    lines = home.ledger.lines
    monkeypatch.setattr(home.ledger, "lines", lambda run_id=None: asked.append("lines") or lines(run_id))
    watched.refresh_due = home.world.monotonic() + 60.0  # the provider is not asked in between
    list(watched._poll())
    for_none = len(asked)
    events = [Event(5.0 + n, "trainer", "landing", f"Landing {n}.", data={"needs_s": 100.0}) for n in range(9)]
    put(watched, file_names.EVENTS, *events)
    messages = [report.text for report in watched._poll() if report.kind == "event"]
    assert messages[0] == "trainer: Landing 0. Finishing the full plan would cost about $1.00 more."
    assert len(messages) == 9
    assert (for_none, len(asked)) == (1, 2)


def left_usd(**messages: Any) -> Decimal | None:
    """Dollars to finish a run at step 40 of 100, at a second a step and a cent a second."""
    beat = Heartbeat(0.0, "m", 1, "ended", 0.0, "36", "1", step=40, num_steps=100, step_s=1.0, **messages)
    run = RunRow("moss-1", "moss", "stopped", 0.0, "file:/s", "")
    line = LedgerLine("m", run.id, run.name, 1, "local", "o", "36", None, 0.0)
    return to_finish(Status(run, [line], RunReports(beat, None), Decimal(1), 0.0))


def test_the_dollars_to_finish_use_the_trainers_eta_to_the_planned_end() -> None:
    assert left_usd(eta_s=150.0) == Decimal("1.50"), "60 steps of a second, and its evaluations"
    assert left_usd(eta_s=0.0, end_step=40, plan_s=150.0) == Decimal("1.50"), "landed"
    assert left_usd() is None
    assert left_usd(eta_s=0.0, end_step=40) is None, "a landing without the time of the full plan"


def test_a_metric_of_an_earlier_phase_does_not_override_a_newer_heartbeat(home: Home) -> None:
    run = RunRow("moss-1", "moss", "running", 0.0, f"file:{home.path}/store", "")
    beat = Heartbeat(50.0, "m", 1, "training", 0.0, "36", "1", phase="sft", step=2, num_steps=8)
    status = Status(run, [], RunReports(beat, None), Decimal(1), 0.0, phases=("pretrain", "sft"))
    watching = _Watch(home, run, 1.0)
    shown = {}
    for t, phase, step in ((40.0, "pretrain", 20), (49.0, "sft", 3), (60.0, "rl", 1)):
        watching.feed.metric = Metric(t, phase, step, 20, 100, 3.0)
        newest = watching._beat(status)
        assert newest is not None
        shown[phase] = (newest.phase, newest.step)
    assert shown == {"pretrain": ("sft", 2), "sft": ("sft", 3), "rl": ("rl", 1)}


@pytest.mark.slow
@pytest.mark.acceptance(62)
def test_watch_reports_steps_events_samples_and_the_end(home: Home, tmp_path: Path) -> None:
    # No more samples than a watch repeats from the past, since it may begin when all of them are there.
    done = launch(make_draft(home, tmp_path, steps=25, step_s=0.02), home)
    reports = list(watch(home, done.run, every_s=1))
    kinds = [report.kind for report in reports]
    assert {"line", "event", "sample", "end"} <= set(kinds)
    assert kinds[-1] == "end"
    assert reports[-1].text == "done: All steps are done."
    assert [report.text for report in reports if report.kind == "sample"] == ["once upon a time"] * 5
    events = [report.text for report in reports if report.kind == "event"]
    assert not any("once upon" in text for text in events)  # a sample is shown once, as a sample
    last = [report.text for report in reports if report.kind == "line"][-1]
    assert last.startswith("step 25/25 | loss 0.200 | 6.4k tok/s | mfu 41% | $")
    beats = [report.data["heartbeat"] for report in reports if report.kind == "line" and report.data["heartbeat"]]
    trained = [beat for beat in beats if beat["step"]]
    assert [beat["eta_s"] for beat in trained] == [pytest.approx(2.0 * (25 - beat["step"]) * 0.02) for beat in trained]
    assert json.loads((home.path / "speed.json").read_text())["measured"][0]["tokens_per_s"] == 6400.0


@pytest.mark.acceptance(110)
@pytest.mark.slow
def test_a_failed_poll_is_reported_once_and_does_not_end_the_watch(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch(make_draft(home, tmp_path, steps=40, step_s=0.02), home)
    read, failures = FileStore.read, []

    def flaky(self: FileStore, key: str) -> bytes:
        if key.endswith("events.jsonl") and len(failures) < 3:
            failures.append(key)
            raise StoreError("The store is away.")
        return read(self, key)

    monkeypatch.setattr(FileStore, "read", flaky)
    reports = list(watch(home, done.run, every_s=1))
    assert [report.text for report in reports if report.kind == "problem"] == ["The store is away. Retrying."]
    assert reports[-1].text.startswith("done")


@pytest.mark.acceptance(123, "X1")
@pytest.mark.slow
def test_the_spend_limit_stops_the_run_below_it_with_its_own_exit_code(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance uses the real clock, so the rate is high enough to reach the limit in a minute."""
    monkeypatch.setenv("HOMING_LOCAL_RATE", "36")
    monkeypatch.setattr("homing.cloud.launch.draft._check_minimum", lambda *_: None)
    done = launch(make_draft(home, tmp_path, limit="0.60", steps=100_000, step_s=0.02), home)
    reports = list(watch(home, home.ledger.find("moss"), every_s=1))
    row = home.ledger.find("moss")
    assert (row.state, row.exit_code) == ("stopped", 5)
    alerts = [report.text for report in reports if report.kind == "alert"]
    assert sum("of a limit is used" in text for text in alerts) == 2  # at 60% and at 80%, once each
    seen = home.provider("local").describe(done.instance.id)
    assert seen.spend_usd is not None
    assert seen.spend_usd <= Decimal("0.60")
    assert to_finish(look(home, row)) is not None


@pytest.mark.slow
def test_a_watch_destroys_an_instance_without_an_agent_and_relaunches(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.cloud.guard.guard_pass.DEAD_S", 0.0)
    monkeypatch.setattr("homing.cloud.watch.follow._REFRESH_S", 0.2)
    argv = partial(trainer_argv, tmp_path, steps=8)
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv", lambda python, work_dir: argv(str(work_dir))
    )
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    while marked_now(home):
        for pid, _ in marked_now(home):
            World().signal(pid, signal.SIGKILL)
    reports = list(watch(home, done.run, every_s=1))
    alerts = [report.text for report in reports if report.kind == "alert"]
    assert any("The agent is no longer running" in text for text in alerts)
    assert any("Attempt 2 launches" in text for text in alerts)
    assert reports[-1].text.startswith("done")
    assert [line.attempt for line in home.ledger.lines()] == [1, 2]


def test_a_watch_destroys_an_instance_that_is_past_its_limit(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    home.ledger.update(home.ledger.lines()[0].mark, spend_usd="99")
    reports = list(watch(home, done.run, every_s=1))
    assert "The local guard ended the run at its limit" in reports[-1].text
    assert home.ledger.find("moss").exit_code == 5
    assert not marked_now(home)


@pytest.mark.slow
def test_a_watch_raises_still_billing_if_the_provider_does_not_confirm_the_end(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000), home)
    home.ledger.update(home.ledger.lines()[0].mark, spend_usd="99")
    monkeypatch.setattr("homing.cloud.guard.limits_and_destroys.DESTROY_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(Local, "destroy", lambda *_: (_ for _ in ()).throw(ProviderRefused("No, says the provider.")))
        with pytest.raises(StillBilling, match="may still be running: the destroy is not confirmed"):
            list(watch(home, done.run, every_s=1))


@pytest.mark.slow
def test_events_validations_and_samples_are_reported_in_time_order(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=2), home)
    list(watch(home, done.run, every_s=1))
    store, run_id = home.store_of(done.run), done.run.id
    events = [
        Event(1.0, "sync", "checkpoint_pushed", "A transfer of the past."),
        Event(2.0, "trainer", "phase_started", "Begun."),
        Event(4.0, "trainer", "sampled", "text", data={"path": "samples/pretrain-00000009.txt"}),
        Event(5.0, "agent", "limit_warning", "60% of a limit is used up."),
    ]
    store.put_bytes(run_key(run_id, file_names.EVENTS), "".join(codec.dumps(e) + "\n" for e in events).encode())
    metric = Metric(3.0, "pretrain", 9, 10, 90, loss=2.0, val_loss=2.5)
    store.put_bytes(run_key(run_id, file_names.METRICS), (codec.dumps(metric) + "\n").encode())
    store.put_bytes(run_key(run_id, file_names.SAMPLES, "pretrain-00000009.txt"), b"once upon")
    messages = [(r.kind, r.text) for r in watch(home, home.ledger.find("moss"), every_s=1) if r.kind != "line"]
    assert [kind for kind, _ in messages] == ["event", "event", "sample", "alert", "end"]
    assert "validation at step 9" in messages[1][1]


@pytest.mark.slow
def test_a_provider_that_does_not_answer_is_reported_once(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch(make_draft(home, tmp_path, steps=60, step_s=0.05), home)
    monkeypatch.setattr("homing.cloud.watch.follow._REFRESH_S", 0.2)
    real, asked = Local.list_owned, []

    def flaky(self: Local) -> list[Instance]:
        asked.append(1)
        if len(asked) < 8:
            raise OSError("no answer")
        return real(self)

    monkeypatch.setattr(Local, "list_owned", flaky)
    reports = list(watch(home, done.run, every_s=1))
    (problem,) = [report.text for report in reports if report.kind == "problem"]
    lasting = [each for report in reports if report.kind == "line" for each in report.data["problems"]]
    assert lasting, "while it lasts, each line names it"
    assert {f"{each} Retrying." for each in lasting} == {problem}
    assert reports[-1].kind == "end"


@pytest.mark.slow
def test_a_watch_of_a_finished_run_ends_at_once(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=3), home)
    list(watch(home, done.run, every_s=1))
    again = list(watch(home, home.ledger.find("moss"), every_s=60))
    assert again[-1].kind == "end"


@pytest.mark.parametrize("every_s", [0, -3, 0.5, 100_000, float("nan")])
def test_a_bad_interval_is_refused(every_s: float) -> None:
    with pytest.raises(UsageError, match="interval"):
        check_interval(every_s)


class TestTail:
    @pytest.fixture
    def store(self, tmp_path: Path) -> FileStore:
        return FileStore(str(tmp_path / "store"), World())

    def test_each_line_is_returned_once_and_only_when_complete(self, store: FileStore) -> None:
        tail = Tail(store, "log")
        store.put_bytes("other", b"")
        assert tail.lines() == []
        store.put_bytes("log", b"one\ntw")
        assert tail.lines() == ["one"]
        store.put_bytes("log", b"one\ntwo\n")
        assert tail.lines() == ["two"]
        assert tail.lines() == []

    def test_a_file_that_was_cut_or_replaced_is_read_from_its_beginning(self, store: FileStore) -> None:
        tail = Tail(store, "log")
        store.put_bytes("log", b"one\ntwo\n")
        assert tail.lines() == ["one", "two"]
        store.put_bytes("log", b"uno\n")
        assert tail.lines() == ["uno"]
        store.put_bytes("log", b"a much longer file\nwith other lines\n")
        assert tail.lines() == ["a much longer file", "with other lines"]

    def test_unicode_line_separators_do_not_split_a_document(self, store: FileStore) -> None:
        event = Event(1.0, "trainer", "sampled", "one\u2028two\x85three")
        store.put_bytes("events", codec.dumps(event).encode() + b"\n")
        assert Tail(store, "events").documents(Event) == [event]

    def test_a_line_that_is_not_a_document_is_skipped(self, store: FileStore) -> None:
        tail = Tail(store, "events")
        good = json.dumps({"t": 1.0, "source": "agent", "kind": "k", "text": "t"})
        store.put_bytes("events", f"{good}\nnot json\n{good}\n".encode())
        assert len(tail.documents(Event)) == 2


def test_the_last_step_is_reported_once_even_if_its_dollars_changed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch(make_draft(home, tmp_path), home)
    assert list(watch(home, done.run, every_s=1))[-1].kind == "end"
    dollars = iter(Decimal(n) for n in range(1, 9))
    monkeypatch.setattr(
        "homing.cloud.watch.follow.look",
        lambda home, run: dataclasses.replace(look(home, run), spend_usd=next(dollars)),
    )

    def messages(watching: _Watch, *, is_new: bool = False) -> list[str]:
        reports = list(watching._poll())
        if is_new:
            path = tmp_path / "store" / run_key(done.run.id, file_names.METRICS)
            metric = Metric(0.0, "pretrain", 13, 12, 832, loss=0.3)
            path.write_text(path.read_text() + codec.dumps(metric) + "\n")
        reports += watching._last_words()
        return [report.text for report in reports if report.kind == "line"]

    (line,) = messages(_Watch(home, done.run, 1.0))
    assert line.startswith("step 12/12 | ")
    earlier, later = messages(_Watch(home, done.run, 1.0), is_new=True)
    assert earlier.startswith("step 12/12 | ")
    assert later.startswith("step 13/12 | loss 0.300 | ")


def test_a_watch_begins_with_the_rate_the_guards_and_the_last_stored_checkpoint(home: Home) -> None:
    watched = watching(home)
    home.ledger.begin_create("m1", 2.0)
    beat = Heartbeat(20.0, "m1", 1, "training", 0.0, "36", "1", phase="pretrain", step=30, num_steps=40)
    put(watched, file_names.HEARTBEAT, dataclasses.replace(beat, has_dead_man=True))
    put(
        watched,
        file_names.METRICS,
        Metric(5.0, "pretrain", 10, 40, 100, 6.0),
        Metric(20.0, "pretrain", 30, 40, 300, 4.5),
    )
    watched.refresh_due = home.world.monotonic() + 600.0  # the provider is not asked in between
    (head,) = [report for report in watched._poll() if report.kind == "head"]
    rented = "attempt 1 on local o | $36.00/h, no limit"
    learned = "loss 6.000 at step 10, 4.500 at step 30"
    unknown = "local is not set up here, so it is unknown whether they can end billing"
    guarded = f"guards on the instance: agent and dead-man; {unknown} | safe in the store: no checkpoint yet"
    assert head.text == f"{rented} | {guarded} | {learned}"
    assert head.data["rate_usd_per_hour"] == "36"
    assert not [report for report in watched._poll() if report.kind == "head"], "once for each machine"

    put(watched, "checkpoints/pretrain/step-00000020/manifest.json")
    put(watched, "checkpoints/pretrain/step-00000030/model.safetensors")  # its manifest is still on its way
    put(watched, file_names.HEARTBEAT, beat)
    again = _Watch(home, watched.run, 1.0)
    again.refresh_due = watched.refresh_due
    (head,) = [report for report in again._poll() if report.kind == "head"]
    assert "guards on the instance: agent only; local is not set up here" in head.text
    assert "| safe in the store: pretrain step 20 | " in head.text


def test_a_watch_repeats_only_the_last_validations_of_the_past(home: Home) -> None:
    watched = watching(home)
    messages = [Metric(float(n), "pretrain", n, 40, n, 3.0, val_loss=3.0) for n in range(1, 31)]
    put(watched, file_names.METRICS, *messages)
    first = [report.text for report in watched.feed.reports(home.ledger.lines("moss-1"))]
    assert first == [f"validation at step {n}: loss 3.000" for n in range(26, 31)]
    more = [Metric(float(n), "pretrain", n, 40, n, 2.0, val_loss=2.0) for n in range(31, 41)]
    put(watched, file_names.METRICS, *messages, *more)
    assert len(list(watched.feed.reports(home.ledger.lines("moss-1")))) == 10, "afterwards every one"
