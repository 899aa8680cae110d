"""The life of a run with its store in a bucket or on the Hub, from launch to fetch; and no key where it can be read."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import clear, make_draft, make_run, trainer_argv
from tests.doubles.hub import WRITE, Hub
from tests.doubles.s3_servers import SECRET_KEY, Server

from homing.cloud.artifacts.checkpoints import fetch
from homing.cloud.artifacts.remove_from_store import kept_by
from homing.cloud.destroy import destroy_run
from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, draft, dry_run, launch
from homing.cloud.providers.base import wait_until
from homing.cloud.reconcile.reconcile import refresh
from homing.errors import StoreError, UsageError
from homing.world import World

NewBucket = Callable[[Server], str]


@pytest.fixture
def home(homing_home: Path) -> Iterator[Home]:
    found = Home(homing_home, World())
    yield found
    clear(homing_home)


def draft_in(store: str, home: Home, tmp_path: Path) -> Draft:
    """A run whose store is elsewhere, with the torch-free trainer in place."""
    like = make_draft(home, tmp_path)
    order = dataclasses.replace(like.order, run=dataclasses.replace(make_run(tmp_path), store=store))
    ready = draft(order, home)
    argv = trainer_argv(tmp_path, home.provider("local").place(ready.mark).work_dir, steps=12)
    return dataclasses.replace(ready, order=dataclasses.replace(ready.order, trainer_argv=tuple(argv), heartbeat_s=0.2))


def live_it(store: str, home: Home, tmp_path: Path, canary: str) -> None:
    ready = draft_in(store, home, tmp_path)
    assert canary not in str(dry_run(ready, home).to_dict())
    messages: list[str] = []
    launched = launch(ready, home, notify=messages.append)
    shown = subprocess.run(["ps", "-axww", "-o", "args"], capture_output=True, text=True, check=True, timeout=30).stdout
    servers = ("rclone serve", "moto_server")  # the doubles, which have the key on the other side
    assert [line for line in shown.splitlines() if canary in line and not any(each in line for each in servers)] == []

    def is_over() -> bool:
        refresh(home)
        row = home.ledger.run(launched.run.id)
        return row is not None and not row.is_live

    assert wait_until(is_over, timeout_s=150, every_s=0.5, world=World())
    row = home.ledger.run(launched.run.id)
    assert row is not None
    assert row.state == "done", row.reason
    destroy_run(home, row)
    found = fetch(home, row, tmp_path / "model")
    assert (found.model_dir / "model.safetensors").read_bytes() == b"weights at 12"
    kept = kept_by(home, row)
    assert kept is not None
    assert kept.num_bytes > 0
    written = [path for path in home.path.rglob("*") if path.is_file()]
    assert [path for path in written if canary.encode() in path.read_bytes()] == []
    assert canary not in "".join(messages)
    store_now = home.store_of(row)
    for entry in store_now.list("runs/"):
        assert canary.encode() not in store_now.read(entry.key), entry.key


@pytest.mark.acceptance(43, 105, 139)
@pytest.mark.slow
def test_a_run_lives_in_a_bucket(moto: Server, new_bucket: NewBucket, home: Home, tmp_path: Path) -> None:
    live_it(f"s3://{new_bucket(moto)}/homing?endpoint={moto.endpoint}", home, tmp_path, SECRET_KEY)


@pytest.mark.acceptance(41, 105, 133)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_run_lives_on_the_hub(hub: Hub, home: Home, tmp_path: Path) -> None:
    live_it("hf:me/moss", home, tmp_path, WRITE)
    repo = hub.repos[("model", "me/moss")]
    assert repo.is_private
    (run,) = home.ledger.runs()
    for kept in (f"runs/{run.id}/checkpoints/", f"runs/{run.id}/logs/", "models/moss/"):
        assert [path for path in repo.head.files if path.startswith(kept)], (kept, sorted(repo.head.files))
    titles = [commit.title for commit in repo.commits]
    assert len(titles) < 40, titles


def test_a_store_that_cannot_be_used_stops_a_launch_before_anything_is_written_down(
    moto: Server, keys: None, home: Home, tmp_path: Path
) -> None:
    ready = draft_in(f"s3://missing-bucket?endpoint={moto.endpoint}", home, tmp_path)
    with pytest.raises(StoreError):
        dry_run(ready, home)
    with pytest.raises(StoreError, match="missing-bucket"):
        launch(ready, home)
    assert home.ledger.runs() == []
    assert home.ledger.lines() == []


@pytest.mark.acceptance(104)
def test_a_folder_is_refused_for_a_machine_that_cannot_read_it(home: Home, tmp_path: Path) -> None:
    provider = home.provider("local")
    provider.cannot = {**provider.cannot, "file_store": "Its machines are in another city."}
    with pytest.raises(UsageError, match="cannot reach file:") as caught:
        make_draft(home, tmp_path, limit=str(Decimal(1)))
    assert "another city" in caught.value.why
    assert "s3://bucket/prefix" in caught.value.fix
