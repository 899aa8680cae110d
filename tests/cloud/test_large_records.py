"""A home with thousands of receipts and a run with very many metrics: no command reads them all line by line.

It measures CPU time and not wall time, so that a busy computer does not fail it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cloud.many_records import HERE, FakeCloudServer, fill_ledger, fill_metrics
from tests.cloud.rig import Said, homing

_MOST_S = 1.5  # it takes about a third of that; before, it took from three times to ten times as much

Timed = Callable[..., tuple[Said, float]]


@pytest.fixture
def timed(
    homing_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Timed:
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[Said, float]:
        before = time.process_time()
        said = homing(capsys, monkeypatch, *argv)
        return said, time.process_time() - before

    return run


@pytest.mark.regression("large-records")
@pytest.mark.parametrize("verb", [("runs",), ("guard", "--once"), ("ledger",)], ids=lambda verb: verb[0])
def test_commands_stay_fast_with_thousands_of_ledger_lines(
    verb: tuple[str, ...], timed: Timed, homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeCloudServer() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        open_ = fill_ledger(homing_home, 2_000, 20, server, tmp_path / "store")
        timed("runs")  # imports the shared modules and migrates the ledger
        said, cpu_s = timed(*verb)
    assert said.code == 0, said.err
    assert cpu_s < _MOST_S
    if verb[0] != "guard":
        assert all(run_id in said.out for run_id in open_), "every open run is listed"


@pytest.mark.regression("large-records")
@pytest.mark.parametrize("verb", ["status", "watch", "report"])
def test_commands_stay_fast_with_very_many_metrics(verb: str, timed: Timed, homing_home: Path) -> None:
    fill_metrics(homing_home, 100_000)
    timed("runs")  # imports the shared modules
    said, cpu_s = timed(verb, HERE)
    assert said.code == 0, said.err
    assert cpu_s < _MOST_S
    assert "100,000" in said.out
