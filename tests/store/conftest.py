"""Servers of object stores, started once and only for the tests that ask for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.doubles import hub as hub_double
from tests.doubles import s3_servers
from tests.doubles.hub import WRITE, Hub
from tests.doubles.s3_servers import ACCESS_KEY, SECRET_KEY, Server

NewBucket = Callable[[Server], str]


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    with s3_servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with s3_servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials of the doubles, and none of the person's own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def new_bucket(keys: None) -> NewBucket:
    """new_bucket(server): the name of an empty bucket there."""

    def make(server: Server) -> str:
        import boto3

        name = f"homing-{uuid4().hex[:12]}"
        boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1").create_bucket(Bucket=name)
        return name

    return make


class NoWaiting:
    """The SDK's clock, without its pauses between tries."""

    def __getattr__(self, name: str) -> object:
        return (lambda seconds: None) if name == "sleep" else getattr(time, name)


@pytest.fixture
def hub_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time", NoWaiting())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, hub_without_waiting: None) -> Iterator[Hub]:
    # As a fresh process has it: whether Xet is used is for the code under test to say.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    with hub_double.running() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
        monkeypatch.setenv("HF_TOKEN", WRITE)
        yield made
