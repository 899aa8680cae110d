"""The files sent with a run besides its run file, and their paths on the instance."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from tests.cloud.rig import make_run

from homing.cloud.launch.inputs import relocated, travelling
from homing.cloud.machine_setup.boot_files import prepare_inputs
from homing.errors import DataError
from homing.store import FileStore
from homing.wire import codec, file_names
from homing.wire.run_json import Base, PhaseData, Rl, RlTask, Run
from homing.wire.shard_manifest import DataManifest, Shard, Split
from homing.world import World


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write(path: Path, data: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return sha256(data)


@pytest.fixture
def chain(tmp_path: Path) -> Run:
    """sft on conversations from local weights, then rl with its own file and reward, on a base model."""
    run = make_run(tmp_path)
    folder = tmp_path / "sft"
    files = {name: write(folder / name, name.encode()) for name in ("train-00000.bin", "train-00000.idx")}
    mask = write(folder / "train-00000.mask", b"\1" * 15)
    shard = Shard("train-00000.bin", "train-00000.idx", 15, 1, 15, *files.values(), "train-00000.mask", mask)
    manifest = DataManifest("uint16", 10, "t", [], {"train": Split(15, 1, 15, [shard])}, [], "")
    digest = write(folder / file_names.MANIFEST, codec.dumps(manifest).encode())
    for name in (file_names.WEIGHTS, "config.json", file_names.OPTIMIZER, file_names.STATE):
        write(tmp_path / "start" / name, f"start {name}".encode())
    for name in (file_names.WEIGHTS, "config.json", "tokenizer.json", "notes.txt"):
        write(tmp_path / "base" / name, f"base {name}".encode())
    task = RlTask(
        "gsm8k", file=str(tmp_path / "q.jsonl"), file_sha256=write(tmp_path / "q.jsonl", b"{}"),
        reward=str(tmp_path / "reward.py"), reward_sha256=write(tmp_path / "reward.py", b"def reward(): ..."),
    )  # fmt: skip
    first = run.phases[0]
    sft = dataclasses.replace(
        first, kind="sft", data=PhaseData("chat", str(folder), digest), init_from=str(tmp_path / "start")
    )
    phases = [sft, dataclasses.replace(first, kind="rl", rl=Rl(tasks=[task]))]
    return dataclasses.replace(run, phases=phases, base=Base("hf:moss/moss@1", str(tmp_path / "base")))


def test_data_weights_and_files_are_listed_with_their_hash(chain: Run) -> None:
    found = {item.path: item.sha256 for item in travelling(chain, World())}
    assert found["sft/train-00000.mask"] == sha256(b"\1" * 15)
    assert found["start-sft/model.safetensors"] == sha256(b"start model.safetensors")
    assert found["base/tokenizer.json"] == sha256(b"base tokenizer.json")
    assert found["rl/0-reward.py"] == sha256(b"def reward(): ...")
    assert not any("optimizer" in path or "state" in path or "notes" in path for path in found), (
        "only files that loading reads"
    )


@pytest.mark.acceptance(35, 42)
def test_all_missing_inputs_are_reported_together_before_renting(chain: Run, tmp_path: Path) -> None:
    (tmp_path / "sft/train-00000.bin").unlink()
    (tmp_path / "q.jsonl").unlink()
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError) as caught:
        travelling(chain, World())
    for word in ("train-00000.bin", "q.jsonl", "hf:moss/moss@1"):
        assert word in caught.value.why


@pytest.mark.acceptance(77)
def test_inputs_are_stored_on_the_instance_where_run_json_expects_them(chain: Run, tmp_path: Path) -> None:
    run = dataclasses.replace(chain, id="moss-1", inputs=travelling(chain, World()))
    store = FileStore(str(tmp_path / "store"), World())
    inputs = prepare_inputs(run, run.data.dir, store, World())
    paths = {item.path for item in inputs}
    there = relocated(run)
    assert there.phases[0].data is not None
    assert there.base is not None
    assert there.phases[1].rl is not None
    for named in (f"{there.phases[0].data.dir}/manifest.json", f"{there.phases[0].init_from}/model.safetensors"):
        assert named.removeprefix("../") in paths
    assert f"{there.base.dir}/config.json".removeprefix("../") in paths
    assert f"data/{there.phases[1].rl.tasks[0].reward}" in paths
    text = store.read(next(item.key for item in inputs if item.path == "run/run.json")).decode()
    assert json.loads(text)["phases"][0]["init_from"] == "../data/start-sft"


def test_weights_to_start_from_are_sent_and_those_of_the_base_only_once(chain: Run, tmp_path: Path) -> None:
    first, *rest = chain.phases
    assert chain.base is not None
    on_base = dataclasses.replace(chain, phases=[dataclasses.replace(first, init_base=chain.base.dir), *rest])
    assert {item.path for item in travelling(on_base, World())} == {item.path for item in travelling(chain, World())}
    assert relocated(on_base).phases[0].init_base == "../data/base"
    write(tmp_path / "other" / file_names.WEIGHTS, b"other")
    neighbor = dataclasses.replace(chain, phases=[dataclasses.replace(first, init_base=str(tmp_path / "other")), *rest])
    found = {item.path: item.sha256 for item in travelling(neighbor, World())}
    assert found["start-sft-base/model.safetensors"] == sha256(b"other")
    assert relocated(neighbor).phases[0].init_base == "../data/start-sft-base"


@pytest.mark.acceptance(77)
def test_inputs_in_the_store_can_be_reused_without_the_local_files(chain: Run, tmp_path: Path) -> None:
    run = dataclasses.replace(chain, id="moss-1", inputs=travelling(chain, World()))
    store = FileStore(str(tmp_path / "store"), World())
    first = prepare_inputs(run, run.data.dir, store, World())
    for folder in ("sft", "start", "base"):
        (tmp_path / folder).rename(tmp_path / f"gone-{folder}")
    assert prepare_inputs(run, run.data.dir, store, World()) == first
