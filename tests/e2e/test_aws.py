"""The whole trip on AWS: real boto3, moto with manners, user data run for real, the bucket opened by the role alone."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import homing, look_more_often, make_run, marked_now, trainer_argv
from tests.doubles import hub as hub_double
from tests.doubles.aws_server import Cloud as AwsCloudDouble
from tests.doubles.aws_server import aws_cloud
from tests.doubles.hub import WRITE
from tests.doubles.sshd import need_sshd
from tests.e2e.trips import check_resume_here, files_with, look_at_clouds_more_often, stone

from homing.cloud.artifacts.checkpoints import fetch
from homing.cloud.destroy import destroy_run
from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, LaunchOrder, draft, guards, launch
from homing.cloud.launch.run_documents import request_of, write_home
from homing.cloud.machine_setup.boot_files import build_agent_zip
from homing.cloud.plan.plan import needs_of
from homing.cloud.providers.base import Needs, wait_until
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.watch.follow import watch
from homing.store import open_store
from homing.store.s3.store import S3Store
from homing.wire.run_json import Cloud
from homing.world import World

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.timeout(600)]

SECRET_KEY = "canary/of+the/account"
STORE = "s3://models/homing"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsCloudDouble]:
    need_sshd()
    with aws_cloud(tmp_path_factory.mktemp("aws"), pending_s=0.5, late_s=0.5, profile_s=1.0) as found:
        yield found


@pytest.fixture
def home(homing_home: Path, monkeypatch: pytest.MonkeyPatch, cloud: AwsCloudDouble) -> Iterator[Home]:
    look_more_often(monkeypatch)
    open_account(monkeypatch, cloud)
    found = Home(homing_home, World())
    yield found
    for instance in found.provider("aws").list_owned():
        found.provider("aws").destroy(instance.id)


def open_account(monkeypatch: pytest.MonkeyPatch, cloud: AwsCloudDouble) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIACANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    look_at_clouds_more_often(monkeypatch)
    import boto3

    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="models")


def ready(
    home: Home,
    cloud: AwsCloudDouble,
    tmp_path: Path,
    *,
    steps: int = 12,
    step_s: float = 0.01,
    store: str = STORE,
    **settings: Any,
) -> Draft:
    messages = {"instance_types": ["g5.xlarge"], "metadata_url": cloud.metadata_url, **settings}
    # `watch` guards too: it would resume a preempted run by itself, on AWS.
    where = Cloud(providers=["aws"], settings={"aws": messages}, on_preempt="stop")
    run = dataclasses.replace(make_run(tmp_path), cloud=where, store=store)
    home.configure(run)
    offer = home.provider("aws").offers(Needs())[0]
    order = LaunchOrder(run, "name: moss\n", is_prepared=True, offer=offer, spend_limit_usd=Decimal("1.00"))
    made = draft(order, home)
    argv = trainer_argv(tmp_path, home.provider("aws").place(made.mark).work_dir, steps=steps, step_s=step_s)
    return dataclasses.replace(made, order=dataclasses.replace(order, trainer_argv=tuple(argv), heartbeat_s=0.2))


@pytest.mark.acceptance(48, 69)
def test_offers_launch_boot_train_watch_push_self_destruct_fetch_receipt(
    home: Home, cloud: AwsCloudDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real model, trained on a type without a card; no SSH: its files come by signed addresses, and by its role."""
    messages = f"{{instance_types: [m5.large], metadata_url: {cloud.metadata_url}}}"
    loaded = stone(tmp_path, monkeypatch, f"store: {STORE}\ncloud: {{providers: [aws], aws: {messages}}}")
    home.configure(loaded.run)
    offer = home.provider("aws").offers(needs_of(loaded.run))[0]
    assert offer.is_spot
    order = LaunchOrder(loaded.run, loaded.text, is_prepared=True, offer=offer, spend_limit_usd=Decimal("1.00"))
    made = draft(order, home)
    assert any("EC2 then terminates it" in said for said in guards(made, home))
    done = launch(made, home)
    assert done.heartbeat.has_dead_man
    last = [report.text for report in watch(home, done.run, every_s=1)][-1]
    assert last.startswith("done"), last
    refresh(home)
    (line,) = home.ledger.lines(done.run.id)
    assert line.destroyed_at is not None
    assert line.note == "shut itself down"
    (life,) = [each for each in cloud.lives() if each.mark == line.mark]
    assert life.ended is not None
    assert life.reason == "Client.InstanceInitiatedShutdown"
    paid = Decimal(str((life.ended - life.began) / 3600)) * offer.rate_usd_per_hour
    assert abs(Decimal(line.spend_usd) - paid) < Decimal("0.01")
    assert home.provider("aws").list_resources() == []
    got = fetch(home, home.ledger.find("stone"), tmp_path / "models/stone")
    assert (got.manifest.step, got.manifest.is_final) == (30, True)
    assert marked_now(home) == []
    assert files_with(SECRET_KEY, cloud.machine(done.instance.id)) == []


def test_files_and_secrets_come_by_ssh_where_one_address_may(home: Home, cloud: AwsCloudDouble, tmp_path: Path) -> None:
    made = ready(home, cloud, tmp_path, steps=100_000, step_s=0.05, ssh_from="127.0.0.1")
    done = launch(made, home)
    folder = cloud.machine(done.instance.id)
    assert home.provider("aws").connection(done.instance.id) is not None
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            words = (process / "cmdline").read_bytes()
            environ = (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words + environ:
            assert SECRET_KEY.encode() not in words + environ, words
    assert files_with(SECRET_KEY, folder) == []
    said = home.provider("aws").log(done.instance.id)
    assert "starting the agent" in said
    assert "the system shuts down in" in said
    (life,) = cloud.living()
    assert life.timers, "the operating system's own timer was not set"
    destroy_run(home, done.run)
    assert cloud.living() == []
    assert home.provider("aws").list_resources() == []


@pytest.mark.acceptance(60, 69, 106)
def test_a_preempted_spot_instance_saves_first_and_the_run_resumes_elsewhere(
    home: Home, cloud: AwsCloudDouble, tmp_path: Path
) -> None:
    done = launch(ready(home, cloud, tmp_path, steps=600, step_s=0.05, volume="20GB"), home)
    trained = lambda: any(step >= 30 for step in steps_of(home, done.run.id))  # noqa: E731
    assert wait_until(trained, timeout_s=120, every_s=0.5, world=home.world)
    cloud.preempt(done.instance.id, notice_s=30.0)
    last = [report.text for report in watch(home, done.run, every_s=1)][-1]
    row = home.ledger.run(done.run.id)
    assert row is not None
    assert row.is_interrupted, last
    assert cloud.living() == []
    (volume,) = home.provider("aws").list_resources()
    assert (volume.kind, volume.is_kept) == ("volume", True)
    taken_at = max(steps_of(home, done.run.id))

    check_resume_here(home, row, tmp_path, steps=taken_at + 20)
    first = next(step for step in steps_of(home, done.run.id) if step > taken_at)
    assert first == taken_at + 1  # nothing was trained twice
    home.provider("aws").destroy_resource(volume)


@pytest.mark.acceptance(69)
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_its_store_may_be_on_the_hub_and_the_token_comes_by_ssh(
    home: Home, cloud: AwsCloudDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real huggingface_hub at home and there; a repository in place of the bucket, so no role is made."""
    with hub_double.running() as hub:
        for name, value in {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": WRITE}.items():
            monkeypatch.setenv(name, value)
        made = ready(home, cloud, tmp_path, store="hf:me/moss", ssh_from="127.0.0.1")
        done = launch(made, home)
        assert {each.kind for each in home.provider("aws").list_resources()} == {"group"}
        assert [report.text for report in watch(home, done.run, every_s=1)][-1].startswith("done")
        refresh(home)
        (line,) = home.ledger.lines(done.run.id)
        assert (line.billing, line.note) == ("no", "shut itself down")
        got = fetch(home, home.ledger.find("moss"), tmp_path / "models/moss")
        assert (got.manifest.step, got.manifest.is_final) == (12, True)
        assert hub.repos[("model", "me/moss")].is_private
        assert hub.leaks == []
    for canary in (WRITE, SECRET_KEY):
        assert files_with(canary, cloud.machine(done.instance.id)) == []
        assert files_with(canary, home.path) == []


@pytest.mark.regression("unverified-code")
@pytest.mark.parametrize("when", ["planted before the upload", "replaced after the upload"])
def test_code_that_another_writer_put_into_the_bucket_never_runs(
    home: Home, cloud: AwsCloudDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Without SSH the first files come from the bucket, and the agent among them runs as root."""
    made = ready(home, cloud, tmp_path)
    write_home(made, home)
    request = request_of(made, home, [], home.world.now())
    build_agent_zip(request.order.files[0].source, home.world)
    ran = tmp_path / "foreign-code-ran"
    hostile = io.BytesIO()
    with zipfile.ZipFile(hostile, "w") as archive:
        archive.writestr("__main__.py", f"open({str(ran)!r}, 'w').close()\n")
    agent_key = f"objects/{home.world.sha256(request.order.files[0].source)}"
    if when == "planted before the upload":
        open_store(STORE, home.world).put_bytes(agent_key, hostile.getvalue())
    else:
        get_url = S3Store.get_url

        def replaced(self: S3Store, key: str, valid_s: float) -> str:
            if key == agent_key:
                self.put_bytes(key, hostile.getvalue())
            return get_url(self, key, valid_s)

        monkeypatch.setattr(S3Store, "get_url", replaced)
    instance = home.provider("aws").create(request)
    log = cloud.machine(instance.id) / "opt/homing/boot.log"
    said = lambda: log.read_text() if log.exists() else ""  # noqa: E731
    words = "starting the agent" if when == "planted before the upload" else "agent.zip in the store was replaced"
    wait_until(lambda: words in said() or ran.exists(), timeout_s=60, every_s=0.5, world=home.world)
    home.world.sleep(1.0)
    home.provider("aws").destroy(instance.id)
    assert not ran.exists(), "code of another writer ran on the instance"
    assert words in said()


def steps_of(home: Home, run_id: str) -> list[int]:
    row = home.ledger.run(run_id)
    assert row is not None
    store = home.store_of(row)
    key = f"runs/{run_id}/metrics.jsonl"
    return [json.loads(line)["step"] for line in store.read(key).splitlines()] if store.exists(key) else []


@pytest.mark.acceptance(69, 136)
def test_the_volume_of_a_run_is_formatted_once_and_found_again(
    home: Home,
    cloud: AwsCloudDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = launch(ready(home, cloud, tmp_path, steps=100_000, step_s=0.05, volume="20GB"), home)
    assert "formatting the new volume" in home.provider("aws").log(first.instance.id)
    destroy_run(home, first.run)
    messages = ready(home, cloud, tmp_path, steps=100_000, step_s=0.05, volume="20GB").order
    run = dataclasses.replace(messages.run, id=first.run.id)
    made = draft(dataclasses.replace(messages, resume=True, run=run), home)
    made = dataclasses.replace(
        made, order=dataclasses.replace(made.order, trainer_argv=messages.trainer_argv, heartbeat_s=0.2)
    )
    second = launch(made, home)
    said = home.provider("aws").log(second.instance.id)
    assert "formatting" not in said
    assert "the persistent volume is mounted" in said
    zones = {f"us-east-1/{life.id}": life.zone for life in cloud.lives()}
    assert zones[first.instance.id] == zones[second.instance.id]

    # Everything goes with one command, the machine that trains and what was made for it; the volume when that is said.
    said = homing(capsys, monkeypatch, "destroy", "--all", "--yes")
    assert said.code == 0, said.err
    left = home.provider("aws").list_resources()
    assert [resource.kind for resource in left] == ["volume"], [str(each) for each in left] + [said.err]
    (volume,) = left
    assert f"Still exists: aws volume {volume.id}, marked to be kept, $" in said.err
    assert f"Destroy it: homing destroy {volume.id}" in said.err
    said = homing(capsys, monkeypatch, "destroy", "--all", "--kept", "--yes")
    assert said.code == 0, said.err
    assert "Destroyed: aws volume" in said.err
    assert cloud.living() == []
    assert home.provider("aws").list_resources() == []
    assert homing(capsys, monkeypatch, "destroy", "--all", "--yes").code == 0, "repeated it is success"
