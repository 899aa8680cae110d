"""The whole trip on RunPod's double: its API on loopback, pods that really run our startup script, a store like S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import marked_now
from tests.doubles.runpod_server import KEY, RunpodServer
from tests.doubles.s3_servers import SECRET_KEY
from tests.doubles.sshd import need_sshd
from tests.e2e.trips import (
    ENDLESS,
    bucket,
    check_resume_here,
    files_with,
    open_home,
    ready,
    stand_in,
    stone,
    wait_for_checkpoint,
)

from homing.cloud.artifacts.checkpoints import fetch
from homing.cloud.contact.ssh_access import find_login
from homing.cloud.home import Home
from homing.cloud.launch.launch import guards, launch
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.providers.base import wait_until
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.watch.follow import watch
from homing.cloud.watch.run_output import boot_log
from homing.errors import CreateFailed

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    need_sshd()
    with bucket() as url:
        yield url


@pytest.fixture
def runpod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunpodServer]:
    with RunpodServer(tmp_path / "pods") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server
        assert server.violations == []
        assert server.double.ssh_keys_put == 0


@pytest.fixture
def home(homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return open_home(homing_home, monkeypatch)


@pytest.mark.acceptance(48)
def test_offers_launch_boot_train_watch_push_self_destruct_fetch_receipt(
    home: Home, runpod: RunpodServer, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = stone(tmp_path, monkeypatch, f"store: {store}\ncloud: {{providers: [runpod]}}")
    made = ready(home, loaded.run, "runpod")
    assert any("RunPod has no spend limit" in said for said in guards(made, home))

    said: list[str] = []
    done = launch(made, home, notify=said.append)
    assert done.instance.mark == done.heartbeat.mark
    pod_id = done.instance.id
    machine = runpod.machine(pod_id)
    seen = machine.processes()
    assert any("agent.zip" in argv for argv, _ in seen.values())
    assert find_login(home, done.run).connection.port == machine.port
    assert "starting the agent" in boot_log(home, done.run)

    texts = [report.text for report in watch(home, done.run, every_s=1)]
    assert texts[-1].startswith("done"), texts[-3:]
    assert wait_until(lambda: pod_id not in runpod.pods.machines, timeout_s=60, every_s=0.2, world=home.world)
    assert runpod.double.live() == {}
    refresh(home)
    (line,) = home.ledger.lines(done.run.id)
    assert (line.state, line.billing) == ("gone", "no")
    (billed,) = runpod.double.bill()
    assert Decimal(line.spend_usd) >= billed.usd > 0
    got = fetch(home, home.ledger.find("stone"), tmp_path / "models/stone")
    assert (got.manifest.step, got.manifest.is_final) == (30, True)

    # The account's key is nowhere but at home: neither in what was sent, nor on the pod, nor in what home wrote down.
    assert all(KEY not in argv and KEY not in env.values() for argv, env in seen.values())
    assert KEY not in json.dumps(runpod.double.pods)
    assert files_with(KEY, tmp_path / "pods") == []
    assert files_with(KEY, home.path) == []
    # The store's keys came by SSH and lie on no disk there.
    assert files_with(SECRET_KEY, tmp_path / "pods") == []


@pytest.mark.acceptance(48, 106)
def test_a_lost_host_is_noticed_and_the_run_resumes_elsewhere(
    home: Home, runpod: RunpodServer, store: str, tmp_path: Path
) -> None:
    done = launch(stand_in(home, store, tmp_path, "runpod", steps=60, step_s=0.25), home)
    wait_for_checkpoint(home, done.run)
    runpod.lose(done.instance.id)
    assert marked_now(home) == []
    refresh(home)
    row = home.ledger.find("moss")
    assert row.state == "failed"
    assert billing_lines(home.ledger.lines(row.id)) == []

    check_resume_here(home, row, tmp_path, steps=60)
    assert runpod.double.live() == {}


def test_a_container_that_is_started_again_ends_itself_and_trains_nothing_twice(
    home: Home, runpod: RunpodServer, store: str, tmp_path: Path
) -> None:
    runpod.pods.restarts_ended = False
    done = launch(stand_in(home, store, tmp_path, "runpod", steps=ENDLESS), home)
    machine = runpod.machine(done.instance.id)
    machine.restart()
    assert wait_until(lambda: runpod.double.live() == {}, timeout_s=60, every_s=0.2, world=home.world), machine.log()
    refresh(home)
    assert billing_lines(home.ledger.lines()) == []


def test_a_pod_that_may_not_end_itself_is_refused_and_destroyed_from_home(
    home: Home, runpod: RunpodServer, store: str, tmp_path: Path
) -> None:
    runpod.double.may_pods_end = False
    with pytest.raises(CreateFailed, match="cannot terminate itself") as caught:
        launch(stand_in(home, store, tmp_path, "runpod", steps=ENDLESS), home)
    assert "403" in caught.value.why
    assert runpod.double.live() == {}
    assert marked_now(home) == []
