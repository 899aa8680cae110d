"""Calls to Modal's SDK, each with a deadline, and the mapping of its errors to ours.

    ask      reads and idempotent calls: retried if Modal does not respond or is busy; then raises ProviderSilent
    create   not retried; raises Unsure if it may have taken effect, so that the adapter checks before it retries

This module knows nothing about what is rented or why.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from decimal import Decimal
from functools import cached_property
from typing import Any, TypeVar

from homing.cloud.check_numbers import Figures
from homing.cloud.providers.rest import Unsure, Unwelcome
from homing.errors import ProviderSilent
from homing.store.modal.client import TIMEOUT_S, Connection, Shut, connect, failures, kind_of, text_of
from homing.world import Retries, World

__all__ = ["APP", "ModalApi"]

log = logging.getLogger(__name__)
T = TypeVar("T")
APP = "homing"  # this app contains the sandboxes of all homing home directories
_RETRIES = Retries(tries=3, first_s=1.0)  # in addition to the SDK's own retries, which take about a second
_BUILD_S = 2400.0  # time limit for the first build of an image with torch
_LOG_LINES = 200
_RELOAD_S = 55
_NO_ANSWER: Any = object()
Sandboxes = list[Any]  # alias for `list`, which is the name of a method in the class below


class ModalApi:
    def __init__(self, world: World) -> None:
        self._world = world

    @cached_property
    def connection(self) -> Connection:
        try:
            return connect(self._world)
        except Shut as exc:
            raise self._silent("could not connect.", str(exc)) from exc

    @cached_property
    def workspace(self) -> str:
        """Return the workspace's name, followed by the environment if one is set.

        The environment is included because Modal lists resources only within one environment.
        """

        async def look() -> str:
            found = self.connection.sdk.Workspace.from_context(client=self.connection.client)
            await found.hydrate.aio()
            return str(found.name or "")

        name = self.ask("Workspace", look)
        if not name:
            raise self._silent("Modal did not report the token's workspace.", "The workspace name is empty.")
        return f"{name}/{self.connection.environment}" if self.connection.environment else name

    # --- app, volume, image and rates ---

    def app(self, *, may_create: bool) -> Any | None:
        """Return our app, or None if it was never created, in which case we have no sandboxes."""
        names = {"create_if_missing": may_create, "client": self.connection.client}
        return self.ask("App.lookup", lambda: self.connection.sdk.App.lookup.aio(APP, **names), absent=None)

    def volume(self, name: str) -> Any:
        return self.connection.sdk.Volume.from_name(name, version=2, client=self.connection.client)

    def build(self, image: Any, app: Any) -> None:
        self.ask("Image.build", lambda: image.build.aio(app), timeout_s=_BUILD_S)

    def rates(self) -> dict[str, Decimal]:
        """Return Modal's own rates in dollars per hour, or an empty dict if this account or SDK cannot query them."""

        async def look() -> dict[str, Any]:
            return dict(
                await self.connection.sdk.Workspace.from_context(client=self.connection.client).billing.rates.aio()
            )

        try:
            reported, read = self.ask("billing.rates", look), Figures("modal")
        except Unwelcome as exc:
            if exc.status == 401:
                raise
            return {}
        rates = {name: read.rate(name, value) for name, value in reported.items()}
        for problem in read.problems:
            log.warning("%s Using the table of published rates.", problem)
        return {name: rate for name, rate in rates.items() if rate}

    # --- sandboxes ---

    def create(self, argv: list[str], timeout_s: float, **wanted: Any) -> Any:
        """Create a sandbox and return it once it is scheduled; raises Unsure or Unwelcome.

        The SDK cancels a sandbox that has been in the queue for `timeout_s`.
        """
        connection = self.connection
        try:
            return connection.call(
                lambda: connection.sdk.Sandbox.create.aio(*argv, client=connection.client, **wanted), timeout_s
            )
        except failures() as exc:
            if kind_of(exc) == "silent":
                raise Unsure(f"{type(exc).__name__}: {text_of(exc)}") from exc
            raise self._refusal(exc, "Sandbox.create") from exc

    def by_name(self, name: str) -> Any | None:
        names = {"client": self.connection.client}
        return self.ask(
            "Sandbox.from_name", lambda: self.connection.sdk.Sandbox.from_name.aio(APP, name, **names), absent=None
        )

    def by_id(self, sandbox_id: str) -> Any | None:
        names = {"client": self.connection.client}
        return self.ask(
            "Sandbox.from_id", lambda: self.connection.sdk.Sandbox.from_id.aio(sandbox_id, **names), absent=None
        )

    def list(self, app: Any, tags: dict[str, str]) -> Sandboxes:
        """Return the running sandboxes. A sandbox that ends during the call is simply not included."""

        async def look() -> Sandboxes:
            found = self.connection.sdk.Sandbox.list.aio(app_id=app.app_id, tags=tags, client=self.connection.client)
            return [sandbox async for sandbox in found]

        return self.ask("Sandbox.list", look)

    def tags(self, sandbox: Any) -> dict[str, str]:
        return dict(self.ask("Sandbox.get_tags", sandbox.get_tags.aio, absent={}))

    def terminate(self, sandbox: Any) -> None:
        self.ask("Sandbox.terminate", sandbox.terminate.aio, absent=None)

    def log(self, sandbox: Any) -> str:
        async def read() -> str:
            return "".join([entry.message async for entry in sandbox.logs.tail.aio(_LOG_LINES)])

        try:
            return self.ask("Sandbox.logs", read, absent="")
        except (Unwelcome, ProviderSilent) as exc:
            # do not raise, because the log only adds details to an error that is reported anyway
            return f"(could not read Modal's log: {exc.why})"

    def reload(self, sandbox: Any) -> str:
        """Reload the sandbox's Volume mounts; return the reason if that failed, else ""."""
        try:
            self.connection.call(lambda: sandbox.reload_volumes.aio(timeout=_RELOAD_S), _RELOAD_S + 5)
        except failures() as exc:
            return text_of(exc)
        return ""

    def let_go(self, sandbox: Any) -> None:
        """Close the direct connection that the SDK opened to the sandbox."""
        with contextlib.suppress(*failures()):
            self.connection.call(sandbox.detach.aio)

    # --- calls ---

    def ask(
        self, what: str, make: Callable[[], Awaitable[T]], *, timeout_s: float = TIMEOUT_S, absent: T = _NO_ANSWER
    ) -> T:
        """Run a call with retries, or return `absent` if Modal itself says that the object does not exist."""
        connection = self.connection
        for _ in _RETRIES.attempts(self._world):
            try:
                return connection.call(make, timeout_s)
            except failures() as exc:
                kind = kind_of(exc)
                if kind == "absent" and absent is not _NO_ANSWER:
                    return absent
                if kind not in ("busy", "silent"):
                    raise self._refusal(exc, what) from exc
                problem = text_of(exc)
        raise self._silent(f"{what} failed {_RETRIES.tries} times.", problem)

    def _silent(self, what: str, problem: str) -> ProviderSilent:
        return ProviderSilent(
            what=f"modal is not responding: {what}",
            why=problem,
            doubt="The current state is unknown; instances may still be billing.",
            fix="Check again in a minute: homing runs   Or open Modal's dashboard: https://modal.com/apps",
        )

    def _refusal(self, exc: BaseException, what: str) -> Unwelcome:
        name = type(exc).__name__
        if name in ("AuthError", "PermissionDeniedError"):
            fix = "Log in: modal setup   or create a new token at https://modal.com/settings/tokens"
            return Unwelcome(
                "modal rejected the token.", f"{text_of(exc)} ({self.connection.who})", fix, status=401, text=name
            )
        fix = "See Modal's message above; its web console may show more: https://modal.com/apps"
        return Unwelcome(f"modal refused {what}.", text_of(exc), fix, status=400, text=name)
