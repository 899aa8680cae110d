"""Client for Modal: credentials, single calls with a deadline, and the classification of Modal's errors.

    connect             uses MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, else the profile written by `modal setup`
    connection.call     makes one SDK call with a deadline, because the SDK sets none
    kind_of             classifies an SDK exception: absent, exists, busy, refused, silent

The store and the provider share this client. The SDK is loaded on first use and does its own network I/O on its own
thread.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from homing.api_address import check_address
from homing.errors import MissingExtra, UsageError
from homing.world import World

__all__ = [
    "PROFILE_PATH",
    "TOKEN_ENV",
    "Connection",
    "Kind",
    "Shut",
    "connect",
    "failures",
    "has_account",
    "kind_of",
    "text_of",
]

T = TypeVar("T")
Kind = Literal["absent", "exists", "busy", "refused", "silent"]

TOKEN_ENV = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")
PROFILE_PATH = "~/.modal.toml"
TIMEOUT_S = 60.0
_OPEN_S = 15.0  # time limit for connecting; the SDK itself would keep trying for a minute
_NO_MORE_TEXT = 300
# One client per account and server, because each client has its own connection and background work.
_CLIENTS: dict[tuple[str, str], Any] = {}


class Shut(Exception):
    """Raised if Modal does not respond at all. The message comes from the SDK."""


@dataclass(frozen=True)
class Connection:
    sdk: Any
    client: Any
    who: str  # the masked token, or where it comes from, for display
    environment: str = ""  # a Modal environment, which is a namespace inside the workspace; "" for the default one

    def call(self, make: Callable[[], Awaitable[T]], timeout_s: float = TIMEOUT_S) -> T:
        """Run one call with a deadline.

        `make` returns the SDK's own coroutine (`.aio`), the only kind of call that can be cancelled cleanly.
        """
        import asyncio

        return asyncio.run(_within(make, timeout_s))


def has_account(environment: Mapping[str, str], world: World) -> bool:
    """Return True if a Modal token is configured. This needs neither the SDK nor the network."""
    if all(environment.get(name) for name in TOKEN_ENV):
        return True
    return world.exists(os.path.expanduser(environment.get("MODAL_CONFIG_PATH", "") or PROFILE_PATH))


def connect(world: World, verb: str = "launch") -> Connection:
    environment = world.environment()
    if not has_account(environment, world):
        raise UsageError(
            what="No Modal account is configured.",
            why=f"{' and '.join(TOKEN_ENV)} are not set, and {PROFILE_PATH} does not exist.",
            fix="Log in: modal setup   or, with a token from modal.com/settings/tokens: export MODAL_TOKEN_ID=ak-... "
            "MODAL_TOKEN_SECRET=as-...",
        )
    try:
        import modal
        import modal.config
    except ImportError as exc:
        raise MissingExtra(verb, "modal", str(exc.name)) from exc
    token_id, token_secret = (environment.get(name, "") for name in TOKEN_ENV)
    server = check_address(str(modal.config.config.get("server_url")), "MODAL_SERVER_URL")
    key = (server, token_id)
    if key not in _CLIENTS:
        # Create our own client for this token: the SDK's single client per process would ignore a change of account.
        _CLIENTS[key] = _knock(modal, token_id, token_secret)
    who = f"MODAL_TOKEN_ID {token_id[:3]}...{token_id[-2:]}" if token_id else "the token of the Modal profile"
    return Connection(modal, _CLIENTS[key], who, str(modal.config.config.get("environment") or ""))


def failures() -> tuple[type[BaseException], ...]:
    """Return the exceptions that a call may raise if Modal or the network fails or the deadline passes."""
    import aiohttp
    import grpclib.exceptions
    import modal.exception

    modal_errors = (modal.exception.Error, grpclib.exceptions.GRPCError, grpclib.exceptions.StreamTerminatedError)
    return (*modal_errors, aiohttp.ClientError, OSError, TimeoutError)


def kind_of(exc: BaseException) -> Kind:
    """Classify an exception. "silent" means that there was no clear response, so the call may have taken effect."""
    from modal import exception as said

    if isinstance(exc, (said.NotFoundError, FileNotFoundError)):
        return "absent"
    if isinstance(exc, (said.AlreadyExistsError, FileExistsError)):
        return "exists"
    if isinstance(exc, said.ResourceExhaustedError):
        return "busy"
    refusals = (
        said.AuthError,
        said.PermissionDeniedError,
        said.InvalidError,
        said.VersionError,
        said.UnimplementedError,
        said.RequestSizeError,
        said.ImageBuildError,
    )
    return "refused" if isinstance(exc, refusals) else "silent"


def text_of(exc: BaseException) -> str:
    """Return the message of an SDK exception, shortened."""
    return (str(exc).strip() or type(exc).__name__)[:_NO_MORE_TEXT]


async def _within(make: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    import asyncio

    return await asyncio.wait_for(make(), timeout_s)


def _knock(modal: Any, token_id: str, token_secret: str) -> Any:
    import asyncio

    client = modal.Client
    by_token = token_id and token_secret
    make = (lambda: client.from_credentials.aio(token_id, token_secret)) if by_token else client.from_env.aio
    try:
        return asyncio.run(_within(make, _OPEN_S))
    except modal.exception.AuthError as exc:
        raise UsageError(
            what="Modal rejected the token." if by_token else "The Modal profile has no token.",
            why=text_of(exc),
            fix="Log in: modal setup   or create a new token: https://modal.com/settings/tokens",
        ) from exc
    except failures() as exc:
        raise Shut(text_of(exc)) from exc
