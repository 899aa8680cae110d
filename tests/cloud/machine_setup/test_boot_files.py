"""What an instance begins with: the zip, the inputs by hash, boot.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from decimal import Decimal
from pathlib import Path

import pytest
from tests.doubles.trainer import __file__ as trainer_file

import homing
from homing import progress
from homing.cloud.machine_setup.boot_files import build_agent_zip, make_boot, prepare_inputs
from homing.errors import DataError, IntegrityError
from homing.store import FileStore
from homing.store.sync import fetch_inputs
from homing.wire import codec, file_names
from homing.wire.boot_json import EndBilling
from homing.wire.run_json import Cloud, Data, Limits, Model, Run, Sampling, Sizes, Train
from homing.wire.shard_manifest import DataManifest, Shard, Split
from homing.world import World

MAX_LINES = 1750
# Ends a machine like a provider: also the dead-man, which would otherwise retry for ever.
FELL = """
import glob, os, signal, sys
open(sys.argv[1], "w").close()
for folder in glob.glob("/proc/[0-9]*"):
    try:
        words = open(folder + "/cmdline", "rb").read().split(b"\\0")
        if b"--dead-man" in words and sys.argv[2].encode() in words:
            os.kill(int(folder.split("/")[2]), signal.SIGKILL)
    except OSError:
        pass
"""


def interpreters() -> list[str]:
    """The current one, and a 3.8 where there is one: what a bare image may have."""
    found = [sys.executable]
    old = [*Path.home().glob(".pyenv/versions/3.8*/bin/python3.8"), Path(shutil.which("python3.8") or "/absent")]
    for path in old:
        is_there = path.exists()
        if is_there and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return [*found, str(path)]
    return found


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train-00000.bin", "train-00000.idx", "val-00000.bin", "val-00000.idx", file_names.TOKENIZER):
        (folder / name).write_bytes(f"content of {name}".encode())

    def split(kind: str) -> Split:
        token, index = (folder / f"{kind}-00000.{ext}" for ext in ("bin", "idx"))
        shard = Shard(
            token.name, index.name, 10, 2, token.stat().st_size, sha256(token.read_bytes()), sha256(index.read_bytes())
        )
        return Split(num_tokens=10, num_documents=2, num_text_bytes=40, shards=[shard])

    manifest = DataManifest(
        dtype="uint16", vocab_size=300, tokenizer_sha256=sha256((folder / file_names.TOKENIZER).read_bytes()),
        specials=[],
        splits={"train": split("train"), "val": split("val")}, source=[], source_sha256="",
    )  # fmt: skip
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))
    return folder


@pytest.fixture
def run(data_dir: Path, tmp_path: Path) -> Run:
    return Run(
        name="amber", seed=1, id="amber-1",
        model=Model("stock", "qwen3", 1, 8, 1, 1, 8, 16, 16, 300, True), sizes=Sizes(1, 1, 1.0),
        data=Data(str(data_dir), sha256((data_dir / file_names.MANIFEST).read_bytes()), "", 10, 10),
        phases=[], train=Train(), sampling=Sampling(), limits=Limits(time_s=60.0, idle_s=30.0), cloud=Cloud(),
        store=f"file:{tmp_path}/store",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "store"), World())


def make(run: Run, work_dir: Path, **changes: object) -> object:
    values: dict[str, object] = {
        "mark": "homing-abc123-amber-1", "attempt": 1, "work_dir": work_dir, "inputs": [], "python": sys.executable,
        "end_billing": EndBilling("command", argv=["true"]), "started_at": World().now(),
        "rate_usd_per_hour": Decimal("0.36"), "spend_limit_usd": Decimal("1.00"),
    }  # fmt: skip
    return make_boot(run, **{**values, **changes})  # type: ignore[arg-type]


def test_the_same_source_gives_the_same_zip(tmp_path: Path) -> None:
    first = build_agent_zip(tmp_path / "a.zip", World())
    assert first == build_agent_zip(tmp_path / "b.zip", World()) == sha256((tmp_path / "a.zip").read_bytes())
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_what_runs_on_the_instance_is_readable_in_one_sitting(tmp_path: Path) -> None:
    """Agent and dead-man with the parts of wire and world that they ship with: every line, as `wc -l` counts."""
    build_agent_zip(tmp_path / "a.zip", World())
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        lines = {name: archive.read(name).count(b"\n") for name in archive.namelist()}
    shipped = {
        "instance/agent/supervise.py",
        "instance/agent/dead_man.py",
        "wire/codec.py",
        "wire/boot_json_agent.py",
        "world/machine.py",
    }
    assert {f"homing/{name}" for name in shipped} <= set(lines)
    assert sum(lines.values()) < MAX_LINES, lines


def test_all_of_the_agents_package_ships(tmp_path: Path) -> None:
    build_agent_zip(tmp_path / "a.zip", World())
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        shipped = set(archive.namelist())
    root = Path(homing.__file__).parent
    assert {f"homing/instance/agent/{path.name}" for path in root.glob("agent/*.py")} <= shipped


def test_the_zip_holds_only_agent_wire_and_world(tmp_path: Path) -> None:
    build_agent_zip(tmp_path / "a.zip", World())
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        names_in_zip = archive.namelist()
    own = ("homing/world/", "homing/instance/__init__.py", "homing/instance/agent/", "homing/wire/")
    allowed = ("__main__.py", "homing/__init__.py", *own)
    assert [name for name in names_in_zip if not name.startswith(allowed)] == []


@pytest.mark.slow
@pytest.mark.parametrize("python", interpreters())
def test_the_zip_starts_bare_and_runs_to_the_end_of_billing(python: str, run: Run, tmp_path: Path) -> None:
    work, ended = tmp_path / "work", tmp_path / "ended"
    work.mkdir()
    FileStore(str(tmp_path / "store"), World()).put_bytes("objects/marker", b"")
    end = EndBilling("command", argv=[python, "-I", "-c", FELL, str(ended), str(work / file_names.BOOT)])
    env = {"PYTHONPATH": str(Path(__file__).parents[3])}
    boot = make(run, work, end_billing=end, heartbeat_s=0.1, stop_grace_s=5.0, env=env)
    trainer = [sys.executable, trainer_file, str(work / "run"), "steps=3"]
    boot = dataclasses.replace(boot, trainer_argv=trainer)  # type: ignore[type-var]
    (work / file_names.BOOT).write_text(codec.dumps(boot))
    build_agent_zip(work / "agent.zip", World())
    argv = [python, "-I", str(work / "agent.zip"), str(work / file_names.BOOT)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    # What the provider would keep: log lines with their time, and nothing that a fault would print.
    assert [line for line in done.stderr.splitlines() if not re.match(r"\d{4}-\d\d-\d\d \d\d:", line)] == []
    assert ended.exists()
    assert json.loads((work / "run" / file_names.OUTCOME).read_text())["state"] == "done"


@pytest.mark.parametrize("python", interpreters())
def test_an_invalid_boot_file_is_reported_without_a_traceback(python: str, tmp_path: Path) -> None:
    build_agent_zip(tmp_path / "agent.zip", World())
    (tmp_path / file_names.BOOT).write_text('{"schema": "homing.run/1"}')
    for path in (tmp_path / file_names.BOOT, tmp_path / "absent"):
        argv = [python, "-I", str(tmp_path / "agent.zip"), str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("The agent cannot start")
        assert "Traceback" not in done.stderr


@pytest.mark.acceptance(72, 73, "P6")
def test_inputs_go_to_the_store_by_hash_and_arrive_where_training_looks(
    run: Run, data_dir: Path, store: FileStore, tmp_path: Path
) -> None:
    inputs = prepare_inputs(run, data_dir, store, World(), run_file_text="name: amber\n")
    assert all(item.key == f"objects/{item.sha256}" and store.sha256(item.key) == item.sha256 for item in inputs)
    boot = make(run, tmp_path / "work", inputs=inputs)
    fetch_inputs(boot, store, World())  # type: ignore[arg-type]
    work = tmp_path / "work"
    assert (work / "run/run.yaml").read_text() == "name: amber\n"
    there = codec.loads(Run, (work / "run/run.json").read_bytes())
    assert there == dataclasses.replace(run, data=dataclasses.replace(run.data, dir="../data"))
    assert sorted(p.name for p in (work / "data").iterdir()) == sorted(p.name for p in data_dir.iterdir())


def test_hashing_and_pushing_inputs_report_their_progress(run: Run, data_dir: Path, store: FileStore) -> None:
    seen: list[progress.Progress] = []
    with progress.listening(seen.append):
        prepare_inputs(run, data_dir, store, World())
    whole = sum(path.stat().st_size for path in data_dir.iterdir())
    hashed = [each for each in seen if each.what == "Checking the hashes of the inputs"]
    pushed = [each for each in seen if each.what.startswith("Pushing ")]
    assert [each.total for each in hashed] == [whole] * len(list(data_dir.iterdir()))
    assert pushed[-1].done == pushed[-1].total > 0
    assert seen[-1].what == "", "the bar disappears"
    with progress.listening(seen.append):
        store.put("objects/later", str(next(data_dir.iterdir())))
    assert seen[-1].what == "", "a later push of another file is not reported as one of the inputs"


@pytest.mark.acceptance(26, 38)
def test_inputs_already_in_the_store_are_not_pushed_again(run: Run, data_dir: Path, store: FileStore) -> None:
    first = prepare_inputs(run, data_dir, store, World())
    stamps = {item.key: (Path(store.root) / item.key).stat().st_mtime_ns for item in first}
    assert prepare_inputs(run, data_dir, store, World()) == first
    assert {item.key: (Path(store.root) / item.key).stat().st_mtime_ns for item in first} == stamps
    changed = prepare_inputs(run, data_dir, store, World(), run_file_text="name: amber\n# changed\n")
    (sent,) = {item.key for item in changed} - set(stamps)
    assert store.read(sent) == b"name: amber\n# changed\n", "only the changed file"
    assert {key: (Path(store.root) / key).stat().st_mtime_ns for key in stamps} == stamps


def test_a_shard_that_differs_from_its_manifest_is_not_pushed(run: Run, data_dir: Path, store: FileStore) -> None:
    (data_dir / "train-00000.bin").write_bytes(b"flipped")
    with pytest.raises(IntegrityError, match="does not match its manifest"):
        prepare_inputs(run, data_dir, store, World())


@pytest.mark.acceptance(9, 34, 73)
def test_missing_or_changed_data_is_refused_with_the_verb_to_run(run: Run, data_dir: Path, store: FileStore) -> None:
    (data_dir / "val-00000.bin").unlink()
    (data_dir / file_names.TOKENIZER).unlink()
    with pytest.raises(DataError) as caught:
        prepare_inputs(run, data_dir, store, World())
    assert "tokenizer.json, val-00000.bin" in caught.value.why
    assert caught.value.fix == "homing prep amber"
    changed = dataclasses.replace(run, data=dataclasses.replace(run.data, manifest_sha256="0" * 64))
    with pytest.raises(DataError, match="changed after"):
        prepare_inputs(changed, data_dir, store, World())
    (data_dir / file_names.MANIFEST).unlink()
    with pytest.raises(DataError, match="no prepared data"):
        prepare_inputs(run, data_dir, store, World())


def test_boot_json_holds_the_limits_and_the_start_commands(run: Run, tmp_path: Path) -> None:
    boot = codec.loads(type(make(run, tmp_path)), codec.dumps(make(run, tmp_path)))
    assert boot.trainer_argv == [sys.executable, "-m", "homing.lm.train", str(tmp_path / "run")]
    assert boot.sync_argv == [sys.executable, "-m", "homing.store.sync", "--boot", str(tmp_path / "boot.json")]
    assert (boot.time_limit_s, boot.idle_limit_s, boot.spend_limit_usd) == (60.0, 30.0, "1.00")
    assert (boot.rate_usd_per_hour, boot.spent_before_usd, boot.store) == ("0.36", "0", run.store)


def test_the_config_of_the_tokenizer_travels_with_it(
    run: Run, data_dir: Path, store: FileStore, tmp_path: Path
) -> None:
    (data_dir / file_names.TOKENIZER_CONFIG).write_bytes(b'{"chat_template": "x"}')
    inputs = prepare_inputs(run, data_dir, store, World())
    (config,) = (item for item in inputs if item.path == f"data/{file_names.TOKENIZER_CONFIG}")
    assert store.read(config.key) == b'{"chat_template": "x"}'
