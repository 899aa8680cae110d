"""`homing fetch`."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with

from homing.wire import codec
from homing.wire.checkpoint_manifest import Pointer
from homing.world import World

cli = cli_with(steps=12)


@pytest.mark.acceptance(130, 131, 151)
@pytest.mark.slow
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
    spaced = cli("fetch", "moss", "--to", "my models").err
    for verb in ("chat", "eval", "export", "generate"):
        assert f"homing {verb} 'my models'" in spaced, "as a shell takes it"
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
    older = cli("fetch", "moss", "--to", "third", "--or-older")
    assert older.code == 0
    assert "skipped" in older.err


@pytest.mark.slow
def test_fetch_does_not_suggest_a_missing_run_file(cli: Homing) -> None:
    cli("launch", "moss", "--name", "fern", "--spend-limit", "1", "--yes")
    cli("watch", "fern")
    said = cli("fetch", "fern").err
    assert "homing chat fern" in said
    assert "launch fern" not in said, "its run file is moss, and the next run of that goes by its own name"


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_named_with_the_way_round_it(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    mkdir = World.mkdir

    def refused(world: World, path: str | Path) -> None:
        if Path(path).absolute().is_relative_to(Path("models").absolute()):
            raise PermissionError(errno.EACCES, "Permission denied", str(Path("models").absolute()))
        mkdir(world, path)

    monkeypatch.setattr(World, "mkdir", refused)
    said = cli("fetch", "moss")
    assert said.code == 2
    assert "error: Cannot write to models/moss." in said.err
    assert "fix homing fetch moss --to FOLDER" in said.err
    assert cli("fetch", "moss", "--to", "elsewhere").code == 0


@pytest.mark.acceptance(131)
@pytest.mark.slow
def test_phases_of_a_chain_are_fetched_side_by_side_and_every_suggested_command_works(cli: Homing) -> None:
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    assert "then: homing chat moss\n" in cli("watch", "moss").err
    assert cli("fetch", "moss").code == 0
    manifest = Path("models/moss/manifest.json")
    before = json.loads(manifest.read_text())
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    same = cli("watch", "moss").err
    again = re.search(r"Fetch it: homing (fetch moss)   then: homing chat (models/moss-\d{8}-\S+)\n", same)
    assert again, same
    manifest.write_text(json.dumps({**before, "phase": "sft"}))  # as `--phase sft` would have left it
    advised = re.search(r"Fetch it: homing (fetch moss)   then: homing chat (\S+)\n", cli("watch", "moss").err)
    assert advised
    assert advised[2] == "models/moss-pretrain"
    said = cli(*advised[1].split())
    assert said.code == 0, said.err
    assert said.out == "models/moss-pretrain\n"
    assert (
        "models/moss contains a model from another run with the same name; saving to models/moss-pretrain" in said.err
    )
    for verb in ("chat", "eval", "export", "generate"):
        assert f"homing {verb} models/moss-pretrain" in said.err
    assert "homing destroy moss" in said.err
    assert json.loads(manifest.read_text())["run_id"] == before["run_id"], "the first model stays"
    assert cli("fetch", "moss", "--json").json["is_new"] is False, "the same folder, when it is fetched again"
    assert cli("fetch", "moss", "--to", "elsewhere").err.count("homing chat elsewhere") == 1
    assert cli("fetch", "moss", "--force").out == "models/moss\n"
    assert json.loads(manifest.read_text())["run_id"] != before["run_id"]


@pytest.mark.slow
def test_the_last_checkpoint_is_fetched_and_a_better_one_is_named(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    best = next((homing_home / "store/runs").glob("*/checkpoints/pretrain")) / "best.json"
    for step, is_reported in ((12, False), (10, True)):
        best.write_text(codec.dumps(Pointer(step, val_loss=1.5)))
        said = cli("fetch", "moss")
        assert said.code == 0
        note = (
            "This is the latest checkpoint; the best by held-out loss is step 10: homing fetch moss --checkpoint best"
        )
        assert (note in said.err) == is_reported
    assert cli("fetch", "moss", "--checkpoint", "best", "--json").json["step"] == 10
    assert "This is the latest" not in cli("fetch", "moss", "--checkpoint", "best").err
