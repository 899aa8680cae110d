"""A home that a verb makes is its owner's alone."""

from __future__ import annotations

import os

import pytest
from tests.cli.lost_rig import Rig, rig

__all__ = ["rig"]


@pytest.mark.regression("home-permissions")
def test_others_can_read_neither_the_home_nor_the_ledger(rig: Rig) -> None:
    os.umask(0o022)
    assert not rig.path.exists()
    rig.cli("runs")
    assert oct(rig.path.stat().st_mode & 0o777) == "0o700"
    assert oct((rig.path / "ledger.sqlite").stat().st_mode & 0o777) == "0o600"
