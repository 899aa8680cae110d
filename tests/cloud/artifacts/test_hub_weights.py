"""Open weights that the instance downloads from the Hub: what home sends, checks and reports, and how failures end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cloud import rig
from tests.cloud.rig import make_draft, make_run, marked_now
from tests.doubles import hub as hub_double
from tests.doubles.hub import Commit, File, Hub
from tests.doubles.s3_servers import free_port

from homing.cloud.artifacts.hub_weights import check_hub, describe_hub_download, hub_files
from homing.cloud.guard.change_limit_or_stop import ask_to_stop, wait_for_stop
from homing.cloud.home import Home
from homing.cloud.launch.inputs import travelling
from homing.cloud.launch.launch import dry_run, launch
from homing.cloud.plan.plan import make_plan
from homing.cloud.plan.timing import pushing
from homing.cloud.providers.base import wait_until
from homing.cloud.providers.ssh.provider import _proof
from homing.cloud.reconcile.run_status import look
from homing.cloud.watch.follow import watch
from homing.errors import DataError, StoreError, UsageError
from homing.units import format_bytes
from homing.wire import codec
from homing.wire.run_json import Base, HubFile, Limits, Run
from homing.world import World

COMMIT = "c" * 40
SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 300_000 for n in (1, 2)}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_double.running() as running:
        files = {name: File(data, is_lfs=True) for name, data in SHARDS.items()}
        running.add("them/model", is_private=False).commits.append(Commit(COMMIT, "weights", files))
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HF_TOKEN", hub_double.READ)
        yield running


@pytest.fixture
def run(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose base model has its config here and its weights on the Hub; every draft of the rig uses it."""
    documents = tmp_path / "metadata"
    documents.mkdir()
    (documents / "config.json").write_text("{}")
    listed = [HubFile(name, len(data), sha256(data)) for name, data in SHARDS.items()]
    base = Base(f"hf:them/model@{COMMIT}", str(documents), hub_files=listed)

    def with_base(where: Path, name: str = "moss", *, limits: Limits | None = None) -> Run:
        return dataclasses.replace(make_run(where, name, limits=limits), base=base)

    monkeypatch.setattr(rig, "make_run", with_base)
    return with_base(tmp_path)


def bring_here(run: Run) -> None:
    assert run.base is not None
    for name, data in SHARDS.items():
        (Path(run.base.dir) / name).write_bytes(data)


def outcome_of(home: Home, tmp_path: Path) -> dict[str, object]:
    return rig.read_json(tmp_path / "store/runs" / home.ledger.find("moss").id / "outcome.json")


def events_of(home: Home, tmp_path: Path) -> list[dict[str, object]]:
    text = (tmp_path / "store/runs" / home.ledger.find("moss").id / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_weights_come_from_the_hub_and_the_config_comes_from_here(run: Run) -> None:
    found = {item.path: item for item in travelling(run, World()) if item.path.startswith("base/")}
    assert set(found) == {"base/config.json", *(f"base/{name}" for name in SHARDS)}
    for name, data in SHARDS.items():
        item = found[f"base/{name}"]
        assert (item.source, item.sha256, item.num_bytes) == (
            f"hf:them/model@{COMMIT}/{name}", sha256(data), len(data),
        )  # fmt: skip


def test_local_weights_are_copied_into_a_local_store_but_not_uploaded_to_a_remote_one(run: Run) -> None:
    bring_here(run)
    near = [item.source for item in travelling(run, World()) if item.path.startswith("base/model")]
    assert all(Path(source).is_file() for source in near)
    assert len(near) == len(SHARDS)
    far = dataclasses.replace(run, store="s3://bucket/x")
    assert all(item.source.startswith("hf:") for item in travelling(far, World()) if item.path.startswith("base/model"))


def test_the_plan_counts_hub_weights_as_a_download_and_not_as_an_upload(run: Run, home: Home) -> None:
    assert run.base is not None
    large = [dataclasses.replace(file, num_bytes=5 * 10**9) for file in run.base.hub_files]
    open_run = dataclasses.replace(run, base=dataclasses.replace(run.base, hub_files=large), store="s3://bucket/x")
    timing = make_plan(open_run, home).offers[0].timing
    plain = make_plan(dataclasses.replace(run, base=None, store="s3://bucket/x"), home).offers[0].timing
    assert timing.arrive_s - plain.arrive_s == pytest.approx(400, abs=1), "10 GB at 25 MB/s"
    assert "with 10.00 GB from the Hub" in timing.text
    assert "Hub" not in plain.text
    without = dataclasses.replace(open_run, inputs=travelling(open_run, World()))
    assert pushing(without) == pushing(dataclasses.replace(run, base=None, store="s3://bucket/x"))


def test_gated_weights_are_uploaded_from_home_and_the_message_says_why(run: Run) -> None:
    bring_here(run)
    assert run.base is not None
    gated = dataclasses.replace(run, base=dataclasses.replace(run.base, hub_files=[]), store="s3://bucket/x")
    gated = dataclasses.replace(gated, inputs=travelling(gated, World()))
    assert hub_files(gated, World()) == []
    assert not any(item.source.startswith("hf:") for item in gated.inputs)
    messages = describe_hub_download(gated, World())
    assert "homing never sends your token to a rented instance" in messages
    # The message gives the full size that goes through the store, which explains the long upload.
    sizes = [World().size(item.source) for item in gated.inputs if item.path.startswith("base/")]
    assert sum(sizes) > 600_000
    assert f"{format_bytes(sum(sizes))} of hf:" in messages


@pytest.mark.parametrize("status", [401, 403, 404])
def test_weights_that_are_no_longer_public_are_refused_before_renting(
    run: Run, hub: Hub, home: Home, tmp_path: Path, status: int
) -> None:
    ready = make_draft(home, tmp_path)
    hub.failures = [("/resolve/", status)] * 2
    for step in (dry_run, launch):
        with pytest.raises(DataError) as caught:
            step(ready, home)
        assert str(status) in caught.value.why
    assert home.ledger.lines() == []
    assert {token for _, _, token, _ in hub.seen} == {""}, "the check sends no token, like the instance"


def test_a_failing_hub_a_changed_file_or_a_password_in_the_url_stops_before_renting(
    run: Run, hub: Hub, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = make_draft(home, tmp_path)
    hub.failures = [("/resolve/", 503)]
    with pytest.raises(StoreError, match="is not serving"):
        launch(ready, home)
    first = hub.add("them/model").commits[-1].files["model-00001-of-00002.safetensors"]
    first.data += b"!"
    with pytest.raises(DataError, match="differs from the file the Hub listed"):
        launch(ready, home)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint.replace("//", "//me:secret@"))
    with pytest.raises(UsageError, match="password") as caught:
        check_hub(ready.run, home.world)
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StoreError, match="is not serving"):
        launch(ready, home)
    assert home.ledger.lines() == []


@pytest.mark.slow
def test_the_instance_downloads_the_weights_and_the_store_never_holds_them(
    run: Run, hub: Hub, home: Home, tmp_path: Path
) -> None:
    messages: list[str] = []
    ready = make_draft(home, tmp_path)
    assert any(
        f"<- {hub.endpoint}/them/model/resolve/{COMMIT}/" in item for item in dry_run(ready, home).to_dict()["inputs"]
    )
    order = dry_run(ready, home).order
    assert hub_double.READ not in codec.dumps(order.boot) + repr(order.secrets), "the account's token stays at home"
    done = launch(ready, home, notify=messages.append)
    list(watch(home, done.run, every_s=1))
    assert home.ledger.find("moss").state == "done"
    assert any("downloads 600.00 kB of hf:them/model" in line for line in messages), messages
    taken = [event for event in events_of(home, tmp_path) if "base/model" in str(event["text"])]
    assert [event["kind"] for event in taken] == ["input_fetched"] * 2
    assert all(" 300,000 bytes verified, in " in str(event["text"]) for event in taken), taken
    assert all(str(event["text"]).endswith(" s from the Hub.") for event in taken), taken
    stored = {path.name for path in (tmp_path / "store/objects").iterdir()}
    assert stored, "the other inputs are stored"
    assert not stored & {sha256(data) for data in SHARDS.values()}
    assert {token for _, _, token, _ in hub.seen} == {""}


def test_the_proof_that_an_ssh_host_sees_the_store_is_a_file_stored_in_it(run: Run, home: Home, tmp_path: Path) -> None:
    boot = dry_run(make_draft(home, tmp_path), home).order.boot
    inputs = [dataclasses.replace(item, num_bytes=0) if item.url else item for item in boot.inputs]
    path, digest = _proof(dataclasses.replace(boot, inputs=inputs))
    assert path == f"{tmp_path}/store/objects/{digest}"


@pytest.mark.acceptance(31)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrong bytes", "404"])
def test_a_failed_weight_download_destroys_the_instance_before_training(
    run: Run, hub: Hub, home: Home, tmp_path: Path, how: str
) -> None:
    if how == "wrong bytes":
        hub.spoiled = ["/cdn/"]
    else:
        hub.failures = []
        del hub.add("them/model").commits[-1].files["model-00002-of-00002.safetensors"]
    done = launch(make_draft(home, tmp_path), home)
    list(watch(home, done.run, every_s=1))
    outcome = outcome_of(home, tmp_path)
    assert outcome["state"] == "failed"
    assert outcome["is_final"], "another machine would get the same"
    assert "could not be downloaded from the Hub" in str(outcome["reason"])
    assert ("sha256" if how == "wrong bytes" else "HTTP 404") in str(outcome["reason"])
    kinds = [event["kind"] for event in events_of(home, tmp_path)]
    assert "phase_started" not in kinds, "the trainer never began"
    assert not (tmp_path / "store/runs" / done.run.id / "metrics.jsonl").exists()
    (line,) = home.ledger.lines(done.run.id)
    assert (line.state, line.billing) == ("gone", "no")
    assert marked_now(home) == []


@pytest.mark.slow
def test_a_resumed_run_downloads_the_weights_from_the_hub_again(run: Run, hub: Hub, home: Home, tmp_path: Path) -> None:
    hub.cuts = [("/cdn/", 100_000)]
    first = launch(make_draft(home, tmp_path, steps=10_000), home)
    assert wait_until(lambda: _step(home) >= 5, timeout_s=60, every_s=0.1, world=home.world)
    ask_to_stop(home, first.run)
    wait_for_stop(home, first.run, timeout_s=60)
    list(watch(home, first.run, every_s=1))
    asked = len(_bodies(hub))
    assert asked == 3, "two files, one of them after a broken line"
    again = launch(make_draft(home, tmp_path, resume=True, steps=12), home)
    list(watch(home, again.run, every_s=1))
    assert len(_bodies(hub)) == asked + 2
    assert outcome_of(home, tmp_path)["state"] == "done"


def _bodies(hub: Hub) -> list[str]:
    return [path for method, path, _, _ in hub.seen if method == "GET" and path.startswith("/cdn/")]


def _step(home: Home) -> int:
    reports = look(home, home.ledger.find("moss")).reports
    return (reports.heartbeat.step or 0) if reports and reports.heartbeat else 0
