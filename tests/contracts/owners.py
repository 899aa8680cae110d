"""Owners for tests: tests run beside each other, and one that looks for what is its own must not find theirs."""

from __future__ import annotations

import hashlib
import os

__all__ = ["owner_for"]


def owner_for(file: str) -> str:
    """Of one file of tests in one process that runs them."""
    return hashlib.sha256(f"{file}/{os.environ.get('PYTEST_XDIST_WORKER', '')}".encode()).hexdigest()[:6]
