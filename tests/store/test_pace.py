"""A store that counts writes is written to at its own pace, many files at once; reads continue meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doubles.trainer import write_checkpoint

from homing.store import FileStore, sync
from homing.store.base import Entries, Files
from homing.store.push import Pusher
from homing.wire import file_names
from homing.wire.boot_json import Boot, EndBilling
from homing.world import World


class Counting(FileStore):
    """A folder that behaves like the Hub: a write is heavy and takes many files."""

    pace_s = 60.0
    batch_files = 100

    def __init__(self, root: Path, world: World) -> None:
        super().__init__(str(root), world)
        self.writes: list[list[str]] = []
        self.looks = 0

    def put_many(self, files: Files) -> Entries:
        self.writes.append([key for key, _ in files])
        return super().put_many(files)

    def read(self, key: str) -> bytes:
        self.looks += key.endswith(f"/{file_names.REQUEST}")
        return super().read(key)


class Clock(World):
    """Sleeping passes time and writes a heartbeat; it ends after so long."""

    def __init__(self, run_dir: Path, until_s: float) -> None:
        self.t, self.run_dir, self.until_s = 0.0, run_dir, until_s

    def monotonic(self) -> float:
        return self.t

    def sleep(self, seconds: float) -> None:
        self.t += seconds
        (self.run_dir / file_names.HEARTBEAT).write_text(f"beat at {self.t}")
        if self.t > self.until_s:
            raise KeyboardInterrupt


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def boot_of(run_dir: Path, store: FileStore) -> Boot:
    return Boot(
        run_id="amber-1", run_name="amber", mark="m", attempt=1, work_dir=str(run_dir.parent), store=store.url,
        inputs=[], trainer_argv=[], sync_argv=[], end_billing=EndBilling(kind="command", argv=["true"]), started_at=0.0,
        rate_usd_per_hour="1", spent_before_usd="0", spend_limit_usd=None, time_limit_s=0.0, idle_limit_s=0.0,
        stall_factor=0.0, heartbeat_s=5.0,
    )  # fmt: skip


def test_heartbeats_go_once_a_minute_the_first_at_once_and_requests_are_looked_for_all_the_while(
    tmp_path: Path, run_dir: Path
) -> None:
    world = Clock(run_dir, until_s=310.0)
    store = Counting(tmp_path / "store", world)
    store.put_bytes("marker", b"")
    (run_dir / file_names.METRICS).write_text("{}\n")
    with pytest.raises(KeyboardInterrupt):
        sync.watch(boot_of(run_dir, store), store, world)
    beats = [keys for keys in store.writes if any(key.endswith(file_names.HEARTBEAT) for key in keys)]
    assert 5 <= len(beats) <= 7, "one a minute in five minutes"
    assert store.looks > 50
    assert store.read("runs/amber-1/heartbeat.json") != b"beat at 5.0"


@pytest.mark.acceptance(105)
def test_a_checkpoint_is_one_write_and_its_manifest_another(tmp_path: Path, run_dir: Path) -> None:
    world = World()
    store = Counting(tmp_path / "store", world)
    store.put_bytes("marker", b"")
    write_checkpoint(run_dir, "pretrain", 10)
    pusher = Pusher(str(run_dir), "amber-1", "amber", store, world)
    pusher.push_changes()
    of_checkpoint = [keys for keys in store.writes if any("/step-" in key for key in keys)]
    assert len(of_checkpoint) == 1
    assert len(of_checkpoint[0]) == 6
    assert store.exists("runs/amber-1/checkpoints/pretrain/step-00000010/manifest.json")
    pointers = [
        keys for keys in store.writes if any(key.endswith((file_names.LATEST, file_names.BEST)) for key in keys)
    ]
    assert [len(keys) for keys in pointers] == [2]


def test_a_file_that_vanishes_does_not_keep_the_others_of_its_write_back(tmp_path: Path, run_dir: Path) -> None:
    class Vanishing(Counting):
        def put_many(self, files: Files) -> Entries:
            (run_dir / "logs-old.txt").unlink(missing_ok=True)
            return super().put_many(files)

    store = Vanishing(tmp_path / "store", World())
    store.put_bytes("marker", b"")
    for name in ("logs-old.txt", file_names.METRICS, file_names.HEARTBEAT):
        (run_dir / name).write_text(name)
    Pusher(str(run_dir), "amber-1", "amber", store, World()).push_live()
    assert [entry.key.rsplit("/", 1)[1] for entry in store.list("runs/")] == [file_names.HEARTBEAT, file_names.METRICS]
