"""`homing adopt`: two homes, one store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing
from tests.cloud.rig import Said

At = Callable[..., Said]


@pytest.fixture
def homes(tmp_path: Path, homing_home: Path) -> Iterator[list[Path]]:
    found = [homing_home, tmp_path / "second"]
    yield found
    for path in found:
        clear(path)


@pytest.fixture
def at(
    tmp_path: Path, homes: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[At]:
    """at(0, "runs") is `homing runs` in the first home."""
    lay_out(tmp_path, monkeypatch, steps=100000, step_s=0.02)
    cli: Homing = typing(capsys, monkeypatch)

    def in_home(number: int, *argv: str) -> Said:
        monkeypatch.setenv("HOMING_HOME", str(homes[number]))
        return cli(*argv)

    return in_home


@pytest.fixture
def store(at: At, tmp_path: Path) -> str:
    url = f"file:{tmp_path}/shared-store"
    said = at(0, "launch", "moss", "--spend-limit", "1", "--yes", "--set", f"store={url}")
    assert said.code == 0, said.err
    return url


def test_it_lists_the_runs_of_a_store_and_asks_before_it_takes_one(at: At, store: str) -> None:
    listed = at(1, "adopt", store, "--json").json["runs"]
    assert [(run["name"], run["is_ours"]) for run in listed] == [("moss", False)]
    assert "homing adopt" in at(1, "adopt", store).err
    refused = at(1, "adopt", store, "moss")
    assert refused.code == 2
    assert "at $0.36/h" in refused.err
    assert "of $1.00 spent" in refused.err
    assert at(1, "runs", "--json").json["runs"] == []


@pytest.mark.slow
def test_after_adopt_every_verb_works_here_and_the_other_home_is_informed(at: At, store: str) -> None:
    said = at(1, "adopt", store, "moss", "--yes", "--json")
    assert said.code == 0, said.err
    assert said.json["state"] == "running"
    assert "homing watch" in said.err
    assert at(1, "status", "moss", "--json").json["is_billing"]
    lost = at(0, "status", "moss", "--json").json
    assert (lost["state"], lost["is_billing"]) == ("adopted", True)
    assert "adopted by" in lost["reason"]
    refused = at(0, "stop", "moss")
    assert refused.code == 2
    assert f"homing adopt {store}" in refused.err
    assert at(0, "launch", "moss", "--resume", "--yes").code == 2
    assert at(1, "stop", "moss").code == 0
    assert at(1, "fetch", "moss").code == 0
    assert at(1, "runs", "--json").json["billing"] == []
    assert at(0, "runs", "--json").json["billing"] == []
    again = at(1, "adopt", store, "moss", "--yes")
    assert again.code == 0
    assert "already" in again.err


@pytest.mark.slow
def test_an_ended_run_without_a_checkpoint_is_not_offered_for_a_fetch(at: At, store: str) -> None:
    assert at(0, "destroy", "moss", "--yes").code == 0
    said = at(1, "adopt", store, "moss", "--yes")
    assert said.code == 0, said.err
    assert "No checkpoint was saved. Start over: homing launch moss" in said.err
    assert "homing fetch" not in said.err


@pytest.mark.slow
def test_a_run_or_store_that_is_not_there_is_said(at: At, store: str, tmp_path: Path) -> None:
    assert at(1, "adopt", store, "absent").code == 2
    assert at(1, "adopt", f"file:{tmp_path}/nowhere").code == 7
    assert at(1, "adopt", "nonsense").code == 2
