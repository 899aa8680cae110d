"""The token of a server on this computer: in the environment and not on the command line, which every user can read."""

from __future__ import annotations

import os
import string

from homing.errors import UsageError

__all__ = ["given_token"]

_MIN_LETTERS = 16


def given_token(variable: str) -> str:
    """ "" where a new one is to be made."""
    token = os.environ.get(variable, "")
    if token and (len(token) < _MIN_LETTERS or set(token) - set(string.ascii_letters + string.digits + "-._~+/=")):
        raise UsageError(
            what=f"{variable} cannot be used.",
            why=f"A token has at least {_MIN_LETTERS} letters, digits or -._~+/= and nothing else.",
            fix=f"export {variable}=$(openssl rand -hex 16)   or leave it out: one is made and printed",
        )
    return token
