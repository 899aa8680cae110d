"""Shared by all tests: loopback only, one thread, a home of its own for each test."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

_real_connect = socket.socket.connect


def _loopback_only(self: socket.socket, address: object) -> None:
    host = address[0] if isinstance(address, tuple) else ""
    if isinstance(address, tuple) and not (str(host).startswith("127.") or host in ("::1", "localhost")):
        raise AssertionError(f"a test tried to reach {address!r}; tests stay on loopback")
    _real_connect(self, address)


@pytest.fixture(autouse=True)
def _stay_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", _loopback_only)


@pytest.fixture(autouse=True)
def homing_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$HOMING_HOME of this test; nothing a test does may touch the person's own."""
    home = tmp_path / "homing-home"
    monkeypatch.setenv("HOMING_HOME", str(home))
    monkeypatch.setenv("NO_COLOR", "1")
    return home
