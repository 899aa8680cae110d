"""Checkpoints in the store: damage is detected and reported."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
from tests.doubles.trainer import write_checkpoint

from homing.cloud.artifacts.checkpoints import damage, known_hash, list_checkpoints
from homing.cloud.launch.resume import resume_inputs
from homing.store import FileStore
from homing.store.push import Pusher
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.event_lines import Outcome
from homing.world import World

FOLDER = "runs/amber-1/checkpoints/pretrain/step-00000020"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """Two sealed checkpoints and the model of a run that is done."""
    run_dir = tmp_path / "run"
    for step in (10, 20):
        manifest = write_checkpoint(run_dir, "pretrain", step) / file_names.MANIFEST
        document = codec.loads(CheckpointManifest, manifest.read_bytes())
        empty = codec.dumps(document, indent=1).encode()
        sealed = dataclasses.replace(document, sha256=hashlib.sha256(empty).hexdigest())
        manifest.write_bytes(codec.dumps(sealed, indent=1).encode())
    (run_dir / file_names.OUTCOME).write_text(codec.dumps(Outcome("done", "", 0, "pretrain", 20, 1.0)))
    store = FileStore(str(tmp_path / "store"), World())
    store.put_bytes("marker", b"")
    Pusher(str(run_dir), "amber-1", "amber", store, World()).push_everything()
    return store


def problems(store: FileStore) -> list[str]:
    return [damage(store, found) for found in list_checkpoints(store, "amber-1", ["pretrain"])]


def test_pushed_checkpoints_are_intact_and_listed_newest_first(store: FileStore) -> None:
    assert [found.manifest.step for found in list_checkpoints(store, "amber-1", ["pretrain"])] == [20, 10]
    assert problems(store) == ["", ""]


def test_a_model_manifest_in_a_checkpoint_folder_counts_as_damage(store: FileStore) -> None:
    """A model's manifest has the same step and a valid hash, but lists no file that resuming needs."""
    store.put_bytes(f"{FOLDER}/{file_names.MANIFEST}", store.read(f"models/amber/{file_names.MANIFEST}"))
    assert "it belongs to a model" in problems(store)[0]
    assert problems(store)[1] == ""


def test_a_manifest_without_its_sha256_field_is_not_trusted(store: FileStore) -> None:
    text = store.read(f"{FOLDER}/{file_names.MANIFEST}")
    head, seal, tail = text.rpartition(b'"sha256"')
    store.put_bytes(f"{FOLDER}/{file_names.MANIFEST}", head + b'"shb256"' + tail)
    assert seal
    assert "has no sha256" in problems(store)[0]


def test_a_damaged_pointer_does_not_stop_a_resume_from_whole_checkpoints(store: FileStore) -> None:
    for name in (file_names.BEST, file_names.LATEST):
        store.put_bytes(f"runs/amber-1/checkpoints/pretrain/{name}", b"{")
    inputs, damaged = resume_inputs(store, "amber-1", ["pretrain"])
    assert len(damaged) == 2
    assert all("is damaged and was skipped" in problem for problem in damaged)
    paths = [item.path for item in inputs]
    assert f"run/checkpoints/pretrain/step-00000020/{file_names.WEIGHTS}" in paths
    assert [path for path in paths if path.endswith((file_names.BEST, file_names.LATEST))] == []


def test_known_hash_covers_only_files_with_a_recorded_hash(store: FileStore) -> None:
    weights = store.read(f"{FOLDER}/{file_names.WEIGHTS}")
    assert known_hash(store, f"{FOLDER}/{file_names.WEIGHTS}") == hashlib.sha256(weights).hexdigest()
    assert known_hash(store, f"objects/{'a' * 64}") == "a" * 64
    assert known_hash(store, f"{FOLDER}/{file_names.MANIFEST}") is None
    assert known_hash(store, "runs/amber-1/outcome.json") is None
