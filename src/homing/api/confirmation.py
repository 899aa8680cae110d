"""Ask for confirmation before money is spent or data is lost.

The library never prompts; instead, the caller passes a function that answers its questions. The command
line passes one that asks the person at the terminal. If no such function is passed, the library raises an error, so
that nothing is deleted or spent without consent.
"""

from __future__ import annotations

from collections.abc import Callable

from homing.errors import UsageError

__all__ = ["Agrees", "refuse"]

Agrees = Callable[[str], bool]  # receives a question that states the cost or the loss; returns True for yes


def refuse(question: str) -> bool:
    raise UsageError(what="Confirmation required.", why=question, fix="To agree, pass agrees=lambda question: True")
