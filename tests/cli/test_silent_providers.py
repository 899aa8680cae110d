"""Four clouds at once that take the call and say nothing: every verb that asks them all says so, and soon."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, typing

from homing.cloud.destroy import destroy_lines
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine
from homing.cloud.ledger.mark import make_mark
from homing.errors import StillBilling
from homing.world import World

CLOUDS = ("aws", "modal", "runpod", "shadeform")
PATIENCE_S = 0.5
SOON_S = 100.0  # below what one of them costs alone: four tries of half a minute each


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A port that takes every connection and answers none."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("RUNPOD_API_URL", "HOMING_SHADEFORM_URL", "AWS_ENDPOINT_URL", "MODAL_SERVER_URL"):
            monkeypatch.setenv(name, url)
        keys = ("RUNPOD_API_KEY", "SHADEFORM_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        for name in (*keys, "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
            monkeypatch.setenv(name, "none")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield url


@pytest.fixture
def cli(silence: str, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Homing:
    """A home that has used all four, with an instance at each as far as its ledger knows."""
    names = (
        "cloud.ask_providers.ASK_S",
        "doctor.provider_accounts.ANSWER_S",
        "doctor.computer._CLOCK_S",
        "cloud.destroy._LAST_TRY_S",
    )
    for where in names:
        monkeypatch.setattr(f"homing.{where}", PATIENCE_S)
    monkeypatch.setattr(destroy_lines, "__kwdefaults__", {"deadline_s": PATIENCE_S})
    home = Home(homing_home, World())
    (homing_home / "aws").mkdir(parents=True)
    (homing_home / f"aws/regions-{home.owner}.json").write_text(json.dumps(["us-east-1"]))
    for number, name in enumerate(CLOUDS):
        mark = make_mark(home.owner, f"moss-{number}", 1)
        line = LedgerLine(mark, "", "?", 1, name, "H100", "2.00", "5.00", 0.0, f"us-east-1/i-{number}", 0.0)
        home.ledger.adopt(line)
    return typing(capsys, monkeypatch)


@pytest.mark.acceptance(140)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("runs",), 0),
        (("reconcile",), 6),
        (("destroy", "--all", "--yes"), 6),
        (("offers", "--gpu", "H100", *(word for name in CLOUDS for word in ("--provider", name))), 4),
        (("doctor",), 1),
    ],
)
def test_each_silent_provider_is_named_and_none_delays_the_verb(words: tuple[str, ...], code: int, cli: Homing) -> None:
    began = time.monotonic()
    said = cli(*words)
    assert time.monotonic() - began < SOON_S
    output = said.out + said.err
    assert said.code == code, output
    assert "Traceback" not in output
    for name in CLOUDS:
        assert name in output, output


@pytest.mark.acceptance(121)
def test_what_cannot_be_asked_may_bill_and_is_shown_so(cli: Homing) -> None:
    document = cli("runs", "--json").json
    assert sorted(line["provider"] for line in document["billing"]) == list(CLOUDS)
    assert {line["billing"] for line in document["billing"]} == {"maybe"}
    assert len(document["problems"]) == len(CLOUDS)


@pytest.mark.slow
def test_what_another_provider_has_ends_while_one_says_nothing(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.cloud.destroy._LAST_TRY_S", 10.0)
    home = Home(homing_home, World())
    mark = make_mark(home.owner, "moss-9", 1)
    home.ledger.adopt(LedgerLine(mark, "", "?", 1, "local", "here", "0.36", "5.00", 0.0, mark, 0.0))
    lines = [line for line in home.ledger.lines() if line.provider in ("aws", "local")]
    with pytest.raises(StillBilling, match="aws"):
        destroy_lines(home, sorted(lines, key=lambda line: line.provider), deadline_s=PATIENCE_S)
    ended = time.time()
    (here,) = [line for line in home.ledger.lines() if line.provider == "local"]
    assert here.destroyed_at is not None
    assert ended - here.destroyed_at > 2.0, "it did not wait for the other"
