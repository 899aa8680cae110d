"""`homing store` on a bucket and on the Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cloud.rig import Said, homing
from tests.doubles.hub import Hub
from tests.doubles.s3_servers import Server

NewBucket = Callable[[Server], str]
Homing = Callable[..., Said]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Homing:
    return lambda *argv: homing(capsys, monkeypatch, *argv)


def there_and_back(cli: Homing, url: str, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("hello")
    assert cli("store", "put", str(note), "files/note.txt", "--store", url, "--json").json["num_bytes"] == 5
    assert cli("store", "put", str(note), "files/note.txt", "--store", url).code == 2
    listed = cli("store", "ls", "--store", url, "--json").json["files"]
    assert listed == [{"key": "files/note.txt", "num_bytes": 5}]
    got = cli("store", "get", "files/note.txt", str(tmp_path / "back"), "--store", url)
    assert got.code == 0, got.err
    assert "the store has no hash for it" in got.err
    assert (tmp_path / "back").read_text() == "hello"
    assert cli("store", "get", "files/none", "--store", url).code == 7
    assert cli("store", "rm", "files/note.txt", "--store", url).code == 2, "no terminal and no --yes"
    assert cli("store", "rm", "files/note.txt", "--store", url, "--yes").code == 0
    assert cli("store", "ls", "--store", url, "--json").json["files"] == []


@pytest.mark.acceptance(40, 138)
def test_a_bucket(cli: Homing, moto: Server, new_bucket: NewBucket, tmp_path: Path) -> None:
    there_and_back(cli, f"s3://{new_bucket(moto)}/x?endpoint={moto.endpoint}", tmp_path)


@pytest.mark.acceptance(43)
def test_a_bucket_with_real_signatures(cli: Homing, rclone: Server, new_bucket: NewBucket, tmp_path: Path) -> None:
    there_and_back(cli, f"s3://{new_bucket(rclone)}/x?endpoint={rclone.endpoint}", tmp_path)


@pytest.mark.acceptance(40)
def test_a_repository(cli: Homing, hub: Hub, tmp_path: Path) -> None:
    hub.add("me/runs")
    there_and_back(cli, "hf:me/runs", tmp_path)


def test_an_object_is_checked_by_its_name(cli: Homing, hub: Hub, tmp_path: Path) -> None:
    from homing.store import open_store
    from homing.world import World

    key = "objects/" + "0" * 64
    open_store("hf:me/runs", World()).put_bytes(key, b"not what its name says")
    refused = cli("store", "get", key, str(tmp_path / "back"), "--store", "hf:me/runs")
    assert refused.code == 7
    assert "is corrupt" in refused.err
    assert not (tmp_path / "back").exists()


@pytest.mark.acceptance(39)
def test_progress_of_a_transfer_is_reported(cli: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.cli.run_verb._LINE_S", -1.0)
    (tmp_path / "store").mkdir()
    (tmp_path / "note.txt").write_text("hello")
    said = cli("store", "put", str(tmp_path / "note.txt"), "n", "--store", f"file:{tmp_path}/store")
    assert "5 B of 5 B, 100%" in said.err


def test_a_store_that_refuses_exits_7_with_a_fix(cli: Homing, moto: Server, keys: None) -> None:
    said = cli("store", "ls", "--store", f"s3://missing-bucket?endpoint={moto.endpoint}")
    assert said.code == 7
    assert "has no bucket missing-bucket" in said.err
