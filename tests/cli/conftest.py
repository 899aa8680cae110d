"""`homing` to type in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.typed import Homing, typed


@pytest.fixture
def homing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Homing:
    monkeypatch.chdir(tmp_path)
    return typed(capsys, monkeypatch)
