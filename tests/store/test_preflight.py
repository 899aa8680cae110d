"""A store that cannot be used is found out before anything is rented."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.doubles.hub import READ, STRANGER, Hub
from tests.doubles.s3_servers import Server

from homing.errors import StoreError
from homing.store import open_store
from homing.store.preflight import TO_BE_CREATED, preflight
from homing.world import World

NewBucket = Callable[[Server], str]


def test_a_folder_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/store"
    assert preflight(url, World()) == []
    assert open_store(url, World()).list("") == []


def test_looking_alone_makes_nothing(tmp_path: Path) -> None:
    assert preflight(f"file:{tmp_path}/store", World(), needs_write=False) == []
    assert list(tmp_path.glob("store*")) == []


def test_a_resumed_run_does_not_get_a_new_empty_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be reached"):
        preflight(f"file:{tmp_path}/unmounted", World(), create=False)
    assert not (tmp_path / "unmounted").exists()


@pytest.mark.slow
def test_preflight_of_a_bucket_names_the_source_of_the_keys(moto: Server, new_bucket: NewBucket) -> None:
    url = f"s3://{new_bucket(moto)}/p?endpoint={moto.endpoint}"
    notes = preflight(url, World())
    assert "the environment (AWS_ACCESS_KEY_ID)" in notes[0]
    assert open_store(url, World()).list("") == []


def test_keys_that_end_by_themselves_are_warned_of(
    moto: Server, new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{new_bucket(moto)}?endpoint={moto.endpoint}"
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token-of-an-hour")
    assert any("temporary" in note for note in preflight(url, World(), needs_write=False))


def test_a_service_that_takes_both_exclusive_writes_is_refused(rclone: Server, new_bucket: NewBucket) -> None:
    url = f"s3://{new_bucket(rclone)}?endpoint={rclone.endpoint}"
    with pytest.raises(StoreError, match="two computers") as caught:
        preflight(url, World())
    assert "If-None-Match" in caught.value.why
    assert open_store(url, World()).list("") == []


@pytest.mark.acceptance(43)
def test_a_missing_bucket_is_refused(moto: Server, keys: None) -> None:
    for needs_write in (True, False):
        with pytest.raises(StoreError) as caught:
            preflight(f"s3://missing-bucket?endpoint={moto.endpoint}", World(), needs_write=needs_write)
        assert "missing-bucket" in caught.value.why


@pytest.mark.acceptance(10, 43)
def test_the_wrong_region_is_refused_with_the_right_one(moto: Server, keys: None) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=moto.endpoint, region_name="eu-west-1")
    client.create_bucket(Bucket="homing-in-ireland", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    with pytest.raises(StoreError) as caught:
        preflight(f"s3://homing-in-ireland?endpoint={moto.endpoint}&region=us-east-1", World())
    assert "is in eu-west-1" in caught.value.why
    assert "?region=eu-west-1" in caught.value.fix
    preflight(f"s3://homing-in-ireland?endpoint={moto.endpoint}&region=eu-west-1", World())


@pytest.mark.acceptance(41)
def test_a_repository_is_made_private_and_tried(hub: Hub) -> None:
    notes = preflight("hf:me/fresh", World())
    assert "HF_TOKEN, hf_...te" in notes[0]
    assert hub.repos[("model", "me/fresh")].is_private
    assert hub.repos[("model", "me/fresh")].head.files == {}


def test_looking_at_a_missing_repository_makes_none(hub: Hub) -> None:
    assert TO_BE_CREATED in preflight("hf:me/fresh", World(), needs_write=False)[0]
    assert hub.repos == {}


@pytest.mark.acceptance(10, 41)
@pytest.mark.parametrize(("token", "says"), [(READ, "no write access"), (STRANGER, "no write access")])
def test_a_token_that_cannot_write_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str, says: str) -> None:
    hub.add("me/runs")
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(StoreError) as caught:
        preflight("hf:me/runs", World())
    assert says in caught.value.why
    assert token not in str(caught.value)
