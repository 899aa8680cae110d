"""The notebook runs from its first cell to its last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "first_model.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_cells_run_in_order_and_train_a_model(tmp_path: Path, homing_home: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells), "the notebook is kept without outputs"
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {**os.environ, "HOMING_HOME": str(homing_home), "NOTEBOOK_STEPS": "4", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models/first").is_dir()
