from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.contracts.stores import StoreContract

from homing.errors import StoreError, UsageError
from homing.store import FileStore, NotInStore, Store, open_store
from homing.world import World


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"file:{tmp_path}/store", World())

    @pytest.fixture
    def unreachable(self, tmp_path: Path) -> Store:
        store = open_store(f"file:{tmp_path}/store", World())
        store.put_bytes("k", b"x")
        (tmp_path / "store").rename(tmp_path / "moved")
        return store


def test_opening_touches_nothing_and_the_first_write_makes_the_folder(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}/new/store", World())
    assert not (tmp_path / "new").exists()
    with pytest.raises(StoreError, match="cannot be reached"):
        store.list("")
    assert not (tmp_path / "new").exists()
    store.put_bytes("k", b"x")
    assert (tmp_path / "new/store/k").read_bytes() == b"x"


def test_a_store_that_is_not_to_be_made_is_not_made(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}/gone", World(), create=False)
    with pytest.raises(StoreError, match="cannot be reached"):
        store.put_bytes("k", b"x")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("url", "root"),
    [("file:/a/b", "/a/b"), ("file:///a/b", "/a/b"), ("file:rel/x", f"{os.getcwd()}/rel/x")],
)
def test_a_file_url_becomes_an_absolute_folder(url: str, root: str) -> None:
    store = open_store(url, World())
    assert isinstance(store, FileStore)
    assert store.root == root
    assert store.url == f"file:{root}"


@pytest.mark.parametrize("url", ["ftp://x", "/just/a/path", "", "file:", "file:///", "gopher:x", "s3:", "hf:"])
def test_an_unknown_scheme_is_refused_with_what_is_supported(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url, World())
    assert "file:/path/to/folder" in str(caught.value)


def test_a_killed_write_is_never_listed(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}/store", World())
    store.put_bytes("runs/a/k", b"x")
    (tmp_path / "store/runs/a/k.tmp-77-0a1b2c3d").write_bytes(b"half")
    assert [entry.key for entry in store.list("runs/")] == ["runs/a/k"]


def test_a_full_or_forbidden_disk_is_a_store_error(tmp_path: Path) -> None:
    class FullWorld(World):
        def write(self, path: object, data: bytes, mode: int = 0o644) -> None:
            raise OSError(28, "No space left on device")

    store = FileStore(str(tmp_path / "store"), FullWorld())
    with pytest.raises(StoreError, match="No space left"):
        store.put_bytes("k", b"x")


def test_what_killed_writers_left_is_swept_once_it_is_old(tmp_path: Path) -> None:
    open_store(f"file:{tmp_path}/store", World()).put_bytes("runs/a/k", b"x")
    folder = tmp_path / "store/runs/a"
    for name in ("k.tmp-77-0a1b2c3d", "k.tmp-78-0a1b2c3e", "old.json"):
        (folder / name).write_bytes(b"half")
    for name in ("k.tmp-77-0a1b2c3d", "old.json"):
        os.utime(folder / name, (1.0, 1.0))
    open_store(f"file:{tmp_path}/store", World()).put_bytes("runs/a/k", b"y")
    assert sorted(path.name for path in folder.iterdir()) == ["k", "k.tmp-78-0a1b2c3e", "old.json"]


def test_a_file_that_cannot_be_looked_at_is_not_taken_for_absent(tmp_path: Path) -> None:
    class Ill(World):
        def size(self, path: object) -> int:
            raise OSError(errno.EIO, "input/output error")

    open_store(f"file:{tmp_path}/store", World()).put_bytes("k", b"x")
    store = open_store(f"file:{tmp_path}/store", Ill())
    for ask in (store.exists, store.read, store.sha256):
        with pytest.raises(StoreError) as raised:
            ask("k")
        assert not isinstance(raised.value, NotInStore)


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file:{tmp_path}/store", World())
    store.put_bytes("k", b"x")

    def ill(path: object) -> object:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "scandir", ill)
    with pytest.raises(StoreError, match="could not be listed"):
        store.list("")
