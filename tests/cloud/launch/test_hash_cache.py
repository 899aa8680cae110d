"""Large files are hashed once, and again as soon as they may have changed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import make_run

from homing import progress
from homing.cloud.home import Home
from homing.cloud.launch.draft import LaunchOrder, draft
from homing.cloud.launch.inputs import Hashes
from homing.cloud.providers.base import Needs
from homing.wire.run_json import Base
from homing.world import World

LARGE = b"w" * (2 << 20)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were really read."""
    names: list[str] = []
    real = World.sha256

    def sha256(self: World, path: object) -> str:
        names.append(os.path.basename(os.fspath(path)))  # type: ignore[call-overload]
        return real(self, path)  # type: ignore[arg-type]

    monkeypatch.setattr(World, "sha256", sha256)
    return names


def put(path: Path, data: bytes, *, age_s: float = 60.0) -> str:
    path.write_bytes(data)
    at = World().now() - age_s
    os.utime(path, (at, at))
    return hashlib.sha256(data).hexdigest()


def test_a_large_file_is_read_once_also_by_later_commands(home: Home, tmp_path: Path, read: list[str]) -> None:
    digest = put(tmp_path / "large", LARGE)
    assert [Hashes(home).sha256(str(tmp_path / "large")) for _ in range(3)] == [digest] * 3
    assert read == ["large"]
    small = put(tmp_path / "small", b"small")
    assert [Hashes(home).sha256(str(tmp_path / "small")) for _ in range(2)] == [small] * 2
    assert read == ["large", "small", "small"]


def test_a_changed_or_replaced_file_is_hashed_again(home: Home, tmp_path: Path, read: list[str]) -> None:
    path = tmp_path / "large"
    put(path, LARGE)
    Hashes(home).sha256(str(path))
    longer = put(path, LARGE + b"!")
    assert Hashes(home).sha256(str(path)) == longer
    later = put(path, b"x" + LARGE, age_s=30.0)
    assert Hashes(home).sha256(str(path)) == later
    at = path.stat().st_mtime_ns
    other = put(tmp_path / "other", b"y" + LARGE)
    os.utime(tmp_path / "other", ns=(at, at))
    os.replace(tmp_path / "other", path)  # the same size and time, another file
    assert Hashes(home).sha256(str(path)) == other
    assert read == ["large"] * 4


def test_a_file_changed_in_place_with_its_old_mtime_is_hashed_again(
    home: Home, tmp_path: Path, read: list[str]
) -> None:
    path = tmp_path / "large"
    put(path, LARGE)
    Hashes(home).sha256(str(path))
    at = path.stat().st_mtime_ns
    with path.open("r+b") as file:  # as rsync --inplace --times does it
        file.write(b"x")
    os.utime(path, ns=(at, at))
    assert Hashes(home).sha256(str(path)) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read == ["large", "large"]


def test_the_hash_of_a_just_written_file_is_not_cached(home: Home, tmp_path: Path, read: list[str]) -> None:
    put(tmp_path / "fresh", LARGE, age_s=0.0)
    for _ in range(2):
        Hashes(home).sha256(str(tmp_path / "fresh"))
    assert read == ["fresh", "fresh"]


@pytest.mark.parametrize("text", ["{", "[]", '{"files": {"large": 3}}', '{"files": []}'])
def test_an_unreadable_hash_cache_is_replaced(home: Home, tmp_path: Path, read: list[str], text: str) -> None:
    (home.path / "cache").mkdir(parents=True)
    (home.path / "cache/hashes.json").write_text(text)
    digest = put(tmp_path / "large", LARGE)
    assert [Hashes(home).sha256(str(tmp_path / "large")) for _ in range(2)] == [digest] * 2
    assert read == ["large"]


def test_a_draft_of_a_run_with_weights_reads_them_once(home: Home, tmp_path: Path, read: list[str]) -> None:
    put(tmp_path / "large", LARGE)
    folder = tmp_path / "open"
    folder.mkdir()
    (tmp_path / "large").rename(folder / "model.safetensors")
    run = dataclasses.replace(make_run(tmp_path), base=Base("hf:moss/moss@1", str(folder)))
    offer = home.provider("local").offers(Needs())[0]
    order = LaunchOrder(run, "name: moss\n", True, offer, Decimal(1))
    runs = [draft(order, home).run for _ in range(2)]
    assert read.count("model.safetensors") == 1
    assert [item.sha256 for item in runs[1].inputs if item.path == "base/model.safetensors"] == [
        hashlib.sha256(LARGE).hexdigest()
    ]


def test_hashing_a_large_file_is_reported_and_reading_the_cache_is_not(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"a" * (2 << 20))
    os.utime(path, (1.0, 1.0))  # old enough to be cached
    seen: list[progress.Progress] = []
    with progress.listening(seen.append):
        Hashes(home).sha256(str(path))
        assert [each.what for each in seen] == ["Hashing large, 2.10 MB", ""]
        Hashes(home).sha256(str(path))
    assert len(seen) == 2
