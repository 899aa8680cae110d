"""No API key is sent over plain HTTP to another computer, whatever variable names the address."""

from __future__ import annotations

from pathlib import Path

import pytest

from homing.cloud.providers.registry import open_provider
from homing.errors import HomingError
from homing.store import open_store
from homing.world import World

ELSEWHERE = "http://203.0.113.9:8080/v2"


@pytest.mark.regression("dotenv")
@pytest.mark.parametrize(
    ("provider", "address", "keys"),
    [
        ("runpod", "RUNPOD_API_URL", {"RUNPOD_API_KEY": "rpa_canary"}),
        ("shadeform", "HOMING_SHADEFORM_URL", {"SHADEFORM_API_KEY": "sf_canary"}),
        ("fake", "HOMING_FAKE_URL", {"HOMING_FAKE_KEY": "fake_canary"}),
        ("aws", "AWS_ENDPOINT_URL", {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "canary"}),
    ],
)
def test_no_provider_sends_a_key_over_plain_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, address: str, keys: dict[str, str]
) -> None:
    for name, value in {**keys, address: ELSEWHERE, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    sent = []

    class Line(World):
        def http(self, request):  # type: ignore[no-untyped-def]
            sent.append(request.url)
            raise AssertionError("a key was sent")

        def sleep(self, seconds: float) -> None:
            pass

    with pytest.raises(HomingError) as caught:
        open_provider(provider, home=tmp_path, owner="owner", world=Line()).list_owned()
    assert sent == []
    assert address in caught.value.what


@pytest.mark.regression("dotenv")
def test_no_store_sends_a_key_over_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    for url, setting in (
        (f"s3://bucket/x?endpoint={ELSEWHERE}", {}),
        ("s3://bucket/x", {"AWS_ENDPOINT_URL_S3": ELSEWHERE}),
        ("hf:moss/model", {"HF_ENDPOINT": ELSEWHERE, "HF_TOKEN": "hf_canary"}),
    ):
        with monkeypatch.context() as patch:
            for name, value in setting.items():
                patch.setenv(name, value)
            with pytest.raises(HomingError, match="nothing was sent"):
                open_store(url, World()).exists("runs/a")
