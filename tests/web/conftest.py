"""One browser for the session, and one pair of models for the tests of a file that want them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.web.browser import Browser, running_browser
from tests.web.rig import make_model


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pretrain: a base model; sft: one that learned turns."""
    folder = tmp_path_factory.mktemp("served")
    for phase in ("pretrain", "sft"):
        make_model(folder, phase)
    return folder / "models"
