"""Questions that the library asks its caller: `confirm` answers True or False, and without one the library refuses."""

from __future__ import annotations

from collections.abc import Callable

from homing.errors import UsageError

__all__ = ["Confirm", "refuse"]

Confirm = Callable[[str], bool]


def refuse(question: str) -> bool:
    raise UsageError(what="Confirmation required.", why=question, fix="confirm=lambda question: True")
