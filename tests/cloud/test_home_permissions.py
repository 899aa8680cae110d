"""The home and what is in it can be read by its owner alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cli.lost_rig import NEW

from homing.cloud.home import Home
from homing.doctor.run_checks import check_privacy
from homing.doctor.subject import Examined
from homing.world import World


def modes(folder: Path) -> dict[str, str]:
    found = {path: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}
    return {str(path.relative_to(folder)): oct(mode) for path, mode in found.items() if mode & 0o077}


@pytest.fixture(autouse=True)
def _usual_umask() -> None:
    os.umask(0o022)


def test_files_in_the_home_are_private_and_files_elsewhere_are_not(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", World())
    home.world.mkdir(home.run_dir(NEW) / "actions")
    home.world.write(home.run_dir(NEW) / "run.json", b"{}")
    home.world.append(home.run_dir(NEW) / "events.jsonl", b"{}")
    home.world.create(home.run_dir(NEW) / "once", b"")
    home.world.copy(home.run_dir(NEW) / "once", home.run_dir(NEW) / "twice")
    assert home.world.lock(home.run_dir(NEW) / "lock")
    assert home.owner
    home.ledger.runs()
    assert modes(home.path) == {}
    home.world.mkdir(tmp_path / "models")
    home.world.write(tmp_path / "models" / "config.json", b"{}")
    assert oct((tmp_path / "models" / "config.json").stat().st_mode & 0o777) == "0o644"


def test_doctor_corrects_looser_permissions_and_says_so(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", World())
    assert check_privacy(Examined(home, tmp_path))[0].state == "skipped"
    assert home.owner
    home.ledger.runs()
    assert check_privacy(Examined(home, tmp_path))[0].state == "ok"
    home.path.chmod(0o755)
    (home.path / "ledger.sqlite").chmod(0o644)
    (found,) = check_privacy(Examined(home, tmp_path))
    assert found.state == "warning"
    assert "ledger.sqlite; homing has fixed" in found.text
    assert modes(home.path) == {}
    assert check_privacy(Examined(home, tmp_path))[0].state == "ok"
