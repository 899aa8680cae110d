"""The whole trip on a host that one logs in to: a real OpenSSH server, a wheel of this tree, a stand-in trainer."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import clear, look_more_often, make_run, marked_now, read_json, trainer_argv
from tests.doubles.container import engine, sshd_inside
from tests.doubles.s3_servers import ACCESS_KEY, SECRET_KEY, moto
from tests.doubles.sshd import Sshd, need_sshd, running_sshd

from homing.cloud.artifacts.checkpoints import fetch
from homing.cloud.destroy import destroy_run
from homing.cloud.guard.change_limit_or_stop import ask_to_stop
from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, LaunchOrder, draft, launch
from homing.cloud.providers.base import Needs, wait_until
from homing.cloud.reconcile.reconcile import refresh
from homing.errors import UsageError
from homing.wire.run_json import Cloud
from homing.world import World

pytestmark = [pytest.mark.machine, pytest.mark.slow]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    yield from running_sshd(tmp_path_factory.mktemp("ssh") / "sshd")


@pytest.fixture
def home(homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    look_more_often(monkeypatch)
    found = Home(homing_home, World())
    yield found
    clear(homing_home, "ssh")


def ready(
    home: Home,
    sshd: Sshd,
    tmp_path: Path,
    *,
    steps: int = 12,
    step_s: float = 0.01,
    store: str = "",
    **settings: object,
) -> Draft:
    there = sshd.settings(**{"work_dir": str(tmp_path / "there"), "python": sys.executable, **settings})
    run = dataclasses.replace(make_run(tmp_path), cloud=Cloud(providers=["ssh"], ssh=there))
    run = dataclasses.replace(run, store=store or run.store)
    home.configure(run)
    offer = home.provider("ssh").offers(Needs())[0]
    order = LaunchOrder(run, "name: moss\n", is_prepared=True, offer=offer, spend_limit_usd=Decimal("1.00"))
    made = draft(order, home)
    argv = trainer_argv(tmp_path, home.provider("ssh").place(made.mark).work_dir, steps=steps, step_s=step_s)
    return dataclasses.replace(made, order=dataclasses.replace(order, trainer_argv=tuple(argv), heartbeat_s=0.2))


def test_launch_heartbeat_stop_fetch_destroy(home: Home, sshd: Sshd, tmp_path: Path) -> None:
    said: list[str] = []
    done = launch(ready(home, sshd, tmp_path, steps=2000, step_s=0.05), home, notify=said.append)
    assert done.heartbeat.mark == done.instance.mark
    assert any("wheel" in line for line in said)
    stages = [event for event in events(tmp_path, done.run.id) if event["kind"] == "stage_done"]
    assert [event["data"]["stage"] for event in stages] == [
        "directories", "disk", "gpu", "code", "environment", "compiler", "probe",
    ]  # fmt: skip
    status = home.provider("ssh").describe(done.instance.id)
    assert status.is_running

    ask_to_stop(home, done.run)
    assert wait_until(lambda: not marked_now(home), timeout_s=120, every_s=0.5, world=home.world)
    refresh(home)
    row = home.ledger.find("moss")
    assert row.state == "stopped"
    got = fetch(home, row, tmp_path / "models" / "moss")
    assert got.manifest.step > 0
    destroy_run(home, row)
    (line,) = home.ledger.lines(row.id)
    assert (line.state, line.billing) == ("gone", "no")
    assert Decimal(line.spend_usd) > 0
    assert home.provider("ssh").list_owned() == []


@pytest.mark.acceptance(46)
def test_the_code_that_runs_there_is_this_tree_unpacked_from_its_wheel(home: Home, sshd: Sshd, tmp_path: Path) -> None:
    made = ready(home, sshd, tmp_path)
    where = "import homing, sys; open(sys.argv[1], 'w').write(homing.__file__)"
    argv = (sys.executable, "-c", where, str(tmp_path / "where"))
    done = launch(dataclasses.replace(made, order=dataclasses.replace(made.order, trainer_argv=argv)), home)
    assert wait_until(lambda: not marked_now(home), timeout_s=120, every_s=0.5, world=home.world)
    assert (tmp_path / "where").read_text().startswith(str(tmp_path / "there" / "cache" / "code-"))
    boot = read_json(tmp_path / "there" / done.instance.mark / "work" / "boot.json")
    bootstrap = boot["bootstrap"]
    assert isinstance(bootstrap, dict)
    assert (tmp_path / "store" / "objects" / str(bootstrap["code_sha256"])).exists()


@pytest.mark.acceptance(47)
def test_a_stage_that_fails_ends_billing_and_its_reason_comes_home(home: Home, sshd: Sshd, tmp_path: Path) -> None:
    made = ready(home, sshd, tmp_path)
    # A volume that cannot be written: a file is where its folder should be.
    (tmp_path / "volume").write_text("in the way")
    run = dataclasses.replace(made.run, cloud=dataclasses.replace(made.run.cloud, volume=str(tmp_path / "volume")))
    launch(dataclasses.replace(made, run=run), home)
    assert wait_until(lambda: not marked_now(home), timeout_s=120, every_s=0.5, world=home.world)
    refresh(home)
    row = home.ledger.find("moss")
    assert row.state == "failed"
    assert "Stage directories failed" in row.reason
    assert [line.billing for line in home.ledger.lines(row.id)] == ["no"]


def test_a_store_that_only_home_sees_is_refused_and_nothing_is_left(
    home: Home, sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ready(home, sshd, tmp_path)
    monkeypatch.setattr("homing.cloud.providers.ssh.provider._proof", lambda boot: ("/nowhere/objects/x", "0" * 64))
    with pytest.raises(UsageError, match="cannot access the store"):
        launch(made, home)
    assert marked_now(home) == []
    assert home.provider("ssh").list_owned() == []


def test_the_keys_of_an_s3_store_travel_by_stdin_and_the_run_ends_in_the_bucket(
    home: Home, sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boto3 = pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-" + SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with moto() as server:
        boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1").create_bucket(Bucket="moss")
        store = f"s3://moss/homing?endpoint={server.endpoint}"
        done = launch(ready(home, sshd, tmp_path, store=store), home)
        assert wait_until(lambda: not marked_now(home), timeout_s=180, every_s=0.5, world=home.world)
        assert refresh(home) == []
        row = home.ledger.find("moss")
        assert (row.state, row.exit_code) == ("done", 0), row.reason
        fetch(home, row, tmp_path / "models" / "moss")
    written = [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert done.instance.mark in str(written)
    assert [path for path in written if b"hunter2-" in path.read_bytes()] == []


def test_a_container_is_a_host_too_and_its_disk_is_its_own(home: Home, tmp_path: Path) -> None:
    need_sshd()
    server = Sshd(tmp_path / "sshd")
    there = "/root/there"
    with engine() as docker:
        shared = tmp_path / "store"
        shared.mkdir()
        with sshd_inside(docker, server, [shared, tmp_path / "data"]) as name:
            made = ready(home, server, tmp_path, work_dir=there, steps=400, step_s=0.05)
            script = subprocess.run([*docker, "cp", f"{tmp_path}/trainer.py", f"{name}:/trainer.py"], check=False)
            assert script.returncode == 0
            words = made.order.trainer_argv or ()
            argv = tuple("/trainer.py" if word.endswith("trainer.py") else word for word in words)
            done = launch(dataclasses.replace(made, order=dataclasses.replace(made.order, trainer_argv=argv)), home)
            assert not Path(there).exists(), "it lives on the container's disk"
            assert home.provider("ssh").describe(done.instance.id).is_running
            destroy_run(home, home.ledger.find("moss"))
            assert home.provider("ssh").list_owned() == []
            processes = subprocess.run([*docker, "top", name], capture_output=True, text=True, check=True).stdout
            assert "agent.zip" not in processes


def events(tmp_path: Path, run_id: str) -> list[dict[str, Any]]:
    path = tmp_path / "store" / "runs" / run_id / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
