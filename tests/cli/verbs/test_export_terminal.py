"""`homing export` on a real terminal: it asks nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.pseudo_terminal import on_terminal
from tests.lm.export.folders import make_checkpoint


@pytest.mark.parametrize("kind", [pytest.param("swift", marks=pytest.mark.regression("export-prompt")), "qwen3"])
@pytest.mark.slow
def test_an_export_never_asks_a_question(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path / "c", kind)
    code, said = on_terminal(
        "export", str(tmp_path / "c"), "--out", str(tmp_path / "out"), cwd=tmp_path, deadline_s=240
    )
    assert "[y/N]" not in said, said
    assert "Do you wish" not in said, said
    assert code == 0, said
