"""A home of its own for each test, and nothing left running after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cloud.rig import look_more_often

from homing.cloud.home import Home
from homing.world import World


@pytest.fixture(autouse=True)
def _look_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library looks every second or two; a run of a second would spend its test asleep."""
    look_more_often(monkeypatch)


@pytest.fixture
def home(homing_home: Path) -> Iterator[Home]:
    found = Home(homing_home, World())
    yield found
    # Opened anew: a test may have taught the other one to refuse.
    provider = Home(homing_home, World()).provider("local")
    for instance in provider.list_owned():
        provider.destroy(instance.id)
