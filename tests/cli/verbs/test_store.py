"""`homing store`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, cli_with, lay_out, typing

from homing.wire import codec
from homing.wire.checkpoint_manifest import Pointer

cli = cli_with(steps=12)


def checkpoints(cli: Homing) -> dict[str, str]:
    """step folder -> its key, of the one run there is"""
    files = cli("store", "ls", "runs", "--json").json["files"]
    keys = [file["key"] for file in files if "/step-" in file["key"] and file["key"].endswith("/manifest.json")]
    return {key.split("/")[-2]: key.rsplit("/", 1)[0] for key in keys}


@pytest.mark.acceptance(107, 138)
@pytest.mark.slow
def test_an_old_checkpoint_is_removed_by_name_and_the_last_one_stays(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    found = checkpoints(cli)
    assert len(found) >= 2, found
    last = found[max(found)]
    refused = cli("store", "rm", last, "--yes")
    assert refused.code == 2
    assert "is the last checkpoint" in refused.err
    everything = cli("store", "rm", last.rsplit("/", 2)[0], "--yes")
    assert everything.code == 2
    assert "every checkpoint" in everything.err
    oldest = found[min(found)]
    best = homing_home / "store" / oldest / "../best.json"
    best.write_text(codec.dumps(Pointer(step=int(min(found).removeprefix("step-")))))
    refused = cli("store", "rm", oldest, "--yes")
    assert refused.code == 2
    assert "is the best checkpoint" in refused.err
    best.unlink()
    removed = cli("store", "rm", oldest, "--yes", "--json")
    assert removed.code == 0
    assert removed.json["keys"][0].endswith("/manifest.json"), "the manifest goes first"
    assert set(checkpoints(cli)) == set(found) - {min(found)}


def test_what_a_live_run_pushes_stays(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_out(tmp_path, monkeypatch, steps=2000, step_s=0.05)
    cli = typing(capsys, monkeypatch)
    try:
        cli("launch", "moss", "--spend-limit", "1", "--yes")
        listed = cli("runs", "--json")
        assert listed.out, listed.err
        run_id = listed.json["runs"][0]["run"]
        refused = cli("store", "rm", f"runs/{run_id}", "--yes")
        assert refused.code == 2
        assert "is live" in refused.err
    finally:
        clear(homing_home)


@pytest.mark.acceptance(40)
def test_a_file_goes_there_and_comes_back_and_nothing_is_clobbered(cli: Homing, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("hello")
    url = f"file:{tmp_path / 'elsewhere'}"
    (tmp_path / "elsewhere").mkdir()
    assert cli("store", "put", str(note), "files/note.txt", "--store", url).code == 0
    assert cli("store", "put", str(note), "files/note.txt", "--store", url).code == 2
    assert cli("store", "get", "files/note.txt", str(note), "--store", url).code == 2
    assert cli("store", "get", "files/note.txt", str(tmp_path / "deep/back.txt"), "--store", url).code == 0
    assert (tmp_path / "deep/back.txt").read_text() == "hello"
    for code, verb in ((2, ("rm", "files/nite.txt", "--yes")), (7, ("get", "files/nite.txt"))):
        near = cli("store", *verb, "--store", url)
        assert near.code == code
        assert "Closest: files/note.txt" in near.err
    folder = cli("store", "get", "files", str(tmp_path / "all"), "--store", url)
    assert folder.code == 7
    assert "files is a folder with 1 file" in folder.err
    assert f"homing store get files/note.txt --store {url}" in folder.err
    asked = cli("store", "rm", "files/note.txt", "--store", url)
    assert asked.code == 2, "no terminal and no --yes"
    assert cli("store", "rm", "files/note.txt", "--store", url, "--yes").code == 0
    assert cli("store", "ls", "--store", url, "--json").json["files"] == []
