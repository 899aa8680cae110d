"""`homing quickstart` where its run does not come to its end; the whole trip is in tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.typed import Homing

from homing.api.tools import run_quickstart


def test_a_run_stopped_before_its_first_loss_is_reported_without_a_traceback(
    homing: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_quickstart._Trip, "lay_out", lambda trip: trip.folder.mkdir())
    monkeypatch.setattr(run_quickstart._Trip, "step", lambda trip, title, *argv, keeps=False: "")
    monkeypatch.setattr(run_quickstart, "_figures", lambda trip, sample: {"steps": 47, "val_loss": None})
    code, _, err = homing("quickstart", "--yes")
    assert code == 1
    assert "ended at step 47" in err
    assert "Traceback" not in err
