"""Logs, read from the store and followed to their end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.cloud.rig import make_draft

from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.watch.run_output import boot_log, follow, read_log
from homing.errors import StoreError, UsageError
from homing.store import FileStore, run_key
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat
from homing.world import World


@pytest.mark.slow
def test_logs_are_read_from_the_store_and_followed_to_the_end(home: Home, tmp_path: Path) -> None:
    launched = launch(make_draft(home, tmp_path, steps=30, step_s=0.02), home)
    lines = list(follow(home, launched.run, "trainer"))
    assert lines[0] == "trainer begins at step 1"
    assert lines[1:] == [f"step {number}" for number in range(1, 31)]
    assert read_log(home, launched.run, "trainer") == lines
    assert read_log(home, launched.run, "agent")
    assert boot_log(home, launched.run) == ""
    with pytest.raises(UsageError, match="Unknown log"):
        read_log(home, launched.run, "kernel")


@pytest.mark.acceptance(112)
@pytest.mark.slow
def test_following_logs_continues_after_a_store_failure(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launch(make_draft(home, tmp_path, steps=30, step_s=0.05), home)
    read, failures = FileStore.read, []

    def flaky(self: FileStore, key: str) -> bytes:
        if key.endswith("trainer.log") and len(failures) < 2:
            failures.append(key)
            raise StoreError("away")
        return read(self, key)

    monkeypatch.setattr(FileStore, "read", flaky)
    said: list[str] = []
    lines = list(follow(home, launched.run, "trainer", notify=said.append))
    assert lines[1:] == [f"step {number}" for number in range(1, 31)]
    assert said == ["away Retrying."]


def test_a_failed_run_is_followed_until_its_last_push_is_in_the_store(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The heartbeat that reports the end may arrive with a log read just before the trainer wrote its last lines.
    (tmp_path / "store").mkdir()
    run = RunRow("moss-1", "moss", "failed", 1.0, f"file:{tmp_path}/store", "", "1.00", "The loss is not finite.", 1)
    line = LedgerLine("m1", run.id, run.name, 1, "local", "cpu", "0.36", "1.00", 1.0, "i1", 1.0)
    home.ledger.adopt_run(run, [line], [])
    store, log = FileStore(str(tmp_path / "store"), World()), run_key(run.id, file_names.LOGS, "trainer.log")
    beat = Heartbeat(5.0, "m1", 1, "pushing", 1.0, "0.36", "0.01")
    rounds = iter([(b"step 1\n", False), (b"step 1\nTraceback\nValueError: boom", True)])

    def next_round(at_home: Home) -> list[str]:
        text, is_pushed = next(rounds)
        store.put_bytes(log, text)
        messages = dataclasses.replace(beat, is_pushed=is_pushed)
        store.put_bytes(run_key(run.id, file_names.HEARTBEAT), codec.dumps(messages).encode())
        return []

    monkeypatch.setattr("homing.cloud.watch.run_output.refresh", next_round)
    assert list(follow(home, run)) == ["step 1", "Traceback", "ValueError: boom"]
    assert read_log(home, run) == ["step 1", "Traceback", "ValueError: boom"]


def test_following_ends_if_the_last_push_is_never_reported(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    run = RunRow("moss-1", "moss", "failed", 1.0, f"file:{tmp_path}/store", "")
    line = LedgerLine("m1", run.id, run.name, 1, "local", "cpu", "0.36", "1.00", 1.0, "i1", 1.0)
    home.ledger.adopt_run(run, [line], [])
    monkeypatch.setattr("homing.cloud.watch.run_output.refresh", lambda at_home: [])
    monkeypatch.setattr("homing.cloud.watch.run_output.LAST_PUSH_S", 0.3)
    assert list(follow(home, run)) == []
