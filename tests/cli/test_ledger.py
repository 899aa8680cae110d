"""`homing ledger`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing


@pytest.fixture
def cli(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Homing]:
    lay_out(tmp_path, monkeypatch, steps=4, step_s=0.02)
    yield typing(capsys, monkeypatch)
    clear(homing_home)


def test_the_receipt_and_the_total_are_there_after_the_run(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    said = cli("ledger", "moss")
    assert said.out.strip().splitlines()[-1].startswith("total")
    assert "gone" in said.out
    ledger = cli("ledger", "--json").json
    assert ledger["schema"] == "homing.ledger/1"
    (line,) = ledger["lines"]
    assert line["schema"] == "homing.ledger-line/1"
    assert line["spend_usd"] == ledger["total_usd"]
    assert 0 < float(ledger["total_usd"]) < 0.02
    assert cli("ledger", "fern").code == 2
