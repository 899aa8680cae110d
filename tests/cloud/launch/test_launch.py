"""Offer to instance to started agent, and the way back when something fails."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import make_draft, make_run, marked_now

from homing import progress
from homing.api.runs.launch_run import say_plan
from homing.cloud.contact.home_guard import sign_in
from homing.cloud.destroy import destroy_lines, destroy_run
from homing.cloud.guard.change_limit_or_stop import ask_to_stop, wait_for_stop
from homing.cloud.home import Home
from homing.cloud.launch import launch as launching
from homing.cloud.launch.armed_guards import count_alive, guards
from homing.cloud.launch.inputs import describe_inputs
from homing.cloud.launch.launch import dry_run, launch
from homing.cloud.ledger.ledger import AT_MOST, Ledger, LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.ledger.run_lease import write_record
from homing.cloud.providers.base import Instance, wait_until
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import look
from homing.cloud.watch.follow import watch
from homing.cloud.watch.run_output import boot_log
from homing.errors import CreateFailed, DataError, HomingError, StartTimeout, StillBilling, StoreError, UsageError
from homing.store import FileStore
from homing.wire import file_names
from homing.wire.control_files import Heartbeat
from homing.wire.run_json import Limits, PhaseData
from homing.world import Database, World


@pytest.mark.acceptance(65, 128)
@pytest.mark.slow
def test_a_run_trains_ends_its_own_billing_and_leaves_a_receipt(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path), home)
    assert done.run.state == "running"
    assert done.heartbeat.mark == done.instance.mark
    reports = list(watch(home, done.run, every_s=1))
    assert reports[-1].kind == "end"
    row = home.ledger.find("moss")
    assert (row.state, row.exit_code) == ("done", 0)
    (line,) = home.ledger.lines(row.id)
    assert (line.state, line.billing) == ("gone", "no")
    assert line.destroyed_at is not None
    assert line.created_at is not None
    assert Decimal(line.spend_usd) > 0
    provider = home.provider("local").describe(line.instance_id or "")
    assert provider.spend_usd is not None
    # Ours counts from the create call: never below the provider's, above it by less than the stated margin.
    assert provider.spend_usd <= Decimal(line.spend_usd) < provider.spend_usd + Decimal("0.36") * 180 / 3600
    assert marked_now(home) == []


@pytest.mark.acceptance(28, 73, 149)
@pytest.mark.slow
def test_a_launch_writes_the_run_directory_at_home_and_the_record_in_the_store(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path), home)
    folder = home.run_dir(done.run.id)
    assert (folder / "run.yaml").read_text() == "name: moss\n"
    assert json.loads((folder / "run.json").read_text())["id"] == done.run.id
    record = json.loads((tmp_path / "store/runs" / done.run.id / "record.json").read_text())
    assert record["attempts"][0]["instance_id"] == done.instance.id
    assert record["spend_limit_usd"] == "1.00"


def test_no_spend_limit_is_refused(home: Home, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="spend limit") as caught:
        make_draft(home, tmp_path, limit=None)
    assert "it costs about $" in caught.value.why
    named = caught.value.fix.removeprefix("homing launch moss --spend-limit ")
    assert make_draft(home, tmp_path, limit=named).spend_limit_usd > 0


def test_a_limit_below_the_minimum_is_refused_and_says_how_much_is_enough(home: Home, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too low") as caught:
        make_draft(home, tmp_path, limit="0.001")
    assert "--spend-limit" in caught.value.fix


def test_an_upper_bound_of_earlier_attempts_is_shown_as_at_most(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    row = RunRow("moss-1", "moss", "failed", 1.0, run.store, run.run_file_sha256, "1.00")
    line = LedgerLine(make_mark(home.owner, "moss-1", 1), "moss-1", "moss", 1, "local", "cpu", "0.36", "1.00", 1.0)
    home.ledger.adopt_run(row, [dataclasses.replace(line, created_at=1.0)], [])
    home.ledger.close(line.mark, at=2.0, spend_usd=Decimal("0.25"), note=f"{AT_MOST}never seen at the provider")
    say_plan(make_draft(home, tmp_path, resume=True), home)
    assert ", including at most $0.25 spent by earlier attempts." in capsys.readouterr().err


def test_unprepared_data_is_refused_with_the_missing_steps(home: Home, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        make_draft(home, tmp_path, is_prepared=False)
    assert "homing prep moss" in caught.value.fix


@pytest.mark.acceptance("X19")
def test_a_rate_over_the_limit_is_refused(home: Home, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="above your rate limit"):
        make_draft(home, tmp_path, limits=Limits(rate_usd_per_hour="0.10"))


@pytest.mark.slow
def test_a_launch_under_a_live_name_is_refused(home: Home, tmp_path: Path) -> None:
    first = launch(make_draft(home, tmp_path, steps=10_000), home)
    with pytest.raises(UsageError, match="already live"):
        make_draft(home, tmp_path)
    assert [run.id for run in home.ledger.runs()] == [first.run.id]


def test_the_ledger_accepts_one_of_two_concurrent_launches_of_a_name(home: Home, tmp_path: Path) -> None:
    first, second = make_draft(home, tmp_path, steps=10_000), make_draft(home, tmp_path)
    launch(first, home)
    with pytest.raises(UsageError, match="already live"):
        launch(second, home)
    assert len(home.ledger.lines()) == 1


def test_a_launch_refused_by_the_ledger_holds_no_lock(home: Home, tmp_path: Path) -> None:
    first, second = make_draft(home, tmp_path), make_draft(home, tmp_path)
    launch(first, home)
    with pytest.raises(UsageError):
        launch(second, home)
    assert not home.world.is_locked(home.launch_lock(second.mark))


def test_the_instance_id_of_a_failed_create_is_recorded(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, provider = make_draft(home, tmp_path), home.provider("local")

    def create(request: object) -> Instance:
        raise CreateFailed("It started and broke.", instance_id=ready.mark)

    monkeypatch.setattr(provider, "create", create)
    with pytest.raises(CreateFailed, match="started and broke"):
        launch(ready, home)
    (line,) = home.ledger.lines()
    assert (line.instance_id, line.state) == (ready.mark, "gone")


@pytest.mark.acceptance(66)
def test_a_dry_run_touches_nothing(home: Home, tmp_path: Path, homing_home: Path) -> None:
    ready = make_draft(home, tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    request = dry_run(ready, home).to_dict()
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert request["mark"] == ready.mark
    assert any("data/train-00000.bin" in item for item in request["inputs"])
    assert home.ledger.lines() == []


def test_a_local_launch_lists_its_guards_and_says_that_nothing_is_rented(home: Home, tmp_path: Path) -> None:
    rented, agent, dead_man, off = guards(make_draft(home, tmp_path), home)
    assert rented.startswith("Nothing is rented")
    assert "$0.36/h is a made-up rate" in rented
    assert agent.startswith("armed")
    assert "$1.00" in agent
    assert dead_man.startswith("armed: a dead-man process")
    assert "you lose no real money" in off
    assert off.endswith("homing destroy moss")
    sign_in(home, 60.0, reached=["local"])
    assert guards(make_draft(home, tmp_path), home)[3].startswith("armed: the local guard")


@pytest.mark.slow
def test_a_launch_with_one_live_guard_is_undone_unless_allowed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.cloud.launch.launch.GUARDS_S", 0.5)
    # An instance on which no second guard process starts.
    monkeypatch.setattr("homing.cloud.launch.launch.count_alive", lambda *_: 1)
    with pytest.raises(StartTimeout, match="Only one guard is alive"):
        launch(make_draft(home, tmp_path, steps=100_000), home)
    assert home.provider("local").list_owned() == []
    ready = make_draft(home, tmp_path, steps=100_000)
    order = dataclasses.replace(ready.order, is_one_guard_enough=True)
    assert launch(dataclasses.replace(ready, order=order), home).run.state == "running"


@pytest.mark.slow
def test_the_first_heartbeat_reports_two_guards_on_the_instance(home: Home, tmp_path: Path) -> None:
    ready = make_draft(home, tmp_path, steps=100_000)
    seen: list[progress.Progress] = []
    with progress.listening(seen.append):
        done = launch(ready, home)
    waits = [each for each in seen if each.what == "Waiting for the agent's first heartbeat"]
    assert waits, "the wait is reported, with its deadline"
    assert all(0 <= each.done <= each.total for each in waits)
    assert seen[-1].what == ""
    assert done.heartbeat.has_dead_man
    assert count_alive(ready, home, done.heartbeat) == 2
    sign_in(home, 60.0, reached=["local"])
    assert count_alive(ready, home, done.heartbeat) == 3


def test_the_worst_case_is_the_nearer_of_both_limits(home: Home, tmp_path: Path) -> None:
    assert make_draft(home, tmp_path, limit="5").worst_case_usd == 5
    timed = make_draft(home, tmp_path, limit="5", limits=Limits(time_s=3600))
    assert Decimal("0.36") < timed.worst_case_usd < Decimal("0.40")


@pytest.mark.acceptance(70, 113, 134)
@pytest.mark.slow
def test_a_launch_whose_agent_dies_at_once_is_undone_and_shows_its_output(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = make_draft(home, tmp_path)
    monkeypatch.setattr("homing.cloud.providers.local.provider.Local.page", "https://cloud.test/instances")

    class BadZip(World):
        def copy(self, source: object, target: object) -> str:
            digest = super().copy(source, target)  # type: ignore[arg-type]
            if str(target).endswith("agent.zip"):
                Path(str(target)).write_text("raise SystemExit('no such module')")
            return digest

    broken = Home(home.path, BadZip())
    with pytest.raises(StartTimeout, match="before its first heartbeat") as caught:
        launch(ready, broken)
    assert "no such module" in caught.value.why
    assert caught.value.fix == "See why: homing logs moss   See https://cloud.test/instances"
    assert billing_lines(home.ledger.lines()) == []
    assert home.ledger.find("moss").state == "failed"
    assert marked_now(home) == []


@pytest.mark.slow
def test_a_single_check_without_a_process_does_not_abort_a_launch(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, quiet = home.provider("local"), [True, False, True]
    describe = provider.describe

    def blinks(instance_id: str) -> Instance:
        found = describe(instance_id)
        return dataclasses.replace(found, is_running=False) if quiet and quiet.pop() else found

    monkeypatch.setattr(provider, "describe", blinks)
    done = launch(make_draft(home, tmp_path), home)
    assert done.run.state == "running"
    destroy_run(home, done.run)


@pytest.mark.acceptance(117)
@pytest.mark.slow
def test_the_output_of_a_machine_is_kept_at_home_if_its_launch_failed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: object, instance_id: str) -> None:
        raise StartTimeout("it could not be given its files")

    provider = home.provider("local")
    monkeypatch.setattr(provider, "hand_over", refuse)
    monkeypatch.setattr(provider, "log", lambda instance_id: "the image has no sshd")
    with pytest.raises(StartTimeout, match="could not be given"):
        launch(make_draft(home, tmp_path), home)
    run = home.ledger.find("moss")
    assert run.state == "failed"
    monkeypatch.setattr(provider, "log", lambda instance_id: "")  # gone with the machine
    assert boot_log(home, run) == "the image has no sshd"


def test_a_launch_that_cannot_push_its_inputs_never_creates(home: Home, tmp_path: Path) -> None:
    ready = make_draft(home, tmp_path)
    (tmp_path / "data" / "train-00000.bin").write_bytes(b"changed")
    with pytest.raises(HomingError):
        launch(ready, home)
    (line,) = home.ledger.lines()
    assert (line.created_at, line.billing, line.note) == (None, "no", "never created")
    assert home.provider("local").list_owned() == []


def test_an_instance_at_a_higher_rate_than_offered_is_destroyed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = make_draft(home, tmp_path)
    provider = home.provider("local")
    create = provider.create
    dearer = lambda request: dataclasses.replace(create(request), rate_usd_per_hour=Decimal("0.72"))  # noqa: E731
    monkeypatch.setattr(provider, "create", dearer)
    with pytest.raises(CreateFailed, match=r"\$0.72"):
        launch(ready, home)
    assert marked_now(home) == []


def test_a_launch_that_cannot_be_undone_raises_still_billing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = make_draft(home, tmp_path)
    provider = home.provider("local")

    def refuse(instance_id: str) -> None:
        raise HomingError("the provider is away")

    def raise_(*args: object) -> None:
        raise StartTimeout("sent no heartbeat")

    monkeypatch.setattr(provider, "destroy", refuse)
    monkeypatch.setattr("homing.cloud.ledger.meter.FREE_PROVIDERS", frozenset())  # local stands in for a paid provider
    monkeypatch.setattr("homing.cloud.launch.launch._first_heartbeat", raise_)
    monkeypatch.setattr("homing.cloud.launch.launch.destroy_lines", lambda home, lines: destroy_fast(home, lines))
    with pytest.raises(StillBilling) as caught:
        launch(ready, home)
    assert ready.mark in caught.value.why
    assert "homing destroy" in caught.value.fix
    assert "$0.36/h" in caught.value.why
    assert "sent no heartbeat" in caught.value.why, "the reason of the failure is not lost"
    monkeypatch.undo()
    assert home.ledger.unconfirmed()
    destroy_run(home, home.ledger.find("moss"))
    assert home.ledger.unconfirmed() == []


def test_a_failed_launch_is_undone_although_the_ledger_cannot_be_read(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(*args: object) -> None:
        raise StartTimeout("sent no heartbeat")

    def fail(self: Ledger, mark: str) -> bool:
        raise OSError(errno.EIO, "the disk is ill")

    ready = make_draft(home, tmp_path)
    monkeypatch.setattr("homing.cloud.launch.launch._first_heartbeat", time_out)
    monkeypatch.setattr(Ledger, "is_destroy_asked", fail)
    with pytest.raises(StartTimeout):
        launch(ready, home)
    assert marked_now(home) == []


def destroy_fast(home: Home, lines: list) -> object:  # type: ignore[type-arg]
    return destroy_lines(home, lines, deadline_s=0.1)


@pytest.mark.acceptance(106, "P3")
@pytest.mark.slow
def test_a_failed_run_is_resumed_from_its_checkpoint_with_what_it_spent_before(home: Home, tmp_path: Path) -> None:
    first = launch(make_draft(home, tmp_path, steps=10_000, step_s=0.01), home)
    store = tmp_path / "store/runs" / first.run.id
    assert wait_until(lambda: is_training(home, 5), timeout_s=30, every_s=0.1, world=home.world)
    ask_to_stop(home, first.run)
    status = wait_for_stop(home, first.run, timeout_s=60)
    assert status.run.state == "stopped"
    assert status.run.exit_code == 0
    list(watch(home, status.run, every_s=1))
    spent = Decimal(home.ledger.lines()[0].spend_usd)

    ready = make_draft(home, tmp_path, resume=True, steps=10_000, step_s=0.01)
    assert ready.run.id == first.run.id
    assert ready.attempt == 2
    assert ready.spent_before_usd == spent
    again = launch(ready, home)
    assert Decimal(again.heartbeat.spend_usd) >= spent
    assert wait_until(lambda: is_training(home, 5), timeout_s=30, every_s=0.1, world=home.world)
    ask_to_stop(home, again.run)
    status = wait_for_stop(home, again.run, timeout_s=60)
    refresh(home)
    metrics = [json.loads(line) for line in (store / "metrics.jsonl").read_text().splitlines()]
    steps = [metric["step"] for metric in metrics]
    # The history of the first attempt is complete, and the second resumed where it stopped.
    assert steps == list(range(1, len(steps) + 1))
    begun = [text for text in (store / "logs/trainer.log").read_text().splitlines() if "begins" in text]
    assert begun[0] == "trainer begins at step 1"
    assert len(begun) == 2
    assert begun[1] != begun[0]
    assert (store / "logs/agent-1.log").exists()


def is_training(home: Home, step: int) -> bool:
    reports = look(home, home.ledger.find("moss")).reports
    return bool(reports and reports.heartbeat and reports.heartbeat.step >= step)


@pytest.mark.slow
def test_a_run_that_is_done_or_unknown_cannot_be_resumed(home: Home, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        make_draft(home, tmp_path, resume=True)
    done = launch(make_draft(home, tmp_path, steps=2), home)
    list(watch(home, done.run, every_s=1))
    with pytest.raises(UsageError, match="is done"):
        make_draft(home, tmp_path, resume=True)


@pytest.mark.slow
def test_two_homes_never_touch_each_other(home: Home, tmp_path: Path) -> None:
    other = Home(tmp_path / "other-home", World())
    assert other.owner != home.owner
    launch(make_draft(home, tmp_path, steps=10_000), home)
    assert other.provider("local").list_owned() == []
    make_draft(other, tmp_path)


@pytest.mark.slow
def test_a_run_is_not_resumed_from_another_store_than_its_own(home: Home, tmp_path: Path) -> None:
    row = launch(make_draft(home, tmp_path, steps=3), home).run
    list(watch(home, row, every_s=1))
    home.ledger.set_run(row.id, state="stopped", store="file:/elsewhere")
    with pytest.raises(UsageError, match="not in the store that the run file names") as caught:
        make_draft(home, tmp_path, resume=True)
    assert "Set store: file:/elsewhere in the run file" in caught.value.fix


@pytest.mark.slow
def test_a_launch_with_a_closed_terminal_still_undoes_itself(home: Home, tmp_path: Path) -> None:
    def closed(text: str) -> None:
        if "Pushing" not in text:
            raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(HomingError):
        launch(make_draft(home, tmp_path, steps=100_000), home, notify=closed)
    assert marked_now(home) == []
    assert billing_lines(home.ledger.lines()) == []
    assert home.ledger.find("moss").state == "failed"


@pytest.mark.slow
def test_an_instance_is_destroyed_although_the_ledger_cannot_be_written(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(make_draft(home, tmp_path, steps=100_000), home)
    lines = home.ledger.lines()

    def full(*_: object) -> None:
        raise OSError("database or disk is full")

    monkeypatch.setattr(Database, "execute", full)
    with pytest.raises(StillBilling, match="not confirmed"):
        destroy_lines(home, lines, deadline_s=0.5)
    assert marked_now(home) == []
    monkeypatch.undo()
    assert len(destroy_lines(home, lines).lines) == 1
    assert billing_lines(home.ledger.lines()) == []


@pytest.mark.slow
def test_writing_a_record_does_not_recreate_a_missing_store(home: Home, tmp_path: Path) -> None:
    row = launch(make_draft(home, tmp_path, steps=3), home).run
    list(watch(home, row, every_s=1))
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(StoreError, match="cannot be reached"):
        write_record(home, row.id, home.store_of(row))
    assert not (tmp_path / "store").exists()


@pytest.mark.acceptance(34)
@pytest.mark.slow
def test_a_launch_reports_the_size_and_hash_of_its_inputs(home: Home, tmp_path: Path) -> None:
    said: list[str] = []
    ready = make_draft(home, tmp_path)
    launch(ready, home, notify=said.append)
    (messages,) = [text for text in said if "Inputs in the store" in text]
    assert re.search(r"\d+ files, [\d.]+ \w?B; data ", messages)
    assert messages.endswith(ready.run.data.manifest_sha256[:12])
    destroy_run(home, home.ledger.find("moss"))


class _Flickering(FileStore):
    """Fails the next `left` reads of heartbeats."""

    left = 0

    def read(self, key: str) -> bytes:
        if key.endswith(file_names.HEARTBEAT) and type(self).left:
            type(self).left -= 1
            raise StoreError("The store is away.")
        return super().read(key)


@pytest.mark.slow
def test_a_brief_store_failure_after_the_first_heartbeat_does_not_undo_a_launch(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = launching._first_heartbeat

    def first(*messages: Any) -> Heartbeat:
        beat = real(*messages)
        _Flickering.left = 3
        return dataclasses.replace(beat, has_dead_man=False)

    monkeypatch.setattr(launching, "_first_heartbeat", first)
    monkeypatch.setattr(
        launching, "open_store", lambda url, world, **how: _Flickering(url.removeprefix("file:"), world)
    )
    launch(make_draft(home, tmp_path, steps=100_000), home)
    assert _Flickering.left == 0
    assert marked_now(home)
    destroy_run(home, home.ledger.find("moss"))


@pytest.mark.slow
@pytest.mark.parametrize(("failures", "is_well"), [(2, True), (10_000, False)])
def test_sending_the_instance_age_is_retried_and_its_failure_undoes_the_launch(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, is_well: bool
) -> None:
    tries: list[int] = []

    def send_age(*_: object) -> bool:
        tries.append(1)
        if len(tries) <= failures:
            raise StoreError("The store is away.")
        return True

    monkeypatch.setattr(launching, "send_age", send_age)
    monkeypatch.setattr(launching, "GUARDS_S", 3.0)
    said: list[str] = []
    if is_well:
        launch(make_draft(home, tmp_path, steps=100_000), home, notify=said.append)
        assert any("clock is behind" in text for text in said)
        destroy_run(home, home.ledger.find("moss"))
    else:
        with pytest.raises(StoreError, match="away"):
            launch(make_draft(home, tmp_path, steps=100_000), home)
        assert len(tries) > 3
    assert marked_now(home) == []


def test_the_description_of_the_inputs_names_the_data_of_every_phase(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    whole = run.data.manifest_sha256
    assert describe_inputs(run, [10, 20]).endswith(f"2 files, 30 B; data {whole[:12]}")
    own = dataclasses.replace(run.phases[0], data=PhaseData("chat", "sft", "c" * 64, 1, 1))
    without = dataclasses.replace(run, data=dataclasses.replace(run.data, manifest_sha256=""))
    assert describe_inputs(dataclasses.replace(without, phases=[own]), [10]).endswith(f"; data {'c' * 12}")
    assert "data" not in describe_inputs(without, [10])
