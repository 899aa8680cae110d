"""Owners for tests: tests run in parallel, and none may find the instances of another."""

from __future__ import annotations

import hashlib
import os

__all__ = ["owner_for"]


def owner_for(file: str) -> str:
    """Of one file of tests in one process that runs them."""
    return hashlib.sha256(f"{file}/{os.environ.get('PYTEST_XDIST_WORKER', '')}".encode()).hexdigest()[:6]
