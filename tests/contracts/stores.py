"""What every store promises. A new store passes by subclassing and giving two fixtures, `store` and `unreachable`."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from homing.errors import IntegrityError, StoreError
from homing.store.base import NotInStore, Store
from homing.world import World

BAD_KEYS = ["", "/etc/passwd", "../up", "a/../b", "a//b", "a/./b", "a/", "a\\b", "a\0b", "a\nb", "a.tmp-12-0123abcd"]


def push_a_growing_log(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a store that copies a large file first: what is written meanwhile belongs to the next push."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 200_000)
    real = World.copy

    def copy(self: World, source: Any, target: Any) -> str:
        digest = real(self, source, target)
        with open(path, "ab") as file:
            file.write(b"more")
        return digest

    monkeypatch.setattr(World, "copy", copy)
    entry = store.put("m", str(path))
    assert entry.num_bytes == 200_000
    assert store.sha256("m") == entry.sha256
    assert list(tmp_path.iterdir()) == [path]


class StoreContract:
    @pytest.fixture
    def store(self) -> Store:
        """An empty store that may be written to."""
        raise AssertionError("a subclass gives the store")

    @pytest.fixture
    def unreachable(self) -> Store:
        """A store that was there and now cannot be reached."""
        raise AssertionError("a subclass gives the store")

    def test_what_was_put_is_read_back_with_its_hash(self, store: Store, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"x" * 3_000_000)
        entry = store.put("runs/a/big", str(source))
        assert entry.num_bytes == 3_000_000
        assert entry.sha256 == hashlib.sha256(source.read_bytes()).hexdigest() == store.sha256("runs/a/big")
        store.get("runs/a/big", str(tmp_path / "back"), entry.sha256)
        assert (tmp_path / "back").read_bytes() == source.read_bytes()

    def test_put_replaces_and_put_bytes_is_the_same_put(self, store: Store) -> None:
        store.put_bytes("k", b"one")
        store.put_bytes("k", b"two")
        assert store.read("k") == b"two"
        assert [(e.key, e.num_bytes) for e in store.list("")] == [("k", 3)]

    def test_get_with_another_hash_leaves_the_target_as_it_was(self, store: Store, tmp_path: Path) -> None:
        store.put_bytes("k", b"damaged")
        target = tmp_path / "target"
        with pytest.raises(IntegrityError, match="is corrupt"):
            store.get("k", str(target), "0" * 64)
        assert list(tmp_path.glob("target*")) == []
        target.write_bytes(b"good")
        with pytest.raises(IntegrityError):
            store.get("k", str(target), "0" * 64)
        assert target.read_bytes() == b"good"
        assert list(tmp_path.glob("target*")) == [target]

    def test_an_absent_key_is_distinguished_from_a_failing_store(self, store: Store, tmp_path: Path) -> None:
        store.put_bytes("other", b"")
        assert not store.exists("k")
        for call in (lambda: store.read("k"), lambda: store.sha256("k"), lambda: store.get("k", str(tmp_path / "t"))):
            with pytest.raises(NotInStore) as caught:
                call()
            assert caught.value.exit_code == 7
            assert caught.value.fix
        assert not (tmp_path / "t").exists()

    def test_a_file_here_is_the_same_only_with_the_same_bytes(self, store: Store, tmp_path: Path) -> None:
        store.put_bytes("runs/k", b"x" * 3_000)
        here = tmp_path / "here"
        for data, is_same in ((b"x" * 3_000, True), (b"x" * 2_999 + b"y", False), (b"x" * 2_999, False), (b"", False)):
            here.write_bytes(data)
            assert store.is_same("runs/k", str(here)) is is_same
            assert here.read_bytes() == data
        with pytest.raises(NotInStore):
            store.is_same("runs/other", str(here))

    def test_list_gives_every_key_with_the_prefix_sorted(self, store: Store) -> None:
        for key in ("runs/b/2", "runs/a/1", "runs/ab", "objects/x", "runs/a/deep/3"):
            store.put_bytes(key, key.encode())
        assert [e.key for e in store.list("runs/a/")] == ["runs/a/1", "runs/a/deep/3"]
        assert [e.key for e in store.list("runs/a")] == ["runs/a/1", "runs/a/deep/3", "runs/ab"]
        assert len(store.list("")) == 5
        assert store.list("nothing/here") == []
        assert {e.num_bytes for e in store.list("objects/")} == {len("objects/x")}

    def test_delete_is_done_when_the_key_is_gone_already(self, store: Store) -> None:
        store.put_bytes("a/k", b"x")
        store.delete("a/k")
        store.delete("a/k")
        assert not store.exists("a/k")
        assert store.list("a/") == []

    def test_one_of_many_creates_what_is_absent(self, store: Store) -> None:
        won: list[int] = []
        barrier = threading.Barrier(8)

        def race(number: int) -> None:
            barrier.wait()
            if store.create_if_absent("lease", str(number).encode()):
                won.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.read("lease") == str(won[0]).encode()
        assert not store.create_if_absent("lease", b"late")

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_key_that_could_leave_the_store_is_refused(self, store: Store, key: str, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"x")
        for call in (
            lambda: store.put(key, str(source)),
            lambda: store.put_bytes(key, b"x"),
            lambda: store.read(key),
            lambda: store.delete(key),
            lambda: store.exists(key),
            lambda: store.create_if_absent(key, b"x"),
        ):
            with pytest.raises(StoreError, match="is not a valid store key"):
                call()

    def test_a_store_that_cannot_be_reached_raises_and_is_never_empty(self, unreachable: Store, tmp_path: Path) -> None:
        for call in (
            lambda: unreachable.list(""),
            lambda: unreachable.exists("k"),
            lambda: unreachable.read("k"),
            lambda: unreachable.get("k", str(tmp_path / "t")),
            lambda: unreachable.is_same("k", str(tmp_path / "t")),
            lambda: unreachable.put_bytes("k", b"x"),
            lambda: unreachable.delete("k"),
            lambda: unreachable.create_if_absent("k", b"x"),
        ):
            with pytest.raises(StoreError) as caught:
                call()
            assert not isinstance(caught.value, NotInStore)
            assert caught.value.why
            assert caught.value.fix
