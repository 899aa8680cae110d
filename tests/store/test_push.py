"""Run directory to store: order, read-back, retention, the model that is left behind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from tests.doubles.trainer import write_checkpoint

from homing.errors import StoreError
from homing.store import FileStore
from homing.store.base import Entry
from homing.store.push import Pushed, Pusher
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, Pointer
from homing.wire.event_lines import Event, Outcome
from homing.world import World


class Recording(FileStore):
    """A real store that remembers the order of writes and fails where configured."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        super().__init__(str(root), World())
        self.calls: list[tuple[str, str]] = []
        self.fails_after: int | None = None
        self.flips: set[str] = set()

    def _note(self, verb: str, key: str) -> None:
        if self.fails_after is not None and len(self.calls) >= self.fails_after:
            raise StoreError("The store is down.", "as configured", "wait")
        self.calls.append((verb, key))

    def put(self, key: str, path: str) -> Entry:
        self._note("put", key)
        entry = super().put(key, path)
        if key in self.flips:
            super().put_bytes(key, b"flipped on its way")
        return entry

    def put_bytes(self, key: str, data: bytes) -> Entry:
        self._note("put", key)
        return super().put_bytes(key, data)

    def delete(self, key: str) -> None:
        self._note("delete", key)
        super().delete(key)


@pytest.fixture
def store(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "store")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "work/run"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / file_names.RUN).write_text('{"phases": [{"kind": "pretrain"}, {"kind": "mid"}]}')
    (run_dir / file_names.METRICS).write_text('{"step": 1}\n')
    (run_dir / "logs/trainer.log").write_text("hello\n")
    (run_dir / file_names.HEARTBEAT).write_text("{}")
    return run_dir


def make_pusher(run_dir: Path, store: Recording) -> Pusher:
    return Pusher(run_dir=str(run_dir), run_id="amber-1", run_name="amber", store=store, world=World())


def whole_steps(store: Recording) -> list[tuple[str, int]]:
    """Checkpoints that a reader of the store would trust, each proven by every hash in its manifest."""
    found = []
    for entry in store.list("runs/amber-1/checkpoints/"):
        if entry.key.endswith(f"/{file_names.MANIFEST}"):
            manifest = codec.loads(CheckpointManifest, store.read(entry.key))
            folder = entry.key.rpartition("/")[0]
            assert all(store.sha256(f"{folder}/{file.name}") == file.sha256 for file in manifest.files), entry.key
            found.append((manifest.phase, manifest.step))
    return sorted(found)


def events(run_dir: Path) -> list[str]:
    lines = (run_dir / file_names.EVENTS).read_text().splitlines() if (run_dir / file_names.EVENTS).exists() else []
    return [codec.loads(Event, line).kind for line in lines]


def test_content_goes_first_then_the_manifest_then_the_pointers(run_dir: Path, store: Recording) -> None:
    write_checkpoint(run_dir, "pretrain", 10)
    make_pusher(run_dir, store).push_changes()
    order = [
        key.removeprefix("runs/amber-1/checkpoints/pretrain/") for verb, key in store.calls if "checkpoints" in key
    ]
    assert order[-3] == "step-00000010/manifest.json"
    assert order[-2:] == ["best.json", "latest.json"]
    assert len(order) == 6 + 3
    assert whole_steps(store) == [("pretrain", 10)]
    assert events(run_dir) == ["checkpoint_pushed"]
    make_pusher(run_dir, store).push_everything()
    assert events(run_dir) == ["checkpoint_pushed"]  # verified again, not a new event
    assert store.read("runs/amber-1/logs/trainer.log") == b"hello\n"
    pushed = codec.loads(Pushed, (run_dir / file_names.PUSHED).read_bytes())
    assert (pushed.phase, pushed.step, pushed.problem) == ("pretrain", 10, "")


@pytest.mark.acceptance(105)
def test_at_every_failure_point_the_store_shows_only_whole_checkpoints(run_dir: Path, store: Recording) -> None:
    write_checkpoint(run_dir, "pretrain", 10)
    make_pusher(run_dir, store).push_changes()
    shutil.rmtree(run_dir / "checkpoints/pretrain/step-00000010")
    write_checkpoint(run_dir, "pretrain", 20)
    num_points = 0
    pusher = make_pusher(run_dir, store)
    while True:
        store.calls, store.fails_after = [], num_points
        try:
            pusher.push_changes()
            break
        except StoreError:
            num_points += 1
        assert whole_steps(store)
        pusher = make_pusher(run_dir, store)  # killed and started again: it knows nothing of before
    assert num_points >= 3
    assert whole_steps(store) == [("pretrain", 20)]


def test_a_pass_without_changes_writes_nothing(run_dir: Path, store: Recording) -> None:
    write_checkpoint(run_dir, "pretrain", 10)
    pusher = make_pusher(run_dir, store)
    pusher.push_changes()
    pusher.push_changes()  # its own event and pushed.json
    store.calls.clear()
    pusher.push_changes()
    assert store.calls == []
    with open(run_dir / file_names.METRICS, "a") as file:
        file.write('{"step": 2}\n')
    pusher.push_changes()
    assert store.calls == [("put", "runs/amber-1/metrics.jsonl")]


def test_an_unfinished_checkpoint_and_files_of_home_stay_here(run_dir: Path, store: Recording) -> None:
    folder = run_dir / "checkpoints/pretrain/step-00000030"
    folder.mkdir(parents=True)
    (folder / file_names.WEIGHTS).write_bytes(b"half")
    (run_dir / file_names.REQUEST).write_text("{}")
    (run_dir / file_names.RECORD).write_text("{}")
    (run_dir / "heartbeat.json.tmp-12-0123abcd").write_text("{}")
    make_pusher(run_dir, store).push_changes()
    keys = [entry.key for entry in store.list("")]
    assert not [key for key in keys if "step-" in key or "request" in key or "record" in key or "tmp" in key]


@pytest.mark.acceptance(107)
def test_retention_is_mirrored_only_behind_a_newer_verified_checkpoint(run_dir: Path, store: Recording) -> None:
    pusher = make_pusher(run_dir, store)
    for step in (10, 20, 30):
        write_checkpoint(run_dir, "pretrain", step)
        pusher.push_changes()
    (run_dir / "checkpoints/pretrain/best.json").write_text(codec.dumps(Pointer(step=20)))
    pusher.push_changes()
    assert whole_steps(store) == [("pretrain", 10), ("pretrain", 20), ("pretrain", 30)]
    for step in (10, 20, 30):
        shutil.rmtree(run_dir / f"checkpoints/pretrain/step-{step:08d}")
    pusher.push_changes()
    # 10 has newer ones behind it; 20 is the best, 30 the newest there is.
    assert whole_steps(store) == [("pretrain", 20), ("pretrain", 30)]
    write_checkpoint(run_dir, "mid", 5)
    pusher.push_changes()
    assert ("mid", 5) in whole_steps(store)


def test_a_later_attempt_with_an_empty_disk_deletes_nothing_until_it_has_a_newer_one(
    run_dir: Path, store: Recording
) -> None:
    write_checkpoint(run_dir, "pretrain", 10)
    make_pusher(run_dir, store).push_changes()
    shutil.rmtree(run_dir / "checkpoints")
    second = make_pusher(run_dir, store)
    second.push_changes()
    assert whole_steps(store) == [("pretrain", 10)]
    write_checkpoint(run_dir, "pretrain", 20)
    second.push_changes()
    assert whole_steps(store) == [("pretrain", 20)]


def test_an_attempt_that_began_further_back_deletes_no_checkpoint_that_is_newer_than_its_own(
    run_dir: Path, store: Recording
) -> None:
    for step in (10, 20):
        write_checkpoint(run_dir, "pretrain", step)
    make_pusher(run_dir, store).push_changes()
    shutil.rmtree(run_dir / "checkpoints")
    second = make_pusher(run_dir, store)
    write_checkpoint(run_dir, "pretrain", 15)
    second.push_changes()
    assert whole_steps(store) == [("pretrain", 15), ("pretrain", 20)]


def test_a_locally_damaged_checkpoint_is_reported_and_never_listed_as_complete(run_dir: Path, store: Recording) -> None:
    write_checkpoint(run_dir, "pretrain", 10)
    damaged = write_checkpoint(run_dir, "pretrain", 20)
    (damaged / file_names.WEIGHTS).write_bytes(b"flipped")
    pusher = make_pusher(run_dir, store)
    pusher.push_everything()
    assert whole_steps(store) == [("pretrain", 10)]
    assert events(run_dir).count("checkpoint_damaged") == 1
    shutil.rmtree(run_dir / "checkpoints/pretrain/step-00000010")
    with pytest.raises(StoreError, match="Not every checkpoint"):
        make_pusher(run_dir, Recording(Path(store.root + "-2"))).push_everything()


def test_bytes_that_change_on_their_way_are_found_by_reading_back(run_dir: Path, store: Recording) -> None:
    write_checkpoint(run_dir, "pretrain", 10)
    store.flips = {"runs/amber-1/checkpoints/pretrain/step-00000010/model.safetensors"}
    with pytest.raises(StoreError, match="differs from what was pushed"):
        make_pusher(run_dir, store).push_everything()
    assert whole_steps(store) == []
    store.flips = {"runs/amber-1/metrics.jsonl"}
    with pytest.raises(StoreError, match="differs from what was pushed"):
        make_pusher(run_dir, store).push_everything()
    store.flips = set()
    make_pusher(run_dir, store).push_everything()
    assert whole_steps(store) == [("pretrain", 10)]


def test_a_step_saved_again_with_other_content_is_pushed_again(run_dir: Path, store: Recording) -> None:
    write_checkpoint(run_dir, "pretrain", 10)
    pusher = make_pusher(run_dir, store)
    pusher.push_changes()
    shutil.rmtree(run_dir / "checkpoints/pretrain/step-00000010")
    write_checkpoint(run_dir, "pretrain", 10, size=2500)
    pusher.push_changes()
    assert whole_steps(store) == [("pretrain", 10)]
    local = (run_dir / "checkpoints/pretrain/step-00000010" / file_names.MANIFEST).read_bytes()
    assert store.read("runs/amber-1/checkpoints/pretrain/step-00000010/manifest.json") == local


@pytest.mark.acceptance(102, 132)
@pytest.mark.parametrize("state", ["done", "stopped"])
def test_a_run_that_ended_leaves_its_model_behind(run_dir: Path, store: Recording, state: str) -> None:
    write_checkpoint(run_dir, "pretrain", 10)
    write_checkpoint(run_dir, "mid", 5, is_final=state == "done")
    store.put_bytes("models/amber/left-over-of-an-older-run", b"x")
    (run_dir / file_names.OUTCOME).write_text(codec.dumps(Outcome(state, "", 0)))
    make_pusher(run_dir, store).push_everything()
    kept = {entry.key.removeprefix("models/amber/") for entry in store.list("models/")}
    assert kept == {file_names.WEIGHTS, file_names.RUN, file_names.TOKENIZER, "config.json", file_names.MANIFEST}
    manifest = codec.loads(CheckpointManifest, store.read("models/amber/manifest.json"))
    assert (manifest.phase, manifest.step, manifest.is_final) == ("mid", 5, state == "done")
    assert {file.name for file in manifest.files} == kept - {file_names.MANIFEST}
    assert all(store.sha256(f"models/amber/{file.name}") == file.sha256 for file in manifest.files)
    puts = [key for verb, key in store.calls if verb == "put" and key.startswith("models/")]
    assert puts[-1] == "models/amber/manifest.json"


@pytest.mark.acceptance(68, 132)
def test_the_model_of_another_run_of_that_name_is_never_replaced(run_dir: Path, store: Recording) -> None:
    write_checkpoint(run_dir, "pretrain", 10, is_final=True)
    (run_dir / file_names.OUTCOME).write_text(codec.dumps(Outcome("done", "", 0)))
    make_pusher(run_dir, store).push_everything()
    first = {entry.key: store.sha256(entry.key) for entry in store.list("models/amber/")}
    later = dataclasses.replace(make_pusher(run_dir, store), run_id="amber-2")
    write_checkpoint(run_dir, "pretrain", 20, is_final=True, size=2500)
    for _ in range(2):
        later.push_everything()
    assert {entry.key: store.sha256(entry.key) for entry in store.list("models/amber/")} == first
    manifest = codec.loads(CheckpointManifest, store.read("models/amber-2/manifest.json"))
    assert (manifest.run_id, manifest.step) == ("amber-2", 20)
    assert "The model is at models/amber-2/" in (run_dir / file_names.EVENTS).read_text()
    write_checkpoint(run_dir, "pretrain", 30, is_final=True)
    make_pusher(run_dir, store).push_everything()  # the first run itself may continue
    assert codec.loads(CheckpointManifest, store.read("models/amber/manifest.json")).step == 30


@pytest.mark.parametrize("state", ["failed", None])
def test_a_failed_or_unfinished_run_pushes_no_model(run_dir: Path, store: Recording, state: str | None) -> None:
    write_checkpoint(run_dir, "pretrain", 10)
    if state:
        (run_dir / file_names.OUTCOME).write_text(codec.dumps(Outcome(state, "", 1)))
    make_pusher(run_dir, store).push_everything()
    assert store.list("models/") == []


def test_the_models_manifest_carries_its_own_hash_like_the_trainers(run_dir: Path, store: Recording) -> None:
    write_checkpoint(run_dir, "pretrain", 10, is_final=True)
    (run_dir / file_names.OUTCOME).write_text(codec.dumps(Outcome("done", "", 0)))
    make_pusher(run_dir, store).push_everything()
    text = store.read("models/amber/manifest.json")
    own = json.loads(text)["sha256"]
    assert hashlib.sha256(text.replace(own.encode(), b"", 1)).hexdigest() == own
