"""A home of its own for each test, and nothing left running after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cloud.rig import clear, look_more_often

from homing.cloud.home import Home
from homing.world import World


@pytest.fixture(autouse=True)
def _look_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library looks every second or two; a run of a second would spend its test asleep."""
    look_more_often(monkeypatch)


@pytest.fixture
def world() -> World:
    """The real one; a module with a cloud double gives its own."""
    return World()


@pytest.fixture
def home(homing_home: Path, world: World) -> Iterator[Home]:
    yield Home(homing_home, world)
    clear(homing_home)
