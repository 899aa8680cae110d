"""Keys go to HTTPS, or to this computer."""

from __future__ import annotations

import pytest

from homing.api_address import api_address, check_address
from homing.errors import UsageError

ELSEWHERE = "http://203.0.113.9:8080/v2"


@pytest.mark.parametrize(
    "url", ["https://api.runpod.io/v2", "http://127.0.0.1:9", "http://[::1]:9", "http://localhost:9"]
)
def test_https_and_loopback_are_taken_as_they_are(url: str) -> None:
    assert check_address(url, "X_URL") == url


@pytest.mark.parametrize(
    "url",
    [ELSEWHERE, "http://localhost.evil.example", "http://127.0.0.1.evil.example/", "http://127.0.0.1@evil.example/", "ftp://a",
     "file:///etc/passwd", "https://", "evil.example", "http://[::1", "HTTP://evil.example", "http://0.0.0.0:9"],
)  # fmt: skip
def test_any_other_is_refused_by_its_name(url: str) -> None:
    with pytest.raises(UsageError, match="X_URL") as caught:
        api_address({"X_URL": url}, "X_URL", "https://api.test")
    assert "Unset X_URL" in caught.value.fix


def test_a_refusal_shows_no_password() -> None:
    with pytest.raises(UsageError) as caught:
        check_address("http://me:canary@evil.example/?token=canary", "X_URL")
    assert "canary" not in f"{caught.value.what}{caught.value.why}{caught.value.fix}"
