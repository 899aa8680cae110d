"""Logs, read from the store and followed to their end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cloud.rig import make_draft

from homing.cloud.home import Home
from homing.cloud.launch import launch
from homing.cloud.logs import boot_log, follow, read_log
from homing.errors import StoreError, UsageError
from homing.store import FileStore


def test_logs_are_read_from_the_store_and_followed_to_the_end(home: Home, tmp_path: Path) -> None:
    launched = launch(make_draft(home, tmp_path, steps=30, step_s=0.02), home)
    lines = list(follow(home, launched.run, "trainer"))
    assert lines[0] == "trainer begins at step 1"
    assert lines[1:] == [f"step {number}" for number in range(1, 31)]
    assert read_log(home, launched.run, "trainer") == lines
    assert read_log(home, launched.run, "agent")
    assert boot_log(home, launched.run) == ""
    with pytest.raises(UsageError, match="no log"):
        read_log(home, launched.run, "kernel")


@pytest.mark.slow
def test_following_logs_survives_a_store_that_is_away(
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
    lines = list(follow(home, launched.run, "trainer", tell=said.append))
    assert lines[1:] == [f"step {number}" for number in range(1, 31)]
    assert said == ["away Trying again."]
