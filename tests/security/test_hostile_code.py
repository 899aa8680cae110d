"""A store, or a disk, that others can write to: their code never runs on the instance.

The objects that an instance gets are known by their hash before they exist, so another writer can plant one, or swap
its bytes after the upload. Whatever is there: it is compared with the hash that came by the create call, and written
again from home where home has it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import subprocess
import sys
import zipfile
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import make_run

from homing.cloud.launch.run_documents import make_bootstrap_spec
from homing.cloud.machine_setup.boot_files import make_boot, prepare_inputs
from homing.cloud.providers.base import InputFile, Offer, Order, Place, Request
from homing.errors import HomingError
from homing.store import FileStore
from homing.store.sync import fetch_inputs
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, EndBilling, Input
from homing.wire.run_json import Run
from homing.world import World

END = EndBilling(kind="command", argv=["true"])
CPU = Offer("ssh", "me@host", "processor", 0, 8, 10**10, Decimal("0.36"))
# Control bytes, nothing at all, a little more than it should be, a manifest in the place of another.
HOSTILE = [b"\x00\x1b]0;evil\x07\r\n" * 40, b"", b"{}", b'{"schema": "homing.run/1"}']


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return dataclasses.replace(make_run(tmp_path), id="moss-1")


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    found = FileStore(str(tmp_path / "store"), World())
    found.put_bytes("homing", b"there")
    return found


def boot_of(run: Run, work_dir: Path, inputs: list[Input] | None = None) -> Boot:
    return make_boot(
        run, mark="m", attempt=1, work_dir=work_dir, inputs=inputs or [], python=sys.executable, end_billing=END,
        started_at=0.0, rate_usd_per_hour=Decimal(1), spend_limit_usd=Decimal(1), heartbeat_s=0.01,
    )  # fmt: skip


def wheel_that_runs(program: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("homing/__init__.py", program)
        archive.writestr("homing/instance/bootstrap.py", program)
    return buffer.getvalue()


@pytest.mark.regression("unverified-code")
def test_nothing_is_imported_from_a_wheel_that_is_not_the_one_that_left_home(tmp_path: Path, run: Run) -> None:
    work, ran = tmp_path / "work", tmp_path / "foreign-code-ran"
    work.mkdir()
    place = Place(str(work), sys.executable, END, base_python=sys.executable, cache_dir=str(tmp_path / "cache"))
    boot, files = make_bootstrap_spec(boot_of(run, work), place, run, CPU, World(), is_stand_in=True)
    for name, data in files.items():
        (work / name).write_bytes(data)
    (work / file_names.BOOT).write_text(codec.dumps(boot))
    assert boot.bootstrap is not None
    (work / boot.bootstrap.code).write_bytes(wheel_that_runs(f"open({str(ran)!r}, 'w').close()\n"))
    done = subprocess.run(boot.bootstrap_argv, capture_output=True, timeout=60, check=False)
    assert not ran.exists(), "code of another writer ran on the instance"
    assert done.returncode != 0
    assert b"was replaced" in done.stderr


@pytest.mark.regression("unverified-code")
@pytest.mark.parametrize("planted", HOSTILE)
def test_what_another_writer_planted_under_the_hash_of_a_run_file_is_written_again(
    tmp_path: Path, run: Run, store: FileStore, planted: bytes
) -> None:
    clean = FileStore(str(tmp_path / "clean"), World())
    documents = [item for item in prepare_inputs(run, run.data.dir, clean, World()) if item.path.startswith("run/")]
    for item in documents:
        store.put_bytes(item.key, planted)
    prepare_inputs(run, run.data.dir, store, World())
    for item in documents:
        assert hashlib.sha256(store.read(item.key)).hexdigest() == item.sha256


@pytest.mark.regression("unverified-code")
@pytest.mark.parametrize("swapped", HOSTILE)
def test_run_documents_that_were_swapped_after_the_upload_are_not_copied_into_the_record(
    tmp_path: Path, run: Run, store: FileStore, swapped: bytes
) -> None:
    """Another home adopts the run from this record, and launches what it says."""
    from homing.cloud.home import LAUNCH_NOTE, Home
    from homing.cloud.launch.run_documents import push_documents

    home = Home(tmp_path / "home", World())
    home.run_dir(run.id).mkdir(parents=True)
    (home.run_dir(run.id) / LAUNCH_NOTE).write_text("{}")
    inputs = prepare_inputs(run, run.data.dir, store, World(), run_file_text="name: moss\n")
    for item in inputs:
        if item.path.startswith("run/"):
            store.put_bytes(item.key, swapped)
    order = Order("m", "moss", boot_of(run, tmp_path / "work", inputs), (InputFile("agent.zip", "/a"),), {})
    with pytest.raises(HomingError, match="was replaced"):
        push_documents(home, store, Request("ssh", "m", CPU, order, ("python3",), {}))
    assert not store.exists(f"runs/{run.id}/{file_names.RUN}")


@pytest.mark.parametrize("swapped", HOSTILE)
def test_an_input_that_was_swapped_is_refused_on_the_instance_and_ends_the_run_with_the_cause(
    tmp_path: Path, run: Run, store: FileStore, swapped: bytes
) -> None:
    inputs = prepare_inputs(run, run.data.dir, store, World())
    item = next(each for each in inputs if each.path == f"run/{file_names.RUN}")
    store.put_bytes(item.key, swapped)
    boot = boot_of(run, tmp_path / "work", inputs)
    with pytest.raises(HomingError):
        fetch_inputs(boot, store, World())
    assert not (tmp_path / "work/run" / file_names.RUN).exists()
    said = (tmp_path / "work/run" / file_names.EVENTS).read_text()
    assert "has changed since it was pushed" in said
    assert f"homing store rm {item.key}" in said
