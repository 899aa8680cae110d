"""Fixtures of the training half: a tiny language, its shards and a run on them. How they are made: tiny.py."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# tests/lm/**/test_*.py say `from tiny import make_run`, whatever pytest's import mode is.
sys.path.insert(0, str(Path(__file__).parent))

from tiny import make_data, make_run, make_run_dir

from homing.wire.run_json import Run


@pytest.fixture
def tiny_data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    make_data(folder)
    return folder


@pytest.fixture
def tiny_run(tiny_data: Path) -> Run:
    return make_run(tiny_data)


@pytest.fixture
def tiny_run_dir(tmp_path: Path, tiny_run: Run) -> Path:
    return make_run_dir(tmp_path / "run", tiny_run)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Triton's interpreter for the tests of a module: kernels run on the CPU. Triton decides at its import, so it and
    our kernels are imported anew, and what was imported before is put back at the end."""
    pytest.importorskip("triton")

    def ours() -> list[str]:
        parts = ("triton", "homing.lm.model.kernels")
        found = [name for name in sys.modules if any(name == part or name.startswith(f"{part}.") for part in parts)]
        return [name for name in found if not name.startswith("triton._C")]  # compiled code cannot be loaded twice

    before = {name: sys.modules.pop(name) for name in ours()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        kernels = importlib.import_module("homing.lm.model.kernels")
        for found in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
            importlib.import_module(found.name)
        with contextlib.suppress(ImportError):
            importlib.import_module("triton.experimental.gluon")  # else the first launch does it, after the setting
    yield
    for name in ours():
        del sys.modules[name]
    sys.modules.update(before)
