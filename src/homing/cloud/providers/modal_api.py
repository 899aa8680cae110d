"""Modal's SDK as the adapter needs it: its own calls, each with a deadline, and its refusals as ours.

    ask      reads, and what may be done twice: tried again while Modal is silent or busy, then ProviderSilent
    create   once; Unsure where nobody knows whether it took effect, so that the adapter looks before it asks again

Nothing here knows what is rented or why.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from decimal import Decimal
from functools import cached_property
from typing import Any, TypeVar

from homing.cloud.figures import Figures
from homing.cloud.providers.rest import Unsure, Unwelcome
from homing.errors import ProviderSilent
from homing.store.modal_client import TIMEOUT_S, Door, Shut, failures, kind_of, open_door, text_of
from homing.world import World

__all__ = ["APP", "ModalApi"]

log = logging.getLogger(__name__)
T = TypeVar("T")
APP = "homing"  # all our sandboxes live in it, whichever home they are of
_TRIES = 3  # beside those that the SDK makes by itself within a second
_BUILD_S = 2400.0  # an image with torch, the first time
_LOG_LINES = 200
_RELOAD_S = 55
_NO_ANSWER: Any = object()
Sandboxes = list[Any]  # a name outside the class, where `list` is a method


class ModalApi:
    def __init__(self, world: World) -> None:
        self._world = world

    @cached_property
    def door(self) -> Door:
        try:
            return open_door(self._world)
        except Shut as exc:
            raise self._silent("It does not answer at all.", str(exc)) from exc

    @cached_property
    def workspace(self) -> str:
        """Its name, with the environment in it where one is set: in another one nothing of ours is listed either."""

        async def look() -> str:
            found = self.door.sdk.Workspace.from_context(client=self.door.client)
            await found.hydrate.aio()
            return str(found.name or "")

        name = self.ask("Workspace", look)
        if not name:
            raise self._silent("It does not say which workspace the token is of.", "The name is empty.")
        return f"{name}/{self.door.environment}" if self.door.environment else name

    # --- what sandboxes are made of ---

    def app(self, *, may_create: bool) -> Any | None:
        """None where nobody has made it yet, so that there is nothing in it."""
        names = {"create_if_missing": may_create, "client": self.door.client}
        return self.ask("App.lookup", lambda: self.door.sdk.App.lookup.aio(APP, **names), absent=None)

    def volume(self, name: str) -> Any:
        return self.door.sdk.Volume.from_name(name, version=2, client=self.door.client)

    def build(self, image: Any, app: Any) -> None:
        self.ask("Image.build", lambda: image.build.aio(app), timeout_s=_BUILD_S)

    def rates(self) -> dict[str, Decimal]:
        """Modal's own list, dollars by the hour; empty where this account or client cannot be told."""

        async def look() -> dict[str, Any]:
            return dict(await self.door.sdk.Workspace.from_context(client=self.door.client).billing.rates.aio())

        try:
            told, read = self.ask("billing.rates", look), Figures("modal")
        except Unwelcome as exc:
            if exc.status == 401:
                raise
            return {}
        rates = {name: read.rate(name, value) for name, value in told.items()}
        for problem in read.problems:
            log.warning("%s The dated table counts.", problem)
        return {name: rate for name, rate in rates.items() if rate}

    # --- sandboxes ---

    def create(self, argv: list[str], timeout_s: float, **wanted: Any) -> Any:
        """Unsure, Unwelcome, or a sandbox that is scheduled. After `timeout_s` in the queue the SDK takes it back."""
        door = self.door
        try:
            return door.call(lambda: door.sdk.Sandbox.create.aio(*argv, client=door.client, **wanted), timeout_s)
        except failures() as exc:
            if kind_of(exc) == "silent":
                raise Unsure(f"{type(exc).__name__}: {text_of(exc)}") from exc
            raise self._refusal(exc, "Sandbox.create") from exc

    def by_name(self, name: str) -> Any | None:
        names = {"client": self.door.client}
        return self.ask(
            "Sandbox.from_name", lambda: self.door.sdk.Sandbox.from_name.aio(APP, name, **names), absent=None
        )

    def by_id(self, sandbox_id: str) -> Any | None:
        names = {"client": self.door.client}
        return self.ask("Sandbox.from_id", lambda: self.door.sdk.Sandbox.from_id.aio(sandbox_id, **names), absent=None)

    def list(self, app: Any, tags: dict[str, str]) -> Sandboxes:
        """Those that run. One that ends while we look is simply not among them."""

        async def look() -> Sandboxes:
            found = self.door.sdk.Sandbox.list.aio(app_id=app.app_id, tags=tags, client=self.door.client)
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
            return f"(Modal's log could not be read: {exc.why})"  # asked for beside an error that is told anyway

    def reload(self, sandbox: Any) -> str:
        """Why the mounts could not be reloaded now, or ""."""
        try:
            self.door.call(lambda: sandbox.reload_volumes.aio(timeout=_RELOAD_S), _RELOAD_S + 5)
        except failures() as exc:
            return text_of(exc)
        return ""

    def let_go(self, sandbox: Any) -> None:
        """To speak to the machine itself the SDK opened a connection of its own to it."""
        with contextlib.suppress(*failures()):
            self.door.call(sandbox.detach.aio)

    # --- calls ---

    def ask(
        self, what: str, make: Callable[[], Awaitable[T]], *, timeout_s: float = TIMEOUT_S, absent: T = _NO_ANSWER
    ) -> T:
        """`absent`: what to return where Modal itself says that there is none."""
        door = self.door
        for number in range(1, _TRIES + 1):
            try:
                return door.call(make, timeout_s)
            except failures() as exc:
                kind = kind_of(exc)
                if kind == "absent" and absent is not _NO_ANSWER:
                    return absent
                if kind not in ("busy", "silent"):
                    raise self._refusal(exc, what) from exc
                problem = text_of(exc)
            if number < _TRIES:
                self._world.sleep(0.5 * 2**number)
        raise self._silent(f"{what} failed {_TRIES} times.", problem)

    def _silent(self, what: str, problem: str) -> ProviderSilent:
        return ProviderSilent(
            what=f"modal cannot be asked now: {what}",
            why=problem,
            doubt="So nothing is known: what was billing may bill on.",
            fix="Try again in a minute: homing runs   Modal's own page: https://modal.com/apps",
        )

    def _refusal(self, exc: BaseException, what: str) -> Unwelcome:
        name = type(exc).__name__
        if name in ("AuthError", "PermissionDeniedError"):
            fix = "modal setup   or a new token from https://modal.com/settings/tokens"
            return Unwelcome(
                "modal refuses the token.", f"{text_of(exc)} ({self.door.who})", fix, status=401, text=name
            )
        fix = "Read its words above; its own page may say more: https://modal.com/apps"
        return Unwelcome(f"modal refuses {what}.", text_of(exc), fix, status=400, text=name)
