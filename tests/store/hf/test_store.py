"""A repository on the Hub is a store: the contract, races by parent commit, and tokens that will not do."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.contracts.stores import StoreContract, push_a_growing_log
from tests.doubles import hub as hub_double
from tests.doubles.hub import READ, STRANGER, WRITE, File, Hub
from tests.doubles.s3_servers import free_port
from tests.doubles.toy_world import Hasty

from homing.api.data.download_input_files import bring_file
from homing.errors import StoreError, UsageError
from homing.pip_command import pip_install
from homing.store import NotInStore, Store, open_store
from homing.world import World

# Of the SDK's own HTTP library, about how the SDK calls it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def store(hub: Hub) -> Store:
    hub.add("me/runs")
    return open_store("hf:me/runs", World(), create=False)


class TestHub(StoreContract):
    @pytest.fixture
    def store(self, hub: Hub) -> Store:
        return open_store("hf:me/runs", World())

    @pytest.fixture
    def unreachable(self, monkeypatch: pytest.MonkeyPatch, hub_without_waiting: None) -> Store:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("HF_TOKEN", WRITE)
        return open_store("hf:me/runs", Hasty(), create=False)

    def test_list_gives_every_key_with_the_prefix_sorted(self, store: Store) -> None:
        store.put_bytes("first", b"")  # the repository is made by the first write
        store.delete("first")
        super().test_list_gives_every_key_with_the_prefix_sorted(store)


@pytest.mark.acceptance(41, 133)
def test_the_first_write_makes_a_private_repository(hub: Hub) -> None:
    open_store("hf:datasets/me/new", World()).put_bytes("k", b"1")
    assert hub.repos[("dataset", "me/new")].is_private


@pytest.mark.acceptance(23, 31, "X17")
def test_text_of_a_public_dataset_is_brought_without_a_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/corpus", "dataset", is_private=False)
    open_store("hf:datasets/me/corpus", World()).put_bytes("en/train.jsonl", b'{"text": "the cat"}\n')
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    hub.seen.clear()
    brought = bring_file("hf:datasets/me/corpus/en/train.jsonl", tmp_path / "here")
    assert Path(brought).read_bytes() == b'{"text": "the cat"}\n'
    assert {token for _, _, token, _ in hub.seen} == {""}


def test_a_repository_that_is_gone_is_not_made_anew_by_an_instance(hub: Hub) -> None:
    store = open_store("hf:me/gone", World(), create=False)
    for call in (lambda: store.put_bytes("k", b""), lambda: store.exists("k"), lambda: store.list("")):
        with pytest.raises(StoreError, match="me/gone") as caught:
            call()
        assert not isinstance(caught.value, NotInStore)
    assert hub.repos == {}


def test_many_files_are_one_commit(hub: Hub, store: Store, tmp_path: Path) -> None:
    files = []
    for number in range(7):
        path = tmp_path / f"{number}"
        path.write_bytes(bytes([number]) * (200_000 if number == 3 else 10))
        files.append((f"runs/a/{number}", str(path)))
    before = len(hub.repos[("model", "me/runs")].commits)
    entries = store.put_many(files)
    assert len(hub.repos[("model", "me/runs")].commits) == before + 1
    assert [entry.sha256 for entry in entries] == [hashlib.sha256(Path(p).read_bytes()).hexdigest() for _, p in files]
    assert [entry.key for entry in store.list("runs/a/")] == [key for key, _ in files], "more than a page"
    store.delete_many([key for key, _ in files])
    assert len(hub.repos[("model", "me/runs")].commits) == before + 2
    assert store.list("") == []


@pytest.mark.regression("hub-xet")
def test_large_files_take_the_same_way_in_the_tests_as_in_a_real_run(hub: Hub, tmp_path: Path) -> None:
    """hf-xet is installed, as it is with the extra `hub`, and nothing here turns it off."""
    assert importlib.util.find_spec("hf_xet") is not None
    (tmp_path / "big").write_bytes(bytes(range(256)) * 2000)
    store = open_store("hf:me/runs", World())
    store.put("big", str(tmp_path / "big"))
    assert constants.HF_HUB_DISABLE_XET
    assert not any("xet" in path for _, path, _, _ in hub.seen)


def test_a_large_file_is_read_in_ranges_of_one_commit_and_its_place_never_sees_the_token(
    hub: Hub, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.store.hf.store._PIECE", 100_000)
    data = bytes(range(256)) * 2000
    (tmp_path / "big").write_bytes(data)
    entry = store.put("big", str(tmp_path / "big"))
    seen: list[int] = []

    def replace(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 2:
            open_store("hf:me/runs", World()).put_bytes("big", b"other")

    assert store.exists("big"), "asked of the Hub, not of where its bytes lie"
    store.progress = replace
    store.get("big", str(tmp_path / "back"), entry.sha256)
    assert (tmp_path / "back").read_bytes() == data
    assert len(seen) == 6
    assert hub.leaks == []


def test_a_growing_log_is_pushed_as_it_was(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.store.hf.store._IN_MEMORY", 10)
    push_a_growing_log(store, tmp_path, monkeypatch)


def test_a_commit_by_another_in_between_is_seen_and_tried_again(hub: Hub, store: Store) -> None:
    repo = hub.repos[("model", "me/runs")]

    def other() -> None:
        repo.commits.append(hub_double.Commit("f" * 40, "another writer", {**repo.head.files, "x": File(b"x", False)}))

    hub.before_commit = other
    assert store.create_if_absent("lease", b"mine")
    assert [commit.title for commit in repo.commits].count("another writer") == 1
    assert store.read("x") == b"x"


def test_the_same_bytes_by_another_in_between_are_not_ours(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK skips a commit that would change nothing and answers as if it had been made."""
    real, calls = store.exists, []

    def exists(key: str, revision: str = "main") -> bool:
        found = real(key, revision)  # type: ignore[call-arg]
        if not calls:
            calls.append(key)
            assert open_store("hf:me/runs", World()).create_if_absent("lease", b"same")
        return found

    monkeypatch.setattr(store, "exists", exists)
    assert not store.create_if_absent("lease", b"same")


def test_a_lost_answer_is_found_out(hub: Hub, store: Store) -> None:
    hub.lose_answers = ["/commit/"]
    assert store.create_if_absent("lease", b"mine")
    hub.lose_answers = ["/commit/"]
    store.put_bytes("k", b"1")
    assert store.read("k") == b"1"


@pytest.mark.parametrize("part", ["/preupload/", "/commit/", "/resolve/", "/tree/"])
def test_a_burst_of_503_is_waited_out(hub: Hub, part: str) -> None:
    hub.add("me/runs")
    store = open_store("hf:me/runs", Hasty())
    hub.failures = [(part, 503)] * 2
    store.put_bytes("k", b"1")
    assert store.read("k") == b"1"
    assert len(store.list("")) == 1
    assert hub.failures == []


def test_an_upload_refused_by_the_hub_is_reported(hub: Hub, tmp_path: Path) -> None:
    hub.add("me/runs")
    (tmp_path / "big").write_bytes(b"x" * 200_000)
    hub.failures = [("/lfs/", 403)]
    with pytest.raises(StoreError, match="could not be pushed") as caught:
        open_store("hf:me/runs", Hasty()).put("big", str(tmp_path / "big"))
    assert "no write access" in caught.value.why


@pytest.mark.acceptance(31, 41)
def test_a_read_only_token_is_reported_and_masked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("me/runs")
    monkeypatch.setenv("HF_TOKEN", READ)
    store = open_store("hf:me/runs", World())
    assert store.list("") == []
    for call in (lambda: store.put_bytes("k", b""), lambda: store.create_if_absent("k", b"")):
        with pytest.raises(StoreError) as caught:
            call()
        assert "no write access" in caught.value.why
        assert "HF_TOKEN, hf_...ad" in caught.value.why
        assert READ not in str(caught.value)
        assert "write access" in caught.value.fix
    monkeypatch.setenv("HUGGINGFACEHUB_API_TOKEN", WRITE)
    hub.seen.clear()
    open_store("hf:me/runs", World()).put_bytes("k", b"1")
    assert {token for _, _, token, _ in hub.seen} == {f"Bearer {WRITE}"}, "of two, this one"


@pytest.mark.parametrize(
    ("token", "says"), [(STRANGER, "cannot see"), ("", "there is no token"), ("hf_nonsense0000", "cannot see")]
)
def test_missing_permission_for_a_private_repository_is_reported(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str, says: str
) -> None:
    hub.add("me/runs")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", str(tmp_path / "absent"))
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN")
    store = open_store("hf:me/runs", World(), create=False)
    for call in (lambda: store.list(""), lambda: store.exists("k"), lambda: store.read("k")):
        with pytest.raises(StoreError, match="me/runs") as caught:
            call()
        assert says in caught.value.why
        assert not isinstance(caught.value, NotInStore)


def test_a_gated_repository_says_where_to_ask(hub: Hub) -> None:
    hub.add("them/model", is_private=False, is_gated=True)
    with pytest.raises(StoreError, match="them/model") as caught:
        open_store("hf:them/model", World(), create=False).list("")
    assert "gated, and the token of HF_TOKEN, hf_...te, has no access" in caught.value.why


@pytest.mark.acceptance(31)
@pytest.mark.parametrize("has_token", [True, False])
def test_a_hub_that_asks_to_slow_down_says_whom(hub: Hub, monkeypatch: pytest.MonkeyPatch, has_token: bool) -> None:
    hub.add("them/model", is_private=False)
    if not has_token:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    hub.failures = [("/api/models/them/model", 429)] * 20
    with pytest.raises(StoreError, match="them/model") as caught:
        open_store("hf:them/model", Hasty(), create=False).list("")
    messages = "the token of HF_TOKEN, hf_...te," if has_token else "no token"
    assert f"in an hour, using {messages}".rstrip(",") in caught.value.why
    assert ("hf auth login" in caught.value.fix) is not has_token


@pytest.mark.parametrize("url", ["hf:me", "hf:/me//x", "hf:datasets/me", "hf:me/a b", "hf:me/x/../y"])
def test_an_address_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="does not name a repository"):
        open_store(url, World())


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError) as caught:
        open_store("hf:me/x", World()).list("")
    assert pip_install("hub") in caught.value.fix
