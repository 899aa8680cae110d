"""Confirmation of costs and losses. The library never prompts: the caller passes a function that answers its questions.

The command line asks the person at the terminal. If no such function is passed, the library raises an error, so that
nothing is deleted or spent without consent.
"""

from __future__ import annotations

from collections.abc import Callable

from homing.errors import UsageError

__all__ = ["Agrees", "refuse"]

Agrees = Callable[[str], bool]  # takes the question, which names the cost or the loss; True means yes


def refuse(question: str) -> bool:
    raise UsageError(what="Confirmation required.", why=question, fix="Pass agrees=lambda question: True")
