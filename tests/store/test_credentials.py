"""What an instance is handed to reach the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from homing.hub_token import NAMES
from homing.store.preflight import secrets


def test_a_folder_needs_none() -> None:
    assert secrets("file:/x", {"AWS_ACCESS_KEY_ID": "a", "HF_TOKEN": "b"}) == {}


def test_a_bucket_needs_keys_region_and_endpoint_and_nothing_else() -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_PROFILE": "of-this-computer",
        "HF_TOKEN": "c",
        "HOME": "/root",
    }
    found = secrets("s3://bucket", environment)
    assert set(found) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL_S3"}


def test_a_profile_is_handed_over_as_the_keys_in_it(
    tmp_path: Path, keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text(
        "[work]\naws_access_key_id = AKWORK\naws_secret_access_key = secret-of-work\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    found = secrets("s3://bucket?endpoint=http://127.0.0.1:9", {})
    assert found["AWS_ACCESS_KEY_ID"] == "AKWORK"
    assert found["AWS_SECRET_ACCESS_KEY"] == "secret-of-work"


def test_the_hub_needs_the_token_also_the_saved_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert secrets("hf:me/x", {"HF_TOKEN": "hf_1", "AWS_ACCESS_KEY_ID": "a"}) == dict.fromkeys(NAMES, "hf_1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "token").write_text("hf_saved")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    assert secrets("hf:me/x", {}) == dict.fromkeys(NAMES, "hf_saved")
    # What it is called at home does not matter there; by both names, for a host may have another under one of them.
    both = {"HUGGINGFACEHUB_API_TOKEN": "hf_2", "HF_TOKEN": "hf_1"}
    assert secrets("hf:me/x", both) == dict.fromkeys(NAMES, "hf_2")
