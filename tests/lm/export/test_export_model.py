"""The folder of an export, before anything is in it that is a model."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from homing.lm.export.export_model import new_folder


@pytest.mark.regression("export-mode")
def test_what_was_exported_can_be_read_by_other_users(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as folder:
        save_file({"a": torch.zeros(2)}, folder / "model.safetensors")  # which writes for the owner alone
        (folder / "code").mkdir()
        (folder / "code" / "config.json").write_text("{}")
        (folder / "code" / "config.json").chmod(0o600)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
        "model.safetensors": "0o644",
        "config.json": "0o644",
    }
