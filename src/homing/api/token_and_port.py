"""Read a local web server's access token from the environment, because every local user can read command lines."""

from __future__ import annotations

import os
import socket
import string

from homing.errors import UsageError

__all__ = ["any_free", "given_token", "is_free"]

_MIN_LETTERS = 16


def given_token(variable: str) -> str:
    """Return the token in the environment variable, or "" if it is not set. Raises UsageError if it is unsuitable."""
    token = os.environ.get(variable, "")
    if token and (len(token) < _MIN_LETTERS or set(token) - set(string.ascii_letters + string.digits + "-._~+/=")):
        raise UsageError(
            what=f"Invalid access token in {variable}.",
            why=f"A token has at least {_MIN_LETTERS} characters: letters, digits or -._~+/=.",
            fix=f"export {variable}=$(openssl rand -hex 16)   or unset it: homing creates and prints one",
        )
    return token


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def any_free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
