"""The sync program: fetch, watch, once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
from pathlib import Path

import pytest
from tests.doubles.trainer import write_checkpoint

from homing.store import Store, open_store
from homing.store import sync as sync_module
from homing.store.read_lease import lease_key
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, Bootstrap, EndBilling, Input
from homing.wire.control_files import Request
from homing.wire.event_lines import Event
from homing.wire.run_record import Lease
from homing.world import World


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(f"file:{tmp_path}/store", World())
    store.put_bytes("marker", b"")
    return store


@pytest.fixture
def boot(tmp_path: Path, store: Store) -> Boot:
    (tmp_path / "work/run").mkdir(parents=True)
    boot = Boot(
        run_id="amber-1", run_name="amber", mark="m", attempt=1, work_dir=str(tmp_path / "work"), store=store.url,
        inputs=[], trainer_argv=[], sync_argv=[], end_billing=EndBilling(kind="command", argv=["true"]), started_at=0.0,
        rate_usd_per_hour="1", spent_before_usd="0", spend_limit_usd=None, time_limit_s=0.0, idle_limit_s=0.0,
        stall_factor=0.0, heartbeat_s=0.05,
    )  # fmt: skip
    return boot


def run_sync(boot: Boot, flag: str, world: World | None = None) -> int:
    path = Path(boot.work_dir) / file_names.BOOT
    path.write_text(codec.dumps(boot))
    return sync_module.main(["--boot", str(path), flag], world)


def with_inputs(boot: Boot, store: Store, **files: bytes) -> Boot:
    inputs = []
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        store.put_bytes(f"objects/{digest}", data)
        inputs.append(Input(f"objects/{digest}", f"data/{name}", len(data), digest))
    return dataclasses.replace(boot, inputs=inputs)


def kinds(boot: Boot) -> list[str]:
    path = Path(boot.work_dir) / "run" / file_names.EVENTS
    return [codec.loads(Event, line).kind for line in path.read_text().splitlines()] if path.exists() else []


def test_fetch_brings_every_input_and_leaves_right_ones_alone(boot: Boot, store: Store) -> None:
    boot = with_inputs(boot, store, a=b"aaa", b=b"bbb")
    assert run_sync(boot, "--fetch") == 0
    assert (Path(boot.work_dir) / "data/b").read_bytes() == b"bbb"
    before = (Path(boot.work_dir) / "data/a").stat().st_mtime_ns
    (Path(boot.work_dir) / "data/b").write_bytes(b"bad")
    assert run_sync(boot, "--fetch") == 0
    assert (Path(boot.work_dir) / "data/a").stat().st_mtime_ns == before
    assert (Path(boot.work_dir) / "data/b").read_bytes() == b"bbb"
    assert kinds(boot) == ["input_fetched"] * 3


@pytest.mark.acceptance(72)
def test_what_an_earlier_instance_here_fetched_is_not_fetched_again_unless_it_is_damaged(
    boot: Boot, store: Store, tmp_path: Path
) -> None:
    boot = with_inputs(boot, store, shard=b"tokens")
    boot = dataclasses.replace(boot, bootstrap=Bootstrap(inputs_dir=str(tmp_path / "cache")))
    (kept,) = (tmp_path / "cache" / item.sha256 for item in boot.inputs)
    assert run_sync(boot, "--fetch") == 0
    assert kept.read_bytes() == b"tokens"
    later = dataclasses.replace(boot, work_dir=str(tmp_path / "later"))
    (tmp_path / "later").mkdir()
    store.delete(boot.inputs[0].key)  # so that it can only come from the cache
    assert run_sync(later, "--fetch") == 0
    assert (tmp_path / "later/data/shard").read_bytes() == b"tokens"
    store.put_bytes(boot.inputs[0].key, b"tokens")
    kept.unlink()
    kept.write_bytes(b"tokenz")
    last = dataclasses.replace(boot, work_dir=str(tmp_path / "last"))
    (tmp_path / "last").mkdir()
    assert run_sync(last, "--fetch") == 0
    assert (tmp_path / "last/data/shard").read_bytes() == b"tokens"
    assert kept.read_bytes() == b"tokens"


def test_fetch_of_a_damaged_or_missing_object_exits_7_and_leaves_nothing(boot: Boot, store: Store) -> None:
    boot = with_inputs(boot, store, a=b"aaa")
    store.put_bytes(boot.inputs[0].key, b"flipped")
    assert run_sync(boot, "--fetch") == 7
    store.delete(boot.inputs[0].key)
    assert run_sync(boot, "--fetch") == 7
    assert list((Path(boot.work_dir) / "data").iterdir()) == []


def test_an_input_that_is_not_in_the_store_is_asked_for_three_times_and_then_ends_the_run(
    boot: Boot, store: Store
) -> None:
    boot = with_inputs(boot, store, a=b"aaa", b=b"bbb")
    asked: list[float] = []

    class Waiting(World):
        def sleep(self, seconds: float) -> None:
            asked.append(seconds)
            if is_late:
                store.put_bytes(boot.inputs[1].key, b"bbb")

    store.delete(boot.inputs[1].key)
    is_late = False
    assert run_sync(boot, "--fetch", Waiting()) == 7
    assert asked == [0.1, 0.2], "three times, with growing pauses"
    path = Path(boot.work_dir) / "run" / file_names.EVENTS
    (messages,) = [
        event for line in path.read_text().splitlines() if (event := codec.loads(Event, line)).data.get("stops")
    ]
    assert (messages.kind, messages.data["stops"]) == ("input_missing", boot.mark)
    assert messages.text.startswith(f"Cannot fetch data/b: {boot.inputs[1].key} is not in {store.url} (try 3 of 3).")
    assert "homing launch amber-1 --resume" in messages.text
    is_late = True
    assert run_sync(boot, "--fetch", Waiting()) == 0, "one that comes late is taken"
    assert kinds(boot).count("input_missing") == 1


def test_a_half_done_fetch_is_finished_and_a_history_is_brought_only_once(boot: Boot, store: Store) -> None:
    run_dir = Path(boot.work_dir) / "run"
    boot = with_inputs(boot, store, shard=b"aaa", old=b'{"old": 1}\n', weights=b"www")
    moved = ["data/shard", f"run/{file_names.EVENTS}", "run/checkpoints/pretrain/step-00000010/model.safetensors"]
    boot = dataclasses.replace(
        boot, inputs=[dataclasses.replace(i, path=p) for i, p in zip(boot.inputs, moved, strict=True)]
    )
    (run_dir / file_names.EVENTS).write_text('{"begun": 1}\n')
    weights = store.read(boot.inputs[2].key)
    store.delete(boot.inputs[2].key)
    assert run_sync(boot, "--fetch") == 7  # the last one is not there: the fetch is not done
    store.put_bytes(boot.inputs[2].key, weights)
    assert run_sync(boot, "--fetch") == 0
    lines = (run_dir / file_names.EVENTS).read_text().splitlines()
    assert lines[0] == '{"old": 1}'
    assert len(lines) == len({*lines}) == 6  # old, begun, the one that was missing, and one for each input
    assert '{"begun": 1}' in lines
    # Later: the run has gone on, retention dropped the old checkpoint here and there, and a shard was lost.
    with open(run_dir / file_names.EVENTS, "a") as file:
        file.write('{"new": 1}\n')
    (run_dir.parent / moved[2]).unlink()
    store.delete(boot.inputs[2].key)
    (run_dir.parent / moved[0]).unlink()
    assert run_sync(boot, "--fetch") == 0
    assert '{"new": 1}' in (run_dir / file_names.EVENTS).read_text()
    assert not (run_dir.parent / moved[2]).exists()
    assert (run_dir.parent / moved[0]).read_bytes() == b"aaa"


def test_an_input_cannot_be_written_outside_the_work_folder(boot: Boot, store: Store, tmp_path: Path) -> None:
    boot = with_inputs(boot, store, a=b"aaa")
    boot = dataclasses.replace(boot, inputs=[dataclasses.replace(boot.inputs[0], path="../outside")])
    assert run_sync(boot, "--fetch") == 7
    assert not (tmp_path / "outside").exists()


def test_once_exits_0_only_when_everything_is_in_the_store(boot: Boot, store: Store, tmp_path: Path) -> None:
    run_dir = Path(boot.work_dir) / "run"
    write_checkpoint(run_dir, "pretrain", 10)
    (tmp_path / "store").rename(tmp_path / "away")
    assert run_sync(boot, "--once") == 7
    assert not (tmp_path / "store").exists()  # a store that is gone is not made anew
    assert "cannot be reached" in (run_dir / file_names.PUSHED).read_text()
    (tmp_path / "away").rename(tmp_path / "store")
    assert run_sync(boot, "--once") == 0
    assert store.exists("runs/amber-1/checkpoints/pretrain/step-00000010/manifest.json")


class Patient(World):
    """Ends the endless watch after N passes, and acts between them."""

    def __init__(self, *between: object) -> None:
        self.between = list(between)
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if not self.between:
            raise KeyboardInterrupt
        self.between.pop(0)()  # type: ignore[operator]


def test_watch_backs_off_while_the_store_is_down_and_resumes_when_it_returns(
    boot: Boot, store: Store, tmp_path: Path
) -> None:
    run_dir = Path(boot.work_dir) / "run"
    world = Patient(
        lambda: (tmp_path / "store").rename(tmp_path / "away"),
        lambda: write_checkpoint(run_dir, "pretrain", 10),
        lambda: None,
        lambda: (tmp_path / "away").rename(tmp_path / "store"),
    )
    with pytest.raises(KeyboardInterrupt):
        run_sync(boot, "--watch", world)
    refused = ["store_refuses"] * 2  # at the first and the second of three tries
    assert kinds(boot) == ["push_failing", *refused, "checkpoint_pushed", "push_recovered"]
    assert world.slept == [0.05, 0.1, 0.2, 0.4, 0.05]
    assert store.exists("runs/amber-1/checkpoints/pretrain/step-00000010/manifest.json")


def test_watch_brings_requests_down_and_never_pushes_them_back(boot: Boot, store: Store) -> None:
    local = Path(boot.work_dir) / "run" / file_names.REQUEST
    request = codec.dumps(Request(serial=3, stop=True)).encode()
    world = Patient(lambda: store.put_bytes("runs/amber-1/request.json", request), lambda: local.write_bytes(b"old"))
    with pytest.raises(KeyboardInterrupt):
        run_sync(boot, "--watch", world)
    assert local.read_bytes() == request
    assert store.read("runs/amber-1/request.json") == request


def test_an_unreadable_boot_file_is_reported_without_a_traceback(tmp_path: Path) -> None:
    assert sync_module.main(["--boot", str(tmp_path / "absent.json"), "--once"]) == 7
    (tmp_path / "bad.json").write_text("{")
    assert sync_module.main(["--boot", str(tmp_path / "bad.json"), "--once"]) == 7


def test_while_checkpoints_are_fetched_none_is_dropped_from_the_store(boot: Boot, store: Store, tmp_path: Path) -> None:
    """The newest is here and the one before is on its way: that it is not here yet does not mean it was dropped."""
    run_dir, prefix = Path(boot.work_dir) / "run", "runs/amber-1/checkpoints/pretrain"
    for step in (10, 20):
        write_checkpoint(run_dir, "pretrain", step)
    assert run_sync(boot, "--once") == 0
    shutil.rmtree(run_dir / "checkpoints/pretrain/step-00000010")
    for flag in ("--watch", "--once"):
        with contextlib.suppress(KeyboardInterrupt):
            run_sync(boot, flag, Patient())
        assert store.exists(f"{prefix}/step-00000010/manifest.json"), flag
    assert run_sync(boot, "--fetch") == 0
    with pytest.raises(KeyboardInterrupt):
        run_sync(boot, "--watch", Patient())
    assert not store.exists(f"{prefix}/step-00000010/manifest.json")


def test_an_input_on_its_way_is_not_pushed_as_a_file_of_the_run(boot: Boot, store: Store) -> None:
    (Path(boot.work_dir) / "run/metrics.jsonl.part-0a1b2c3d").write_text("half")
    assert run_sync(boot, "--once") == 0
    assert [entry.key for entry in store.list("runs/") if "part" in entry.key] == []


def lease(store: Store, number: int, mark: str) -> None:
    body = Lease(number, "amber-1", "bbbbbb", "attic", mark, 1.0)
    store.put_bytes(lease_key("amber-1", number), codec.dumps(body).encode())


@pytest.mark.parametrize("flag", ["--fetch", "--watch", "--once"])
def test_an_instance_that_another_has_superseded_pushes_nothing_and_says_so(
    boot: Boot, store: Store, flag: str
) -> None:
    boot = dataclasses.replace(with_inputs(boot, store, a=b"aaa"), fence=1)
    write_checkpoint(Path(boot.work_dir) / "run", "pretrain", 10)
    lease(store, 1, "m")
    lease(store, 2, "another-owner")
    before = [entry.key for entry in store.list("")]
    assert run_sync(boot, flag) == file_names.EXIT_SUPERSEDED
    assert [entry.key for entry in store.list("")] == before
    assert kinds(boot) == ["superseded"]
    assert not (Path(boot.work_dir) / "data").exists()


def test_an_adoption_that_keeps_this_instance_changes_nothing_for_it(boot: Boot, store: Store) -> None:
    boot = dataclasses.replace(boot, fence=1)
    lease(store, 1, "m")
    lease(store, 2, "m")
    write_checkpoint(Path(boot.work_dir) / "run", "pretrain", 10)
    assert run_sync(boot, "--once") == 0
    lease(store, 3, "")
    assert run_sync(boot, "--once") == file_names.EXIT_SUPERSEDED


def test_an_unreadable_lease_supersedes_no_instance(boot: Boot, store: Store) -> None:
    boot = dataclasses.replace(with_inputs(boot, store, a=b"aaa"), fence=1)
    store.put_bytes(lease_key("amber-1", 2), b"{")
    assert run_sync(boot, "--fetch") == 0
    write_checkpoint(Path(boot.work_dir) / "run", "pretrain", 10)
    assert run_sync(boot, "--once") == 0


def test_a_watch_ends_when_it_is_superseded_in_its_midst(boot: Boot, store: Store) -> None:
    boot = dataclasses.replace(boot, fence=1)
    lease(store, 1, "m")

    class Adopts(World):
        def sleep(self, seconds: float) -> None:
            lease(store, 2, "another-owner")

    write_checkpoint(Path(boot.work_dir) / "run", "pretrain", 10)
    assert run_sync(boot, "--watch", Adopts()) == file_names.EXIT_SUPERSEDED
    assert kinds(boot) == ["checkpoint_pushed", "superseded"]
