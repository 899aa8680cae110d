"""A store that others can write to: what comes out of it stays inside its folder and never runs.

Manifests name files, and names are where an archive has always broken out: each way of writing "elsewhere" is tried on
the person's machine (fetch) and on the instance (resume, inputs). The bytes behind the names are right, and so are
their hashes: only the name is hostile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from homing.cloud.artifacts.checkpoints import fetch
from homing.cloud.contact.heartbeats import read_reports
from homing.cloud.home import Home
from homing.cloud.launch.resume import resume_inputs
from homing.cloud.ledger.ledger import RunRow
from homing.errors import HomingError, IntegrityError
from homing.store import FileStore
from homing.store.sync import fetch_inputs
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, EndBilling, Input
from homing.wire.control_files import Heartbeat
from homing.wire.event_lines import Event, Outcome
from homing.world import World

RUN_ID = "moss-20260101-000000-abcd"
STEP = f"runs/{RUN_ID}/checkpoints/pretrain/step-00000012"
EVIL = b"evil"
SHA256 = hashlib.sha256(EVIL).hexdigest()
PLAIN = ["%2e%2e/evil", "..%2fevil", "\uff0e\uff0e/evil"]  # hostile to a browser, plain names to a file system
NAMES = [
    *("../evil", "../../evil", "../../../../../../../../tmp/homing-evil", "/tmp/homing-evil", "//tmp/homing-evil"),
    *("a/../../evil", "./../evil", "a/evil", "..", ".", "", " ", "~/evil", "$HOME/evil", "evil\0.json", "evil\n"),
    *("\u202egnp.evil", "..\\evil", "C:\\evil", "C:evil", "\\\\host\\evil", ".bashrc", ".ssh", "-rf", "a" * 300),
    *("ev/il", "évil", "evil ", "*", "CON:", "model.safetensors/../evil", *PLAIN),
]


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "store"), World())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", World())


def run_row(tmp_path: Path) -> RunRow:
    return RunRow(RUN_ID, "moss", "done", 0.0, f"file:{tmp_path}/store", "")


def write_checkpoint(root: Path, **changes: Any) -> None:
    """Behind every name lie the bytes it promises, as far as this file system can hold such a name."""
    folder = root / "store" / STEP
    folder.mkdir(parents=True, exist_ok=True)
    body = {
        "schema": "homing.checkpoint/1", "run_name": "moss", "run_id": RUN_ID, "phase": "pretrain", "step": 12,
        "num_tokens": 1, "is_final": True, "config_sha256": "", "seed": 0, "files": [], **changes,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(body))


def entry(name: str) -> dict[str, Any]:
    return {"name": name, "num_bytes": len(EVIL), "sha256": SHA256}


def everything(tmp_path: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_in_a_manifest_writes_nothing_anywhere(tmp_path: Path, home: Home, name: str) -> None:
    write_checkpoint(tmp_path, files=[entry(name)])
    for place in (tmp_path / "store" / "evil", tmp_path / "store" / STEP / "evil"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(EVIL)
    before = everything(tmp_path)
    with pytest.raises(HomingError):
        fetch(home, run_row(tmp_path), tmp_path / "models/moss")
    after = {path: data for path, data in everything(tmp_path).items() if "/home/" not in path}
    assert after == before
    assert not Path("/tmp/homing-evil").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_never_becomes_an_input_of_an_instance(tmp_path: Path, store: FileStore, name: str) -> None:
    write_checkpoint(tmp_path, files=[entry(name)])
    try:
        taken, damaged = resume_inputs(store, RUN_ID, ["pretrain"])
    except HomingError:
        return
    assert damaged
    assert not [item for item in taken if "checkpoints" in item.path and item.path.endswith(name)]


def test_what_was_compiled_is_code_and_never_comes_back_out_of_a_store(store: FileStore) -> None:
    """A trainer loads the run's `compiled/` (docs/development/engine.md), so only the trainer may write there."""
    for name in ("compiled/kernels.bin", "compiled/kernels.json", file_names.EVENTS):
        store.put_bytes(f"runs/{RUN_ID}/{name}", EVIL)
    taken, _ = resume_inputs(store, RUN_ID, ["pretrain"])
    assert [item.path for item in taken] == [f"run/{file_names.EVENTS}"]


@pytest.mark.parametrize("path", [name for name in NAMES if "/" in name or name in ("..", "", "evil\0.json")])
def test_an_input_that_leads_out_of_the_work_folder_is_refused_there(
    tmp_path: Path, store: FileStore, path: str
) -> None:
    store.put_bytes(f"objects/{SHA256}", EVIL)
    work_dir = tmp_path / "work"
    work_dir.mkdir()
    before = everything(tmp_path)
    item = Input(f"objects/{SHA256}", path, len(EVIL), SHA256)
    end = EndBilling(kind="command", argv=["true"])
    boot = Boot(
        run_id=RUN_ID, run_name="moss", mark="mark", attempt=1, work_dir=str(work_dir), store=store.url, inputs=[item],
        trainer_argv=[], sync_argv=[], end_billing=end, started_at=0.0, rate_usd_per_hour="1", spent_before_usd="0",
        spend_limit_usd=None, time_limit_s=0.0, idle_limit_s=0.0, stall_factor=0.0,
    )  # fmt: skip
    with contextlib.suppress(HomingError):
        fetch_inputs(boot, store, World())
    after = {name: data for name, data in everything(tmp_path).items() if not name.startswith(str(work_dir))}
    assert after == before
    assert not Path("/tmp/homing-evil").exists()


@pytest.mark.parametrize(
    "key", [name for name in NAMES if (".." in name or name[:1] == "/" or "\0" in name) and name not in PLAIN]
)
def test_no_key_leads_out_of_the_store(tmp_path: Path, store: FileStore, key: str) -> None:
    store.put_bytes("inside", EVIL)
    before = everything(tmp_path)
    for call in (
        lambda: store.put_bytes(key, EVIL),
        lambda: store.read(key),
        lambda: store.delete(key),
        lambda: store.create_if_absent(key, EVIL),
    ):
        with pytest.raises(HomingError):
            call()
    assert everything(tmp_path) == before


HOSTILE = [
    *(b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"[]", b"7"),
    *(b'{"t": 1e999}', b'{"t": "now"}', b'{"schema": "homing.run/1"}'),
]
# Of a run that a limit ended: each of the three is read.
BEAT = Heartbeat(t=1.0, mark="m", attempt=1, state="ended", started_at=0.0, rate_usd_per_hour="1", spend_usd="1")
HOSTILE_REPORTS = {
    file_names.HEARTBEAT: BEAT,
    file_names.OUTCOME: Outcome("stopped", "", 0),
    file_names.EVENTS: Event(1.0, "agent", "landed", ""),
}


@pytest.fixture
def reports(store: FileStore) -> dict[str, str]:
    written = {name: codec.dumps(document) + "\n" for name, document in HOSTILE_REPORTS.items()}
    for name, text in written.items():
        store.put_bytes(f"runs/{RUN_ID}/{name}", text.encode())
    assert read_reports(store, RUN_ID, None).is_limit
    return written


@pytest.mark.parametrize("document", [file_names.HEARTBEAT, file_names.OUTCOME])
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_heartbeats_are_reported_as_such(
    store: FileStore, reports: dict[str, str], document: str, text: bytes
) -> None:
    store.put_bytes(f"runs/{RUN_ID}/{document}", text)
    with pytest.raises(IntegrityError, match=rf"Cannot read .*{document} in "):
        read_reports(store, RUN_ID, None)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_event_says_nothing_and_hides_no_other(
    store: FileStore, reports: dict[str, str], text: bytes
) -> None:
    key = f"runs/{RUN_ID}/{file_names.EVENTS}"
    store.put_bytes(key, text + b"\n" + reports[file_names.EVENTS].encode())
    assert read_reports(store, RUN_ID, None).is_limit
    store.put_bytes(key, text + b"\n")
    assert not read_reports(store, RUN_ID, None).is_limit
