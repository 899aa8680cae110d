"""Answers to the library's questions. The library never prompts: the caller passes a function that answers.

The command line asks the person at the terminal. Without an answer the library refuses, so nothing is lost or spent
that nobody agreed to.
"""

from __future__ import annotations

from collections.abc import Callable

from homing.errors import UsageError

__all__ = ["Agrees", "refuse"]

Agrees = Callable[[str], bool]  # from the question, which names what it costs or loses, to yes or no


def refuse(question: str) -> bool:
    raise UsageError(what="Confirmation required.", why=question, fix="Pass agrees=lambda question: True")
