"""What the whole trips at rented machines share: a bucket, a run that is ready to launch, and resuming elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.cloud.rig import look_more_often, make_run, trainer_argv
from tests.doubles.s3_servers import ACCESS_KEY, SECRET_KEY, moto
from tests.e2e.test_same_result import RUN_FILE, homing

from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, LaunchOrder, draft, launch
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.machine_setup import boot_files as booting
from homing.cloud.machine_setup import startup_script
from homing.cloud.providers.base import Needs, wait_until
from homing.cloud.watch.follow import watch
from homing.config.load import Loaded, load_run
from homing.wire import file_names
from homing.wire.run_json import Cloud, Run
from homing.world import World

ENDLESS = 1_000_000
# The doubles' lists are late by half a second at most; the pauses are those between two looks at one thing.
_PAUSES_S = {
    "aws.provider.Aws.settle_s": 1.0,
    "aws.provider._DESCRIBE_EVERY_S": 0.5,
    "aws.provider._LOOK_S": 0.3,
    "aws.create._PROFILE_EVERY_S": 0.3,
    "aws.resources._LOOK_S": 0.3,
    "modal.provider.Modal.settle_s": 1.0,
    "modal.provider._DESCRIBE_EVERY_S": 0.5,
    "runpod.provider.Runpod.settle_s": 1.0,
    "runpod.provider._DESCRIBE_EVERY_S": 0.5,
    "runpod.hand_over.EVERY_S": 0.3,
    "shadeform.provider.Shadeform.settle_s": 1.0,
    "shadeform.provider._DESCRIBE_EVERY_S": 0.5,
    "shadeform.provider._LOOK_EVERY_S": 0.3,
}


def look_at_clouds_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look is taken as often as ever, with a shorter wait before the next."""
    for name, seconds in _PAUSES_S.items():
        monkeypatch.setattr(f"homing.cloud.providers.{name}", seconds)


@contextlib.contextmanager
def bucket() -> Iterator[str]:
    """The address of a store like S3, somewhere else than the cloud of the test."""
    with moto() as server:
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=server.endpoint, **keys).create_bucket(Bucket="homing")
        yield f"s3://homing/mine?endpoint={server.endpoint}&region=us-east-1"


def open_home(path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Set the keys of that bucket, and shorten the intervals between queries."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    look_more_often(monkeypatch)
    look_at_clouds_more_often(monkeypatch)
    return Home(path, World())


def stone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str) -> Loaded:
    """A real model of thirty steps, its text prepared; `more` is the end of its run file."""
    (tmp_path / "runs").mkdir()
    text = RUN_FILE.replace("steps: 300", "steps: 30").replace("every: 50", "every: 10")
    (tmp_path / "runs/stone.yaml").write_text(f"{text}\n{more}\n")
    (tmp_path / "shakespeare.txt.xz").write_bytes((files("homing.presets") / "texts/shakespeare.txt.xz").read_bytes())
    homing(tmp_path, "prep", "stone")
    monkeypatch.chdir(tmp_path)
    return load_run("runs/stone.yaml", ())


def ready(home: Home, run: Run, provider: str, argv: tuple[str, ...] = (), **messages: Any) -> Draft:
    """What `homing launch` makes of a run file, on the cheapest offer; a double has no card, so it trains without."""
    run = dataclasses.replace(run, cloud=dataclasses.replace(run.cloud, providers=[provider]))
    home.configure(run)
    offer = min(home.provider(provider).offers(Needs()), key=lambda each: each.rate_usd_per_hour)
    order = LaunchOrder(
        run, "name: moss\n", is_prepared=True, offer=offer, spend_limit_usd=Decimal("1.00"), heartbeat_s=0.2, **messages
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
    home: Home,
    store: str,
    tmp_path: Path,
    provider: str,
    *,
    steps: int,
    step_s: float = 0.02,
    settings: dict[str, Any] | None = None,
    **messages: Any,
) -> Draft:
    """The small trainer in place of the real one: no torch, and as long as a test wants it."""
    cloud = Cloud(providers=[provider], settings={provider: settings or {}})
    run = dataclasses.replace(make_run(tmp_path), store=store, cloud=cloud)
    argv = tuple(trainer_argv(tmp_path, startup_script.WORK_DIR, steps=steps, step_s=step_s))
    return ready(home, run, provider, argv, **messages)


def wait_for_checkpoint(home: Home, run: RunRow) -> None:
    store, key = home.store_of(run), f"{file_names.STORE_RUNS}/{run.id}/{file_names.CHECKPOINTS}"
    is_there = lambda: any(entry.key.endswith(file_names.MANIFEST) for entry in store.list(key))  # noqa: E731
    assert wait_until(is_there, timeout_s=300, every_s=0.3, world=home.world)


def check_resume_here(home: Home, run: RunRow, tmp_path: Path, *, steps: int) -> None:
    """The next attempt of a run that was lost, on this computer: done, and not from the beginning."""
    made = ready(home, dataclasses.replace(make_run(tmp_path), store=run.store), "local", resume=True)
    argv = tuple(trainer_argv(tmp_path, home.provider("local").place(made.mark).work_dir, steps=steps, step_s=0.01))
    again = launch(dataclasses.replace(made, order=dataclasses.replace(made.order, trainer_argv=argv)), home)
    assert (again.run.id, again.instance.provider) == (run.id, "local")
    assert [report.text for report in watch(home, again.run, every_s=1)][-1].startswith("done")
    log = home.store_of(run).read(f"{file_names.STORE_RUNS}/{run.id}/logs/trainer.log").decode()
    began = [int(line.rsplit(" ", 1)[1]) for line in log.splitlines() if line.startswith("trainer begins")]
    assert began[-1] > 1, "it began anew"


def files_with(text: str, folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [path for path in found if text.encode() in path.read_bytes()]
