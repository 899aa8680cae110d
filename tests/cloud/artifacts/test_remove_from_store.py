"""Which files may be removed from a store that several runs and several homes share."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tests.cloud.rig import forget

from homing.cloud.artifacts.remove_from_store import plan_removal, remove, remove_stored, stored_keys
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.cloud.ledger.run_lease import take, write_record
from homing.errors import IntegrityError, NotOwner, UsageError
from homing.store import Store, open_store, run_key
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash
from homing.world import World


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file:{tmp_path}/store", World())


@pytest.fixture
def reference(tmp_path: Path) -> Home:
    """Another home that uses the same store."""
    return Home(tmp_path / "their-home", World())


def begin(home: Home, store: Store, run_id: str, name: str = "moss", *, state: str = "done") -> RunRow:
    """A run with its lease, its record and one file, as a launch and an agent leave them."""
    run = RunRow(run_id, name, "launching", 1.0, store.url, "0" * 64, "1.00")
    mark = make_mark(home.owner, run_id, 1)
    home.ledger.intend(run, LedgerLine(mark, run_id, name, 1, "local", "cpu", "0.36", "1.00", intent_at=1.0))
    take(store, run_id, owner=home.owner, host=home.world.host(), mark=mark, after=0, world=home.world)
    home.ledger.set_run(run_id, state=state)
    write_record(home, run_id, store)
    store.put_bytes(run_key(run_id, file_names.METRICS), b"{}")
    found = home.ledger.run(run_id)
    assert found is not None
    return found


def push_model(store: Store, folder: str, run_id: str) -> str:
    manifest = CheckpointManifest("", run_id, "pretrain", 12, 0, True, "moss", 0, [])
    store.put_bytes(f"models/{folder}/{file_names.MANIFEST}", codec.dumps(manifest).encode())
    store.put_bytes(f"models/{folder}/{file_names.WEIGHTS}", run_id.encode())
    return f"models/{folder}/{file_names.WEIGHTS}"


def test_removing_a_run_removes_its_folder_and_the_model_whose_manifest_names_it(home: Home, store: Store) -> None:
    first, tenth = begin(home, store, "moss-1"), begin(home, store, "moss-10")
    model, neighbor = push_model(store, "moss", "moss-1"), push_model(store, "moss-10", "moss-10")
    shared = "objects/" + "0" * 64
    store.put_bytes(shared, b"shard")
    keys, spared = stored_keys(home, tenth)
    assert {key.split("/")[1] for key in keys} == {"moss-10"}
    assert spared == [f"models/moss in {store.url} belongs to moss-1"]
    remove_stored(home, tenth, keys)
    assert not store.exists(neighbor)
    assert store.exists(run_key("moss-1", file_names.METRICS)), "moss-10 is not moss-1"
    assert store.exists(model), "that model belongs to the other run"
    keys, spared = stored_keys(home, first)
    assert (model in keys, spared) == (True, [])
    remove_stored(home, first, keys)
    assert [entry.key for entry in store.list("")] == [shared], "inputs are shared and stay"


def test_a_model_without_a_run_in_its_manifest_is_not_removed(home: Home, store: Store) -> None:
    run = begin(home, store, "moss-1")
    store.put_bytes(f"models/moss/{file_names.WEIGHTS}", b"half")
    keys, spared = stored_keys(home, run)
    assert not [key for key in keys if key.startswith("models/")]
    assert spared == [f"The owner of models/moss in {store.url} is unknown"]
    store.put_bytes(f"models/moss/{file_names.MANIFEST}", b"no manifest")
    with pytest.raises(IntegrityError):
        stored_keys(home, run)


def test_nothing_is_removed_of_a_run_that_another_home_adopted(home: Home, reference: Home, store: Store) -> None:
    run = begin(home, store, "moss-1")
    push_model(store, "moss", "moss-1")
    take(store, "moss-1", owner=reference.owner, host="desk", mark="", after=1, world=home.world)
    keys, (spared,) = stored_keys(home, run)
    assert keys == []
    assert spared.startswith("moss-1 was adopted by desk at ")
    refusal = (
        f"moss-1 in {store.url} belongs to the homing home directory {reference.owner} on desk and was not removed"
    )
    for key in ("runs/moss-1", f"runs/moss-1/{file_names.METRICS}", "models/moss"):
        with pytest.raises(NotOwner, match=refusal):
            plan_removal(store, key, home)
    assert plan_removal(store, "models/moss", reference).keys[0] == f"models/moss/{file_names.MANIFEST}"


def test_a_run_of_another_home_is_not_removed_live_or_finished(home: Home, reference: Home, store: Store) -> None:
    begin(reference, store, "moss-1", state="running")
    begin(reference, store, "fern-1", "fern")
    push_model(store, "fern", "fern-1")
    begin(home, store, "moss-10")
    for key in ("runs/moss-1", "runs/fern-1", "models/fern"):
        with pytest.raises(NotOwner) as caught:
            plan_removal(store, key, home)
        assert f"homing adopt {store.url} " in caught.value.fix
    own = plan_removal(store, "runs/moss-10", home)
    assert own.keys
    assert all(key.startswith("runs/moss-10/") for key in own.keys)


def test_inputs_are_not_removed_while_a_run_in_the_store_is_live(home: Home, reference: Home, store: Store) -> None:
    store.put_bytes("objects/" + "0" * 64, b"shard")
    begin(home, store, "fern-1", "fern")
    begin(reference, store, "moss-1", state="running")
    with pytest.raises(UsageError, match="Inputs cannot be removed while a run is live") as caught:
        plan_removal(store, "objects", home)
    assert caught.value.why == "Live runs: moss-1."
    reference.ledger.set_run("moss-1", state="done")
    write_record(reference, "moss-1", store)
    found = plan_removal(store, "objects", home)
    assert found.warning == "Runs of other home directories may need it to resume: moss-1."


def test_a_live_run_missing_from_the_ledger_is_recognised_by_its_record(home: Home, store: Store) -> None:
    begin(home, store, "moss-1", state="running")
    forget(home.path)
    with pytest.raises(UsageError, match="moss-1 is live") as caught:
        plan_removal(store, "runs/moss-1", Home(home.path, World()))
    assert "the run is not in the local ledger" in caught.value.why
    assert caught.value.fix == f"homing adopt {store.url} moss-1"


@pytest.mark.parametrize("key", ["runs", "runs/", "models", "models/"])
def test_removing_all_runs_or_all_models_at_once_is_refused(home: Home, store: Store, key: str) -> None:
    begin(home, store, "moss-1")
    push_model(store, "moss", "moss-1")
    with pytest.raises(UsageError, match="This command would remove every"):
        plan_removal(store, key, home)


def push_checkpoint(store: Store, run_id: str, phase: str, step: int) -> None:
    files = [FileHash(file_names.STATE, 2, hashlib.sha256(b"{}").hexdigest())]
    manifest = CheckpointManifest("moss", run_id, phase, step, 0, False, "", 0, files)
    folder = run_key(run_id, file_names.CHECKPOINTS, phase, file_names.step_dir(step))
    store.put_bytes(f"{folder}/{file_names.STATE}", b"{}")
    store.put_bytes(f"{folder}/{file_names.MANIFEST}", codec.dumps(manifest).encode())


def test_removal_warns_if_only_an_earlier_checkpoint_was_fetched(home: Home, store: Store) -> None:
    begin(home, store, "moss-1")
    push_checkpoint(store, "moss-1", "pretrain", 5)
    push_checkpoint(store, "moss-1", "pretrain", 12)
    assert "never fetched" in plan_removal(store, "runs/moss-1", home).warning
    home.ledger.set_run("moss-1", fetched_step=5)
    assert (
        "step 5 was fetched, but its last checkpoint is pretrain step 12"
        in plan_removal(store, "runs/moss-1", home).warning
    )
    home.ledger.set_run("moss-1", fetched_step=12)
    assert plan_removal(store, "runs/moss-1", home).warning == ""


@pytest.mark.parametrize(
    "damaged", [file_names.RUN, f"checkpoints/pretrain/{file_names.step_dir(12)}/{file_names.MANIFEST}"]
)
def test_a_run_with_damaged_documents_can_be_removed(home: Home, store: Store, damaged: str) -> None:
    begin(home, store, "moss-1")
    push_checkpoint(store, "moss-1", "pretrain", 12)
    home.ledger.set_run("moss-1", fetched_step=12)
    strange = CheckpointManifest("", "moss-1", "pretrain", 12, 0, False, "", 0, [FileHash("../x", 2, "0")])
    store.put_bytes(run_key("moss-1", damaged), b"{" if damaged == file_names.RUN else codec.dumps(strange).encode())
    removal = plan_removal(store, "runs/moss-1", home)
    assert "may be the only copy" in removal.warning
    remove(store, removal)
    assert store.list("runs/moss-1/") == []


def test_removal_warns_that_a_run_missing_from_the_ledger_may_be_the_only_copy(home: Home, store: Store) -> None:
    begin(home, store, "moss-1")
    forget(home.path)
    assert "only copy" in plan_removal(store, "runs/moss-1", Home(home.path, World())).warning


def test_the_last_whole_checkpoint_cannot_be_removed_if_a_later_one_is_damaged(home: Home, store: Store) -> None:
    begin(home, store, "moss-1")
    for step in (5, 12):
        push_checkpoint(store, "moss-1", "pretrain", step)
    folder = run_key("moss-1", file_names.CHECKPOINTS, "pretrain")
    store.put_bytes(f"{folder}/{file_names.step_dir(12)}/{file_names.MANIFEST}", b"{")
    with pytest.raises(UsageError, match="Step 5 is the last intact checkpoint of moss-1 and cannot be removed"):
        plan_removal(store, f"{folder}/{file_names.step_dir(5)}", home)
    assert plan_removal(store, f"{folder}/{file_names.step_dir(12)}", home).keys, "a damaged checkpoint may be removed"
