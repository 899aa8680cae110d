"""A Modal Volume is a store: the contract at home, races decided in a Dict, and the mount that a sandbox sees."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from grpclib import Status
from tests.cloud.rig import homing
from tests.contracts.stores import StoreContract, push_a_growing_log
from tests.doubles import modal as modal_double
from tests.doubles.modal import TOKEN_ID, Fault, Modal
from tests.doubles.toy_world import Hasty
from tests.store.test_download_input_files import reads_of_bringing
from tests.store.test_verbs import there_and_back

from homing.cloud.launch.inputs import DryStore
from homing.errors import IntegrityError, StoreError, UsageError
from homing.store import NotInStore, Store, open_store, pace_of
from homing.store.modal.store import VolumeStore
from homing.store.preflight import TO_BE_CREATED, preflight, secrets
from homing.store.storage_price import kept
from homing.world import Completed, World


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Modal]:
    with modal_double.running(tmp_path_factory.mktemp("modal")) as modal:
        yield modal


@pytest.fixture
def modal(server: Modal, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modal]:
    """One server for the file, empty for each test."""
    modal_double.shorten_the_waits_of_the_sdk(monkeypatch)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.reset()


@pytest.fixture
def store(modal: Modal) -> VolumeStore:
    modal.add_volume("runs")
    return VolumeStore("modal:runs", Hasty(), create=False)


class TestVolume(StoreContract):
    @pytest.fixture
    def store(self, modal: Modal) -> Store:
        return open_store("modal:runs/here", World())

    @pytest.fixture
    def unreachable(self, modal: Modal) -> Store:
        modal.add_volume("runs")
        store = open_store("modal:runs", Hasty(), create=False)
        modal.faults.append(Fault("*", Status.UNAVAILABLE, times=10**6))
        return store


def test_a_deleted_volume_is_not_an_empty_store(modal: Modal, tmp_path: Path) -> None:
    store = open_store("modal:runs", Hasty())
    store.put_bytes("k", b"x")
    modal.volumes.clear()
    TestVolume().test_a_store_that_cannot_be_reached_raises_and_is_never_empty(store, tmp_path)


# --- what a Volume is ---


@pytest.mark.acceptance(39)
def test_the_first_write_makes_a_volume_of_version_2_and_reading_makes_none(modal: Modal) -> None:
    store = open_store("modal:new", Hasty())
    for call in (lambda: store.exists("k"), lambda: store.list(""), lambda: store.read("k")):
        with pytest.raises(StoreError, match="modal:new") as caught:
            call()
        assert not isinstance(caught.value, NotInStore)
    assert modal.volumes == {}
    store.put_bytes("k", b"1")
    assert modal.volume("new").version == 2


def test_a_dry_run_leaves_no_volume_behind(modal: Modal) -> None:
    dry = DryStore(open_store("modal:new", Hasty()))
    assert not dry.exists("objects/x")
    dry.create_if_absent("objects/x", b"1")
    assert modal.volumes == {}
    assert modal.dicts == {}


@pytest.mark.acceptance(39)
def test_a_volume_that_is_gone_is_not_made_anew_by_an_instance(modal: Modal) -> None:
    store = open_store("modal:gone", Hasty(), create=False)
    for call in (lambda: store.put_bytes("k", b""), lambda: store.create_if_absent("k", b""), lambda: store.list("")):
        with pytest.raises(StoreError, match="gone"):
            call()
    assert modal.volumes == {}


def test_a_volume_of_version_1_is_refused_because_a_sandbox_could_not_commit_to_it(modal: Modal) -> None:
    modal.add_volume("old", version=1)
    with pytest.raises(StoreError, match="modal:old") as caught:
        open_store("modal:old", Hasty()).list("")
    assert "v1" in caught.value.why


@pytest.mark.acceptance(39)
def test_a_large_file_of_many_blocks_comes_back_whole(
    store: VolumeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 40_000 + b"\0" * 9_000_000  # also blocks that end in zeros, which are not sent
    (tmp_path / "big").write_bytes(data)
    seen: list[tuple[int, int]] = []
    store.progress = lambda done, total: seen.append((done, total))
    entry = store.put("big", str(tmp_path / "big"))
    assert entry.sha256 == hashlib.sha256(data).hexdigest() == store.sha256("big")
    store.get("big", str(tmp_path / "back"), entry.sha256)
    assert (tmp_path / "back").read_bytes() == data
    assert seen[-1] == (len(data), len(data))


def test_a_file_that_is_brought_is_read_once(modal: Modal, tmp_path: Path) -> None:
    assert reads_of_bringing("modal:runs/en", tmp_path, lambda: modal.calls.count("VolumeGetFile2")) == [1, 1, 1]


def test_a_growing_log_is_pushed_as_it_was(store: VolumeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.store.modal.store._IN_MEMORY", 10)
    push_a_growing_log(store, tmp_path, monkeypatch)


def test_a_transfer_that_breaks_off_begins_anew(modal: Modal, store: VolumeStore, tmp_path: Path) -> None:
    store.put_bytes("k", b"whole")
    modal.faults.append(Fault("VolumeGetFile2", times=5))
    store.get("k", str(tmp_path / "k"), hashlib.sha256(b"whole").hexdigest())
    assert (tmp_path / "k").read_bytes() == b"whole"
    with pytest.raises(IntegrityError):
        store.get("k", str(tmp_path / "k"), "0" * 64)


def test_a_full_disk_here_is_not_called_a_silent_modal(
    modal: Modal, store: VolumeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_bytes("k", b"1")

    def append(self: World, path: Any, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(World, "append", append)
    with pytest.raises(StoreError, match="on this computer") as caught:
        store.get("k", str(tmp_path / "k"))
    assert "No space left" in caught.value.why
    assert modal.calls.count("VolumeGetFile2") == 1, "asked once"
    assert list(tmp_path.glob("k*")) == []


@pytest.mark.parametrize("method", ["VolumePutFiles2", "VolumeListFiles2", "VolumeGetFile2", "VolumeRemoveFile2"])
@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED])
def test_a_burst_of_errors_is_waited_out(modal: Modal, store: VolumeStore, method: str, status: Status) -> None:
    modal.faults.append(Fault(method, status, times=2))
    store.put_bytes("k", b"1")
    assert store.read("k") == b"1"
    assert len(store.list("")) == 1
    store.delete("k")
    assert store.list("") == []


def test_a_lost_reply_of_a_delete_is_a_delete(modal: Modal, store: VolumeStore) -> None:
    store.put_bytes("k", b"1")
    modal.faults.append(Fault("VolumeRemoveFile2", is_after=True))
    store.delete("k")
    assert not store.exists("k")


@pytest.mark.acceptance(40)
def test_homing_store_works_with_a_volume(
    modal: Modal, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modal.add_volume("runs")
    there_and_back(lambda *argv: homing(capsys, monkeypatch, *argv), "modal:runs/x", tmp_path)


# --- an exclusive write ---


def test_a_claim_of_a_dead_winner_is_finished_by_the_next_process(modal: Modal, store: VolumeStore) -> None:
    """Killed between the Dict and the Volume: the place is taken, and what belongs there must come to be there."""
    modal.volume("runs").write("lease.part-0123abcd", b"of the dead")
    assert store._claim("lease", "lease.part-0123abcd", "lease")
    assert not store.exists("lease")
    assert not VolumeStore("modal:runs", Hasty()).create_if_absent("lease", b"mine")
    assert store.read("lease") == b"of the dead"


@pytest.mark.parametrize("method", ["DictUpdate", "VolumeCopyFiles2", "VolumePutFiles2"])
def test_a_lost_reply_is_distinguished_from_a_lost_race(modal: Modal, store: VolumeStore, method: str) -> None:
    modal.faults.append(Fault(method, is_after=True))
    assert store.create_if_absent("lease", b"mine")
    assert store.read("lease") == b"mine"
    assert not store.create_if_absent("lease", b"late")


def test_what_was_deleted_can_be_created_again_from_home_and_after_a_sandbox_deleted_it(
    modal: Modal, store: VolumeStore
) -> None:
    assert store.create_if_absent("k", b"1")
    store.delete("k")
    assert store.create_if_absent("k", b"2")
    del modal.volume("runs").files["k"]  # by a sandbox, which cannot reach the Dict
    assert store.create_if_absent("k", b"3")
    assert store.read("k") == b"3"


def test_a_delete_that_was_killed_half_way_leaves_one_file_and_no_second_winner(
    modal: Modal, store: VolumeStore
) -> None:
    assert store.create_if_absent("k", b"1")
    store._withdraw("k", "k")
    assert not store.create_if_absent("k", b"2")
    assert store.read("k") == b"1"


def test_nothing_but_keys_is_left_behind(modal: Modal, store: VolumeStore) -> None:
    store.create_if_absent("a/lease", b"1")
    store.create_if_absent("a/lease", b"2")
    assert set(modal.volume("runs").files) == {"a/lease"}
    modal.volume("runs").write("a/x.part-0123abcd", b"of a killed writer")
    assert [entry.key for entry in store.list("")] == ["a/lease"]


# --- what a sandbox sees ---


class Committed(World):
    """`sync` on a mount, noted; it fails where configured."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[list[str]] = []
        self.code = 0

    def run(self, argv: Sequence[str], timeout_s: float, *rest: Any, **named: Any) -> Completed:
        self.commits.append(list(argv))
        return Completed(self.code, "", "cannot commit" if self.code else "")


class TestMount(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        (tmp_path / "mount" / "here").mkdir(parents=True)
        return open_store(f"modal:runs/here?mount={tmp_path}/mount", Committed(), create=False)

    @pytest.fixture
    def unreachable(self, tmp_path: Path) -> Store:
        return open_store(f"modal:runs?mount={tmp_path}/none", Committed(), create=False)

    def test_one_of_many_creates_what_is_absent(self, store: Store) -> None:
        with pytest.raises(StoreError, match="cannot be created safely"):
            store.create_if_absent("lease", b"1")


def test_every_write_in_a_sandbox_is_committed_once(tmp_path: Path) -> None:
    world = Committed()
    store = open_store(f"modal:runs?mount={tmp_path}", world, create=False)
    assert store.url == "modal:runs", "the same place, by the same name, as from home"
    (tmp_path / "source").write_bytes(b"x")
    sync = ["sync", str(tmp_path)]
    store.put_many([(f"runs/{number}", str(tmp_path / "source")) for number in range(5)])
    assert world.commits == [sync]
    store.put_bytes("k", b"1")
    store.delete_many(["k", "runs/0"])
    assert world.commits == [sync] * 3
    store.read("runs/1")
    store.list("")
    assert len(world.commits) == 3


def test_a_write_that_was_not_committed_is_no_write(tmp_path: Path) -> None:
    world = Committed()
    store = open_store(f"modal:runs?mount={tmp_path}", world, create=False)
    world.code = 1
    for call in (lambda: store.put_bytes("k", b"1"), lambda: store.delete("k")):
        with pytest.raises(StoreError, match="not committed") as caught:
            call()
        assert "cannot commit" in caught.value.why


def test_the_mount_needs_no_sdk_and_no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    monkeypatch.delenv("MODAL_TOKEN_ID", raising=False)
    store = open_store(f"modal:runs?mount={tmp_path}", Committed(), create=False)
    store.put_bytes("k", b"1")
    assert store.read("k") == b"1"


# --- what else a store says of itself ---


def test_preflight_tries_it_out_and_leaves_nothing(modal: Modal) -> None:
    notes = preflight("modal:new/p", Hasty())
    assert "creating " in notes[0]
    assert TOKEN_ID not in notes[0]
    assert modal.volume("new").files == {}
    assert "is reachable with" in preflight("modal:new/p", Hasty())[0]


def test_preflight_without_writing_makes_nothing(modal: Modal) -> None:
    assert TO_BE_CREATED in preflight("modal:new", Hasty(), needs_write=False)[0]
    assert modal.volumes == {}
    with pytest.raises(StoreError, match="modal:new"):
        preflight("modal:new", Hasty(), create=False)
    assert modal.volumes == {}


def test_a_wrong_token_is_reported_and_masked(modal: Modal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-wrong0token")
    with pytest.raises(StoreError) as caught:
        preflight("modal:runs", Hasty())
    assert "ak-wrong0token" not in str(caught.value)
    assert "ak-...en" in caught.value.fix


def test_a_missing_extra_and_a_missing_account_are_named(
    modal: Modal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "modal", None)
        with pytest.raises(UsageError, match="extra `modal`"):
            open_store("modal:runs", World()).list("")
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="No Modal account"):
        open_store("modal:runs", World()).list("")


@pytest.mark.parametrize(
    "url", ["modal:", "modal:a b", "modal:runs/../x", "modal:runs//x", "modal:" + "x" * 51, "modal:runs?mount=here"]
)
def test_an_address_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url, World())


def test_the_token_is_handed_over_only_where_nothing_is_mounted() -> None:
    environment = {"MODAL_TOKEN_ID": "a", "MODAL_TOKEN_SECRET": "b", "AWS_ACCESS_KEY_ID": "c"}
    assert set(secrets("modal:runs", environment)) == {"MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"}
    assert secrets("modal:runs?mount=/m", environment) == {}


@pytest.mark.acceptance(139)
def test_a_volume_shows_its_price_by_the_gib() -> None:
    found = kept("modal:runs", 100 * 2**30)
    assert found.usd_per_month == Decimal("9")
    assert "GiB" in str(found)


def test_it_is_written_to_at_a_pace_of_its_own() -> None:
    assert pace_of("modal:runs") == VolumeStore.pace_s
