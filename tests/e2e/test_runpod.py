"""The whole trip on RunPod's double: its API on loopback, pods that really run our startup script, a store like S3."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.cloud.rig import look_more_often, make_run, marked_now, trainer_argv
from tests.doubles.runpod_server import KEY, RunpodServer
from tests.doubles.s3_servers import ACCESS_KEY, SECRET_KEY, moto
from tests.doubles.sshd import need_sshd
from tests.e2e.test_same_result import RUN_FILE, homing

from homing.cloud import boot as booting
from homing.cloud.connect import find_login
from homing.cloud.fetch import fetch
from homing.cloud.home import Home
from homing.cloud.launch import Draft, LaunchOrder, draft, guards, launch
from homing.cloud.logs import boot_log
from homing.cloud.providers.base import Needs, wait_until
from homing.cloud.reconcile import refresh
from homing.cloud.status import billing_lines
from homing.cloud.watch import watch
from homing.config import load_run
from homing.errors import CreateFailed
from homing.wire import names
from homing.wire.run import Cloud, Run
from homing.world import World

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.timeout(600)]
ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    need_sshd()
    with moto() as server:
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=server.endpoint, **keys).create_bucket(Bucket="homing")
        yield f"s3://homing/mine?endpoint={server.endpoint}&region=us-east-1"


@pytest.fixture
def runpod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunpodServer]:
    with RunpodServer(tmp_path / "pods") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server
        assert server.double.violations == []
        assert server.double.ssh_keys_put == 0


@pytest.fixture
def home(homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    look_more_often(monkeypatch)
    monkeypatch.setattr("homing.cloud.providers.runpod_start.EVERY_S", 0.3)
    monkeypatch.setattr("homing.cloud.providers.runpod.Runpod.settle_s", 1.0)
    monkeypatch.setattr("homing.cloud.providers.runpod._DESCRIBE_EVERY_S", 0.5)
    return Home(homing_home, World())


def ready(home: Home, run: Run, tmp_path: Path, argv: tuple[str, ...] = (), **told: Any) -> Draft:
    """What `homing launch` makes of a run file, on the cheapest offer; the double has no card, so it trains without."""
    provider = told.pop("provider", "runpod")
    run = dataclasses.replace(run, cloud=dataclasses.replace(run.cloud, providers=[provider]))
    home.configure(run)
    offer = min(home.provider(provider).offers(Needs()), key=lambda each: each.rate_usd_per_hour)
    order = LaunchOrder(
        run, "name: moss\n", is_prepared=True, offer=offer, spend_limit_usd=Decimal("1.00"), heartbeat_s=0.2, **told
    )
    made = draft(order, home)
    place = home.provider(provider).place(made.mark)
    real = tuple(booting.trainer_argv(place.python, place.work_dir))
    train = dataclasses.replace(made.run.train, needs_gpu=False)
    return dataclasses.replace(
        made,
        order=dataclasses.replace(order, trainer_argv=argv or real),
        run=dataclasses.replace(made.run, train=train),
    )


def stand_in(home: Home, bucket: str, tmp_path: Path, steps: int, step_s: float = 0.02, **told: Any) -> Draft:
    run = dataclasses.replace(
        make_run(tmp_path), store=bucket, cloud=Cloud(providers=["runpod"], settings={"runpod": {}})
    )
    work_dir = "/opt/homing/work"
    return ready(home, run, tmp_path, tuple(trainer_argv(tmp_path, work_dir, steps=steps, step_s=step_s)), **told)


def everything_below(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path, path.read_bytes()


def test_offers_launch_boot_train_watch_push_self_destruct_fetch_receipt(
    home: Home, runpod: RunpodServer, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.resources import files

    (tmp_path / "runs").mkdir()
    text = RUN_FILE.replace("steps: 300", "steps: 30").replace("every: 50", "every: 10")
    (tmp_path / "runs/stone.yaml").write_text(f"{text}\nstore: {bucket}\ncloud: {{providers: [runpod]}}\n")
    (tmp_path / "shakespeare.txt.xz").write_bytes((files("homing.presets") / "texts/shakespeare.txt.xz").read_bytes())
    homing(tmp_path, "prep", "stone")
    monkeypatch.chdir(tmp_path)
    loaded = load_run("runs/stone.yaml", ())
    made = ready(home, loaded.run, tmp_path)
    assert any("RunPod has no spend limit" in said for said in guards(made, home))

    said: list[str] = []
    done = launch(made, home, tell=said.append)
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
    for folder in (tmp_path / "pods", home.path):
        assert [path for path, data in everything_below(folder) if KEY.encode() in data] == []
    # The store's keys came by SSH and lie on no disk there.
    assert [path for path, data in everything_below(tmp_path / "pods") if SECRET_KEY.encode() in data] == []


def test_a_lost_host_is_seen_and_the_run_goes_on_elsewhere(
    home: Home, runpod: RunpodServer, bucket: str, tmp_path: Path
) -> None:
    done = launch(stand_in(home, bucket, tmp_path, steps=60, step_s=0.25), home)
    store = home.store_of(done.run)
    key = f"{names.STORE_RUNS}/{done.run.id}/{names.CHECKPOINTS}"
    assert wait_until(
        lambda: any(entry.key.endswith(names.MANIFEST) for entry in store.list(key)),
        timeout_s=120, every_s=0.5, world=home.world,
    )  # fmt: skip
    runpod.lose(done.instance.id)
    assert marked_now(home) == []
    refresh(home)
    row = home.ledger.find("moss")
    assert row.state == "failed"
    assert billing_lines(home.ledger.lines(row.id)) == []

    run = dataclasses.replace(make_run(tmp_path), store=bucket)
    made = ready(home, run, tmp_path, provider="local", resume=True)
    work_dir = home.provider("local").place(made.mark).work_dir
    argv = tuple(trainer_argv(tmp_path, work_dir, steps=60, step_s=0.01))
    again = launch(dataclasses.replace(made, order=dataclasses.replace(made.order, trainer_argv=argv)), home)
    assert [report.text for report in watch(home, again.run, every_s=1)][-1].startswith("done")
    began = [
        line
        for line in store.read(f"{names.STORE_RUNS}/{row.id}/logs/trainer.log").decode().splitlines()
        if "begins" in line
    ]
    assert int(began[-1].rsplit(" ", 1)[1]) > 1  # not from the beginning
    assert runpod.double.live() == {}


def test_a_container_that_is_started_again_ends_itself_and_trains_nothing_twice(
    home: Home, runpod: RunpodServer, bucket: str, tmp_path: Path
) -> None:
    runpod.pods.restarts_ended = False
    done = launch(stand_in(home, bucket, tmp_path, steps=ENDLESS), home)
    machine = runpod.machine(done.instance.id)
    machine.restart()
    assert wait_until(lambda: runpod.double.live() == {}, timeout_s=60, every_s=0.2, world=home.world), machine.log()
    refresh(home)
    assert billing_lines(home.ledger.lines()) == []


def test_a_pod_whose_key_may_not_end_it_is_refused_and_ended_from_home(
    home: Home, runpod: RunpodServer, bucket: str, tmp_path: Path
) -> None:
    runpod.double.may_pods_end = False
    with pytest.raises(CreateFailed, match="may not end itself") as caught:
        launch(stand_in(home, bucket, tmp_path, steps=ENDLESS), home)
    assert "403" in caught.value.why
    assert runpod.double.live() == {}
    assert marked_now(home) == []
