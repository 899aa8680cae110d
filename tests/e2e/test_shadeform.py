"""The whole trip on Shadeform's double: its API on loopback, machines that boot by our script, a store like S3."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.cloud.rig import look_more_often, make_run, marked_now, trainer_argv
from tests.doubles.s3_servers import ACCESS_KEY, SECRET_KEY, moto
from tests.doubles.shadeform import KEY
from tests.doubles.shadeform_server import ShadeformServer
from tests.doubles.sshd import need_sshd
from tests.e2e.test_same_result import RUN_FILE, homing

from homing.cloud import boot as booting
from homing.cloud.connect import find_login
from homing.cloud.destroy import destroy_run
from homing.cloud.fetch import fetch
from homing.cloud.guard import guard_pass
from homing.cloud.guards import guards, sign_in
from homing.cloud.home import Home
from homing.cloud.launch import Draft, LaunchOrder, draft, launch
from homing.cloud.limit import change_limit, propose
from homing.cloud.logs import boot_log
from homing.cloud.providers.base import Needs, wait_until
from homing.cloud.reconcile import refresh
from homing.cloud.status import billing_lines
from homing.cloud.stop import ask_to_stop
from homing.cloud.watch import watch
from homing.config import load_run
from homing.errors import StartTimeout, UsageError
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
def shadeform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShadeformServer]:
    with ShadeformServer(tmp_path / "machines") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server
        assert server.unlike == []


@pytest.fixture
def home(homing_home: Path, shadeform: ShadeformServer, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    look_more_often(monkeypatch)
    hurry(monkeypatch)
    return Home(homing_home, World())


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.cloud.providers.shadeform.Shadeform.settle_s", 1.0)
    monkeypatch.setattr("homing.cloud.providers.shadeform._DESCRIBE_EVERY_S", 0.5)
    monkeypatch.setattr("homing.cloud.providers.shadeform._LOOK_EVERY_S", 0.3)


def ready(home: Home, run: Run, argv: tuple[str, ...] = (), **told: Any) -> Draft:
    """What `homing launch` makes of a run file, on the cheapest offer; the double has no card, so it trains without."""
    provider = told.pop("provider", "shadeform")
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
        order=dataclasses.replace(made.order, trainer_argv=argv or real),
        run=dataclasses.replace(made.run, train=train),
    )


def stand_in(
    home: Home, bucket: str, tmp_path: Path, steps: int, step_s: float = 0.02, *, settings: Any = None, **told: Any
) -> Draft:
    cloud = Cloud(providers=["shadeform"], settings={"shadeform": settings or {}})
    run = dataclasses.replace(make_run(tmp_path), store=bucket, cloud=cloud)
    argv = tuple(trainer_argv(tmp_path, "/opt/homing/work", steps=steps, step_s=step_s))
    return ready(home, run, argv, **{"is_one_guard_enough": True, **told})


def made_at(home: Home, run_id: str) -> float:
    return home.ledger.lines(run_id)[-1].created_at or 0.0


def files_with(text: str, folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [path for path in found if text.encode() in path.read_bytes()]


def test_offers_launch_boot_train_watch_push_end_fetch_receipt(
    home: Home, shadeform: ShadeformServer, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the account's key at home, so that whoever watches ends the machine."""
    (tmp_path / "runs").mkdir()
    text = RUN_FILE.replace("steps: 300", "steps: 30").replace("every: 50", "every: 10")
    (tmp_path / "runs/stone.yaml").write_text(f"{text}\nstore: {bucket}\ncloud: {{providers: [shadeform]}}\n")
    (tmp_path / "shakespeare.txt.xz").write_bytes((files("homing.presets") / "texts/shakespeare.txt.xz").read_bytes())
    homing(tmp_path, "prep", "stone")
    monkeypatch.chdir(tmp_path)
    made = ready(home, load_run("runs/stone.yaml", ()).run)
    said = " ".join(guards(made, home))
    assert "cannot end its own billing" in said
    assert made.worst_case_usd < Decimal("1.00"), "what it can cost with nobody there is bounded by the plan"
    with pytest.raises(UsageError, match="Only one guard"):
        launch(made, home)
    assert shadeform.cloud.bill() == []
    sign_in(home, 60)

    done = launch(made, home)
    instance_id = done.instance.id
    machine = shadeform.machine(instance_id)
    seen = machine.processes()
    assert any("agent.zip" in argv for argv, _ in seen.values())
    assert find_login(home, done.run).connection.port == machine.port
    assert "starting the agent" in boot_log(home, done.run)
    rented = shadeform.cloud.rented[instance_id]
    assert 0 < made.run.limits.time_s - (rented.guarded_until() - made_at(home, done.run.id)) < 30

    texts = [report.text for report in watch(home, done.run, every_s=1)]
    assert texts[-1].startswith("done"), texts[-3:]
    assert shadeform.cloud.live() == {}
    refresh(home)
    (line,) = home.ledger.lines(done.run.id)
    assert (line.state, line.billing) == ("gone", "no")
    (billed,) = shadeform.cloud.bill()
    assert Decimal(line.spend_usd) >= billed.usd > 0
    assert home.provider("shadeform").list_resources() == []
    got = fetch(home, home.ledger.find("stone"), tmp_path / "models/stone")
    assert (got.manifest.step, got.manifest.is_final) == (30, True)

    # The account's key is nowhere but at home: neither in what was sent, nor there, nor in what home wrote down.
    assert all(KEY not in argv and KEY not in env.values() for argv, env in seen.values())
    assert KEY not in json.dumps([each.asked for each in shadeform.cloud.rented.values()])
    assert files_with(KEY, tmp_path / "machines") == []
    assert files_with(KEY, home.path) == []
    # The store's keys came by SSH and lie on no disk there.
    assert files_with(SECRET_KEY, tmp_path / "machines") == []


def test_with_self_delete_it_ends_itself_and_the_key_is_in_no_file(
    home: Home, shadeform: ShadeformServer, bucket: str, tmp_path: Path
) -> None:
    made = stand_in(home, bucket, tmp_path, ENDLESS, 0.1, settings={"self_delete": True}, is_one_guard_enough=False)
    assert any("the account's key goes onto the machine" in said for said in guards(made, home))
    assert made.run.limits.time_s == 0, "nothing has to bound what it wastes"
    done = launch(made, home)
    seen = shadeform.machine(done.instance.id).processes()
    holders = [argv for argv, env in seen.values() if KEY in env.values()]
    assert holders
    assert all("agent.zip" in argv for argv in holders), "the trainer and what it starts never see it"
    assert all(KEY not in argv for argv, _ in seen.values())
    ask_to_stop(home, done.run)
    assert wait_until(lambda: shadeform.cloud.live() == {}, timeout_s=300, every_s=0.3, world=home.world)
    assert marked_now(home) == []
    refresh(home)
    row = home.ledger.find("moss")
    assert (row.state, row.exit_code) == ("stopped", 0), row.reason
    assert billing_lines(home.ledger.lines(row.id)) == []
    assert files_with(KEY, tmp_path / "machines") == []
    assert files_with(KEY, home.path) == []
    assert KEY not in json.dumps([each.asked for each in shadeform.cloud.rented.values()])


def test_done_with_nobody_there_it_waits_for_home_or_for_its_date(
    home: Home, shadeform: ShadeformServer, bucket: str, tmp_path: Path
) -> None:
    done = launch(stand_in(home, bucket, tmp_path, 10), home)
    beat = f"{names.STORE_RUNS}/{done.run.id}/{names.HEARTBEAT}"
    store = home.store_of(done.run)
    assert wait_until(lambda: b'"ended"' in store.read(beat), timeout_s=300, every_s=0.5, world=home.world)
    assert sum(shadeform.cloud.live().values()) == 1, "it cannot end itself, and bills"
    guard_pass(home)
    assert shadeform.cloud.live() == {}, "whoever looks ends it at once"
    assert billing_lines(home.ledger.lines()) == []

    again = launch(stand_in(home, bucket, tmp_path, ENDLESS), home)
    rented = shadeform.cloud.rented[again.instance.id]
    row = home.ledger.find("moss")
    change_limit(home, propose(home, row, None, 7000.0), confirm_s=30.0)
    until = rented.guarded_until()
    assert 6800 < until - rented.created_at < 7200, "a person gave it more time"
    shadeform.ahead_s = until - shadeform.cloud.now() + 1
    assert wait_until(lambda: shadeform.cloud.live() == {}, timeout_s=30, every_s=0.2, world=home.world)
    refresh(home)
    assert billing_lines(home.ledger.lines()) == []


def test_a_spot_machine_that_is_taken_away_goes_on_elsewhere(
    home: Home, shadeform: ShadeformServer, bucket: str, tmp_path: Path
) -> None:
    shadeform.machines.card = "H100 PCIe"
    cloud = Cloud(providers=["shadeform"], settings={"shadeform": {"spot": True, "clouds": ["hyperstack"]}})
    run = dataclasses.replace(make_run(tmp_path), store=bucket, cloud=cloud)
    argv = tuple(trainer_argv(tmp_path, "/opt/homing/work", steps=60, step_s=0.25))
    made = ready(home, run, argv, is_one_guard_enough=True)
    assert made.order.offer.is_spot
    done = launch(made, home)
    assert done.instance.rate_usd_per_hour == Decimal("1.25")
    store = home.store_of(done.run)
    key = f"{names.STORE_RUNS}/{done.run.id}/{names.CHECKPOINTS}"
    assert wait_until(
        lambda: any(entry.key.endswith(names.MANIFEST) for entry in store.list(key)),
        timeout_s=300, every_s=0.5, world=home.world,
    )  # fmt: skip
    shadeform.take(done.instance.id)
    refresh(home)
    row = home.ledger.find("moss")
    assert (row.state, row.is_interrupted) == ("failed", True)
    (line,) = home.ledger.lines(row.id)
    assert (line.billing, line.note) == ("no", "preempted by the provider")

    run = dataclasses.replace(make_run(tmp_path), store=bucket)
    made = ready(home, run, provider="local", resume=True)
    work_dir = home.provider("local").place(made.mark).work_dir
    argv = tuple(trainer_argv(tmp_path, work_dir, steps=60, step_s=0.01))
    again = launch(dataclasses.replace(made, order=dataclasses.replace(made.order, trainer_argv=argv)), home)
    assert [report.text for report in watch(home, again.run, every_s=1)][-1].startswith("done")
    log = store.read(f"{names.STORE_RUNS}/{row.id}/logs/trainer.log").decode()
    began = [text for text in log.splitlines() if "begins" in text]
    assert int(began[-1].rsplit(" ", 1)[1]) > 1, "not from the beginning"
    assert shadeform.cloud.live() == {}


def test_a_machine_that_is_not_what_was_rented_is_seen_at_once_and_ended_from_home(
    home: Home, shadeform: ShadeformServer, bucket: str, tmp_path: Path
) -> None:
    """Its agent cannot end it and could not speak to the store yet; for Shadeform it is active all the time."""
    shadeform.machines.card = "T4"
    began = home.world.monotonic()
    with pytest.raises(StartTimeout, match="ended before its first heartbeat") as caught:
        launch(stand_in(home, bucket, tmp_path, ENDLESS), home)
    assert "T4" in caught.value.why
    assert home.world.monotonic() - began < 300, "not the half hour that a slow boot may take"
    assert shadeform.cloud.live() == {}
    assert shadeform.cloud.keys == {}
    assert billing_lines(home.ledger.lines()) == []


def test_destroy_ends_a_machine_that_is_training_and_removes_its_key(
    home: Home, shadeform: ShadeformServer, bucket: str, tmp_path: Path
) -> None:
    done = launch(stand_in(home, bucket, tmp_path, ENDLESS), home)
    assert [key["name"] for key in shadeform.cloud.keys.values()] == [done.instance.mark]
    destroy_run(home, done.run)
    assert shadeform.cloud.live() == {}
    assert marked_now(home) == []
    assert shadeform.cloud.keys == {}
