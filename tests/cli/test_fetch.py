"""`homing fetch`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing


@pytest.fixture
def cli(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Homing]:
    lay_out(tmp_path, monkeypatch, steps=12, step_s=0.02)
    yield typing(capsys, monkeypatch)
    clear(homing_home)


def test_the_model_comes_home_and_the_next_verbs_are_named(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    said = cli("fetch")
    assert said.code == 0
    assert said.out == "models/moss\n"
    assert Path("models/moss/model.safetensors").read_bytes() == b"weights at 12"
    for verb in ("chat moss", "eval moss", "launch moss --phase sft", "export moss", "destroy moss"):
        assert f"homing {verb}" in said.err
    again = cli("fetch", "moss", "--json").json
    assert (again["schema"], again["step"], again["is_new"]) == ("homing.fetch/1", 12, False)
    Path("models/moss/notes.txt").write_text("mine")
    older = cli("fetch", "moss", "--checkpoint", "10", "--json")
    assert older.code == 2
    assert "added since: notes.txt" in json.loads(older.out)["why"]
    Path("models/moss/notes.txt").unlink()
    assert cli("fetch", "moss", "--checkpoint", "pretrain:10", "--json").json["step"] == 10
    assert cli("fetch", "moss", "--checkpoint", "10", "--to", "older", "--json").json["step"] == 10
    listed = cli("fetch", "moss", "--list", "--json").json["checkpoints"]
    assert [each["step"] for each in listed] == sorted((each["step"] for each in listed), reverse=True)
    assert (listed[0]["step"], "latest" in listed[0]["names"], listed[0]["num_bytes"] > 0) == (12, True, True)
    shown = cli("fetch", "moss", "--list")
    assert "latest" in shown.out
    assert "homing fetch moss --checkpoint" in shown.err
    newest = next((homing_home / "store/runs").glob("*/checkpoints/pretrain/step-00000012/model.safetensors"))
    newest.write_bytes(b"flipped")
    damaged = cli("fetch", "moss", "--to", "third")
    assert damaged.code == 7
    assert not Path("third").exists()
    aloud = cli("fetch", "moss", "--to", "third", "--or-older")
    assert aloud.code == 0
    assert "passed over" in aloud.err
