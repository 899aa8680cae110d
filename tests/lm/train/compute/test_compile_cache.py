"""What compiling made: kept for the next run here, taken along by this one, and never run unless it is ours."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_data, make_run, make_run_dir

from homing.lm.train.compute import compile_cache
from homing.lm.train.compute.compile_cache import CompileCache, Parts, keep_folders
from homing.lm.train.loop import train
from homing.wire import file_names
from homing.wire.run_json import Model

SHAPE = Model("stock", "qwen2", 2, 32, 4, 2, 8, 48, 16, 100, False)
CPU = torch.device("cpu")
COLD, WARM = Parts(0, 3), Parts(3, 0)


class Received:
    """Events by kind, and what was passed to torch."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str]] = []
        self.notice: list[str] = []
        self.loaded: list[bytes] = []

    def __call__(self, kind: str, text: str, *, notice: bool = False, step: int | None = None, **data: object) -> None:
        self.messages.append((kind, text))
        self.notice += [kind] if notice else []

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.messages]


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Received:
    """torch's two calls, without a compiler: what they are given and give is what matters to the files."""
    found = Received()
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"kernels", None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: found.loaded.append(data) or "info")
    return found


def saved(run_dir: Path, received: Received, shape: Model = SHAPE) -> CompileCache:
    cache = CompileCache(run_dir, shape, CPU, received)
    cache.save(COLD)
    return cache


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "compiled").iterdir())


def test_folders_lie_below_the_home_and_are_their_owners_alone(tmp_path: Path) -> None:
    environment = {"HOMING_HOME": str(tmp_path)}
    assert keep_folders(environment) == ""
    folder = tmp_path / "cache/compiled"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    assert environment["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert (folder / "triton").is_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_compile_cache_uses_the_configured_folder_unless_the_user_set_one(tmp_path: Path) -> None:
    environment = {"HOMING_HOME": "/nowhere", "HOMING_CACHE": str(tmp_path / "c"), "TRITON_CACHE_DIR": "/mine"}
    assert keep_folders(environment) == ""
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "c/compiled/inductor")
    assert environment["TRITON_CACHE_DIR"] == "/mine"
    assert not (tmp_path / "c/compiled/triton").exists()


def test_a_cache_folder_that_cannot_be_created_is_reported_and_torch_uses_its_default(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    environment = {"HOMING_HOME": str(tmp_path)}
    assert "cannot be kept for the next run" in keep_folders(environment)
    assert environment == {"HOMING_HOME": str(tmp_path)}


def test_it_comes_back_to_the_same_torch_card_and_shape(tmp_path: Path, received: Received) -> None:
    saved(tmp_path, received)
    CompileCache(tmp_path, SHAPE, CPU, received).load()
    assert received.loaded == [b"kernels"]
    assert received.kinds == ["compile_cache_saved", "compile_cache_loaded"]
    binary, messages = files(tmp_path)
    assert binary.startswith(f"torch-{torch.__version__}".split("+")[0])
    recorded = json.loads((tmp_path / "compiled" / messages).read_text())
    assert (recorded["sha256"], recorded["num_bytes"]) == (hashlib.sha256(b"kernels").hexdigest(), len(b"kernels"))


def test_a_cache_of_another_shape_is_ignored_with_a_notice(tmp_path: Path, received: Received) -> None:
    saved(tmp_path, received)
    CompileCache(tmp_path, dataclasses.replace(SHAPE, width=64), CPU, received).load()
    assert received.loaded == []
    assert received.notice == ["compile_cache_left"]


@pytest.mark.acceptance("X23")
@pytest.mark.parametrize("harm", ["bytes", "record", "no record", "another card"])
def test_what_is_not_the_file_that_was_written_down_never_reaches_torch(
    tmp_path: Path, received: Received, harm: str
) -> None:
    cache = saved(tmp_path, received)
    binary, record = (tmp_path / "compiled" / name for name in files(tmp_path))
    if harm == "bytes":
        binary.write_bytes(b"evil!!!")
    elif harm == "record":
        record.write_text("{")
    elif harm == "no record":
        record.unlink()
    else:
        record.write_text(json.dumps({**json.loads(record.read_text()), "device": "cuda (NVIDIA H200)"}))
    cache.load()
    assert received.loaded == []
    assert received.notice == ["compile_cache_refused"]
    assert "Compiling again" in received.messages[-1][1]


def test_a_cache_that_torch_cannot_read_is_reported(
    tmp_path: Path, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = saved(tmp_path, received)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: None)
    cache.load()
    assert received.notice == ["compile_cache_refused"]


def test_it_is_written_again_only_when_something_new_was_compiled(tmp_path: Path, received: Received) -> None:
    cache = saved(tmp_path, received)
    cache.save(WARM)
    assert received.kinds == ["compile_cache_saved"]
    cache.save(Parts(2, 1))
    assert received.kinds == ["compile_cache_saved"] * 2
    (tmp_path / "another").mkdir()
    CompileCache(tmp_path / "another", SHAPE, CPU, received).save(WARM)
    assert len(files(tmp_path / "another")) == 2, "a warm machine also gives it to a run that has none"


def test_a_full_disk_or_too_large_a_file_never_ends_a_run(
    tmp_path: Path, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiled").write_text("no folder")
    saved(tmp_path, received)
    monkeypatch.setattr(compile_cache, "_MOST_BYTES", 3)
    saved(tmp_path, received)
    assert received.notice == ["compile_cache_left"] * 2


def test_a_step_is_warm_when_all_its_parts_were_known() -> None:
    assert [(parts.is_warm, parts.sentence) for parts in (WARM, Parts(2, 1), Parts())] == [
        (True, "3 of 3 compiled graphs came from the cache."),
        (False, "2 of 3 compiled graphs came from the cache."),
        (None, ""),
    ]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / file_names.EVENTS).read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.slow
def test_a_compiled_run_saves_its_cache_next_to_the_checkpoints_and_loads_it_on_resume(
    tmp_path: Path, homing_home: Path, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data(tmp_path / "data")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where a test before this one compiled
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    make_run_dir(tmp_path / "plain", make_run(tmp_path / "data", num_steps=1, train={"compile": "off"}))
    train(tmp_path / "plain", say=received.notice.append)
    assert not (tmp_path / "plain/compiled").exists()
    assert not (homing_home / "cache").exists()

    run_dir = tmp_path / "run"
    make_run_dir(run_dir, make_run(tmp_path / "data", num_steps=1, train={"compile": "on"}))
    train(run_dir, say=received.notice.append)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(homing_home))
    assert len(files(run_dir)) == 2
    (first,) = events(run_dir, "first_step")
    assert 0 < first["data"]["step_s"] <= first["data"]["seconds"]
    assert first["data"]["is_warm"] is None, "no graph was counted"
    shutil.rmtree(run_dir / file_names.CHECKPOINTS)
    assert received.loaded == []
    train(run_dir, say=received.notice.append)
    assert received.loaded == [b"kernels"]


@pytest.mark.acceptance("X23")
@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute, on an idle machine
def test_a_second_run_here_compiles_nothing_and_the_same_run_elsewhere_finds_its_graphs(tmp_path: Path) -> None:
    """With the real compiler, which builds C++ here: what travels spares it all but the C++."""
    make_data(tmp_path / "data")
    run = make_run(tmp_path / "data", num_steps=1, train={"compile": "on", "precision": "fp32"})

    def run_trainer(name: str, home: str) -> dict[str, Any]:
        if not (tmp_path / name).exists():
            make_run_dir(tmp_path / name, run)
        env = {key: value for key, value in os.environ.items() if not key.endswith("_CACHE_DIR")}
        env |= {"HOMING_HOME": str(tmp_path / home), "OMP_NUM_THREADS": "1"}
        env["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # else every new home tries first what its C++ compiler can do
        argv = [sys.executable, "-m", "homing.lm.train", str(tmp_path / name)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return events(tmp_path / name, "first_step")[-1]["data"]

    cold, warm = run_trainer("first", "one"), run_trainer("second", "one")
    assert (cold["is_warm"], warm["is_warm"]) == (False, True)
    assert warm["step_s"] < cold["step_s"] / 2
    assert len(files(tmp_path / "first")) == len(files(tmp_path / "second")) == 2
    # Its folder alone goes to a machine that has compiled nothing.
    for gone in (file_names.CHECKPOINTS, file_names.OUTCOME, file_names.METRICS):
        path = tmp_path / "second" / gone
        path.rename(tmp_path / f"gone-{gone}")
    elsewhere = run_trainer("second", "two")
    assert events(tmp_path / "second", "compile_cache_loaded")
    assert elsewhere["is_warm"] is True
