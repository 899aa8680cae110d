"""Modal's SDK on the stage, as far as the adapter calls it: its own names, its own exceptions, each call over the line.

SimDoor    in the place of store/modal_client.Connection: a call is a coroutine that never waits for anything real
Sdk        `modal` itself: App.lookup.aio, Sandbox.create.aio, ...; whatever arrives is tests/sim/modal.py's
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from modal import exception
from tests.doubles.absurd import chance_in
from tests.doubles.modal_cloud import CORE_USD, GIB_USD
from tests.sim.kernel import Broken
from tests.sim.world import SimWorld

from homing.cloud.providers.modal import offers
from homing.store.modal.client import TIMEOUT_S

if TYPE_CHECKING:
    from tests.sim.modal import SimModal

__all__ = ["SimDoor"]


class SimDoor:
    def __init__(self, world: SimWorld) -> None:
        self.client, self.who, self.environment = None, "the token of the simulation", ""
        self.sdk = _Sdk(world)

    def call(self, make: Callable[[], Awaitable[Any]], timeout_s: float = TIMEOUT_S) -> Any:
        self.sdk.timeout_s = timeout_s
        waiting = make().__await__()
        try:
            next(waiting)
        except StopIteration as done:
            return done.value
        raise Broken("a call of the SDK waits for something that is not on the stage")


class _Sdk:
    """`modal` itself: each name that ends in `.aio` is one call over the line."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self.timeout_s = TIMEOUT_S
        self.App = SimpleNamespace(lookup=SimpleNamespace(aio=self._app))
        self.Image = SimpleNamespace(debian_slim=lambda **_: _Image(self))
        self.Secret = SimpleNamespace(from_dict=dict)
        self.Sandbox = SimpleNamespace(
            create=SimpleNamespace(aio=self._create),
            from_name=SimpleNamespace(aio=self._from_name),
            from_id=SimpleNamespace(aio=self._from_id),
            list=SimpleNamespace(aio=self._list),
        )
        rates = SimpleNamespace(rates=SimpleNamespace(aio=self._rates))
        here = SimpleNamespace(billing=rates, name="simulation", hydrate=SimpleNamespace(aio=self._hydrate))
        self.Workspace = SimpleNamespace(from_context=lambda **_: here)

    @property
    def line(self) -> SimModal:
        return self._world.sim.cloud  # type: ignore[attr-defined, no-any-return]

    def ask(self, route: str, deed: Callable[[tuple[str, ...]], Any]) -> Any:
        return self.line.carry(self._world, f"modal {route}", lambda: self.line.cloud.ask(route, deed), self.timeout_s)

    async def _app(self, name: str, *, create_if_missing: bool, client: Any) -> Any:
        def look(ways: tuple[str, ...]) -> Any:
            self.line.cloud.has_app = self.line.cloud.has_app or create_if_missing
            if not self.line.cloud.has_app:
                raise exception.NotFoundError(f"App {name} not found")
            return SimpleNamespace(app_id="ap-1")

        return self.ask("account", look)

    async def _hydrate(self) -> None:
        self.ask("account", lambda ways: None)

    async def _rates(self) -> dict[str, Decimal]:
        # All cards cost the same: a card without a reported rate would be offered at that of the dated table.
        rates = {offers.rate_key(card.name): self._card_usd for card in offers._CARDS}
        messages = self.ask("offers", lambda ways: rates)
        return chance_in(messages, self.line.absurd_dice, self.line.absurd_rate)

    @property
    def _card_usd(self) -> Decimal:
        """Of the card alone: with what goes with one it costs what a day's limits are drawn for."""
        return self.line.rate - _rest_usd(2.0, 16 << 10)

    def _gpu_usd(self, asked: str | None) -> Decimal:
        """Of `H100!:1` and the like."""
        return self._card_usd * int(asked.partition(":")[2]) if asked is not None else Decimal(0)

    async def _create(
        self, *argv: str, client: Any, image: _Image, secrets: list[dict[str, str]], **messages: Any
    ) -> Any:
        files = {path: self._world.read(source) for path, source in image.files}
        env = {**messages["env"], **{name: value for secret in secrets for name, value in secret.items()}}
        at = list(argv).index("homing") + 1  # after the first command's own text
        wanted = {**messages, "files": files, "argv": list(argv[at:]), "env": env}
        until = self._world.sim.t + self.timeout_s
        rate = self._gpu_usd(messages["gpu"]) + _rest_usd(messages["cpu"][1], messages["memory"][1])
        made = self.ask("create", lambda ways: self.line.cloud.create(wanted, rate, ways))
        if not made:
            self.line._pause(self._world, until - self._world.sim.t)
            raise TimeoutError("no card was free")
        return _Sandbox(self, made)

    async def _from_name(self, app: str, name: str, *, client: Any) -> _Sandbox:
        def look(ways: tuple[str, ...]) -> str:
            found = next((thing.id for thing in self.line.cloud.seen(ways) if thing.mark == name), None)
            if found is None:
                raise exception.NotFoundError(f"Sandbox {name} not found")
            return found

        return _Sandbox(self, self.ask("list", look))

    async def _from_id(self, sandbox_id: str, *, client: Any) -> _Sandbox:
        cloud = self.line.cloud
        return _Sandbox(self, sandbox_id, self.ask("describe", lambda ways: cloud.code_of(cloud.by_id(sandbox_id))))

    async def _list(self, *, app_id: str, tags: dict[str, str], client: Any) -> AsyncIterator[_Sandbox]:
        def look(ways: tuple[str, ...]) -> list[str]:
            cloud = self.line.cloud
            return [thing.id for thing in cloud.seen(ways) if tags.items() <= cloud.tags[thing.id].items()]

        for sandbox_id in self.ask("list", look):
            yield _Sandbox(self, sandbox_id)


def _rest_usd(cores: float, mib: int) -> Decimal:
    return Decimal(str(cores)) * Decimal(str(CORE_USD)) + Decimal(mib) / 1024 * Decimal(str(GIB_USD))


class _Sandbox:
    """A handle; `returncode` is that of the moment it was got."""

    def __init__(self, sdk: _Sdk, sandbox_id: str, returncode: int | None = None) -> None:
        self._sdk, self.object_id, self.returncode = sdk, sandbox_id, returncode
        self.get_tags = SimpleNamespace(aio=self._tags)
        self.terminate = SimpleNamespace(aio=self._terminate)
        self.logs = SimpleNamespace(tail=SimpleNamespace(aio=self._tail))

    async def _tags(self) -> dict[str, str]:
        messages = self._sdk.ask("describe", lambda ways: self._sdk.line.cloud.tags[self.object_id])
        return chance_in(messages, self._sdk.line.absurd_dice, self._sdk.line.absurd_rate)

    async def _terminate(self) -> None:
        self._sdk.ask("destroy", lambda ways: self._sdk.line.cloud.terminate(self.object_id, ways))

    async def _tail(self, num_lines: int) -> AsyncIterator[Any]:
        for line in self._sdk.ask("log", lambda ways: []):
            yield line


@dataclasses.dataclass(frozen=True)
class _Image:
    sdk: _Sdk
    files: tuple[tuple[str, str], ...] = ()  # path there, source here

    def uv_pip_install(self, *lines: str, **options: Any) -> _Image:
        return self

    def add_local_file(self, source: str, path: str) -> _Image:
        return dataclasses.replace(self, files=(*self.files, (path, source)))

    @property
    def build(self) -> Any:
        async def build(app: Any) -> None:
            self.sdk.ask("volumes", lambda ways: None)

        return SimpleNamespace(aio=build)
