"""Recovery of a lost owner file or ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cloud.rig import make_draft, make_run

from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.ledger import Adopted, LedgerLine, RunRow
from homing.cloud.reconcile.lost_ledger import unknown_runs, what_is_lost
from homing.cloud.reconcile.reconcile import refresh
from homing.doctor.run_checks import check_owner
from homing.doctor.subject import Examined
from homing.wire import codec, file_names
from homing.world import World


def again(home: Home) -> Home:
    """The same home, opened by the next process."""
    return Home(home.path, World())


def line(mark: str, run_id: str, at: float = 1.0) -> LedgerLine:
    return LedgerLine(mark, run_id, "moss", 1, "local", "cpu", "0.36", "1.00", intent_at=at)


def row(run_id: str, name: str = "moss") -> RunRow:
    return RunRow(run_id, name, "launching", 1.0, "file:x", "0" * 64)


def test_a_lost_owner_id_is_restored_from_the_ledger_so_instances_stay_ours(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=100_000, step_s=0.02), home)
    owner = home.owner
    home.owner_path.unlink()
    later = again(home)
    assert what_is_lost(later) == [
        f"{home.owner_path} was lost; the marks in the ledger show that the owner is {owner}."
    ]
    assert not later.has_owner, "checking does not create an owner"
    assert refresh(later) == []
    assert home.owner_path.read_text() == owner
    (mine,) = later.provider("local").list_owned()
    assert mine.mark == done.instance.mark
    assert later.is_ours(mine.mark)
    assert later.ledger.lines()[0].billing == "yes"
    assert what_is_lost(later) == []


def test_a_lost_owner_id_is_restored_from_the_ledger_backup(home: Home) -> None:
    home.ledger.intend(row("moss-1"), line(f"homing-{home.owner}-moss-1-1", "moss-1"))
    home.owner_path.unlink()
    for path in home.path.glob("ledger.sqlite*"):
        path.unlink()
    assert again(home).owner == home.owner


def test_the_owner_id_is_not_taken_from_the_marks_of_adopted_runs(home: Home) -> None:
    home.ledger.adopt_run(row("fern-1", "fern"), [line("homing-abcdef-fern-1-1", "fern-1", at=9.0)],
                          [Adopted("homing-abcdef-fern-1-1", "abcdef", "desk", "/home/desk")])  # fmt: skip
    assert home.owner_in_ledger() == ""
    home.ledger.intend(row("moss-1"), line("homing-123456-moss-1-1", "moss-1"))
    assert again(home).owner == "123456"
    assert not again(home).is_ours("homing-abcdef-fern-1-1")
    assert not again(home).is_ours("homing-1234567-moss"), "a longer id is another owner"


def test_an_empty_home_is_new_and_has_lost_nothing(home: Home) -> None:
    assert (home.has_owner, home.has_ledger) == (False, False)
    assert what_is_lost(home) == []
    (check,) = check_owner(Examined(home, home.path))
    assert check.text == f"No owner id yet: nothing has been launched from {home.path}."
    assert (home.has_owner, home.has_ledger) == (False, False), "checking creates neither"
    assert len(home.owner) == 6


@pytest.mark.parametrize("has_owner", [True, False])
def test_runs_missing_from_the_ledger_are_reported_with_an_adopt_command(
    home: Home, tmp_path: Path, has_owner: bool
) -> None:
    folder = home.run_dir("moss-20260101-120000-aaaa")
    folder.mkdir(parents=True)
    (folder / LAUNCH_NOTE).write_text(json.dumps({}))
    run = make_run(tmp_path)
    (folder / file_names.RUN).write_text(codec.dumps(run))
    if has_owner:
        assert home.owner
    assert unknown_runs(home) == {folder.name: run.store}
    (said,) = what_is_lost(home)
    assert said.startswith("The ledger has no record of 1 run launched from this computer.")
    assert f"homing adopt {run.store} {folder.name}" in said
    assert ("under an unknown mark" in said) is not has_owner
    (check,) = check_owner(Examined(home, home.path))
    assert check.state == ("warning" if has_owner else "fault")
    assert check.fix == f"homing adopt {run.store}   lists what is there"
    home.ledger.intend(row(folder.name), line(f"homing-{home.owner}-moss-1", folder.name))
    assert what_is_lost(home) == []
