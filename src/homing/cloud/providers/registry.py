"""Table of providers by name, and `AdoptedOnly`. A provider's module is imported when it is first used."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import cast

from homing.cloud.ledger.mark import volume_mark
from homing.cloud.providers.base import (
    Connection,
    Delivering,
    Doubling,
    Feature,
    Instance,
    Needs,
    Offer,
    Order,
    Place,
    Provider,
    Request,
    Resource,
    names_of,
)
from homing.errors import MissingExtra, ProviderRefused, UsageError
from homing.world import World

__all__ = ["HERE_ONLY", "NEAR", "PROVIDERS", "AdoptedOnly", "configured", "open_provider"]

# name -> (module:class, the extra to install or None)
PROVIDERS: dict[str, tuple[str, str | None]] = {
    "aws": ("homing.cloud.providers.aws.provider:Aws", "aws"),
    "fake": ("homing.cloud.providers.fake.provider:Fake", None),
    "local": ("homing.cloud.providers.local.provider:Local", None),
    "modal": ("homing.cloud.providers.modal.provider:Modal", "modal"),
    "shadeform": ("homing.cloud.providers.shadeform.provider:Shadeform", None),
    "runpod": ("homing.cloud.providers.runpod.provider:Runpod", None),
    "ssh": ("homing.cloud.providers.ssh.provider:Ssh", None),
}
# Providers whose instances are visible only from this computer. Elsewhere their lists are empty, which does not mean
# that the instances are gone.
HERE_ONLY = ("fake", "local", "ssh")
# Providers on this computer. They respond immediately or not at all.
NEAR = ("fake", "local")
# Cheap checks for any sign of an account, for every provider that needs one. If there is none, the provider's module is
# not imported, because loading it is slow.
_TRACES: dict[str, Callable[[Path, World], bool]] = {
    "aws": lambda home, world: world.exists(home / "aws"),
    "fake": lambda home, world: (
        bool(world.environment().get("HOMING_FAKE_URL")) or world.exists(home / "fake" / "server.json")
    ),
    "modal": lambda home, world: (
        any(world.environment().get(name) for name in ("MODAL_TOKEN_ID", "MODAL_CONFIG_PATH"))
        or world.exists(os.path.expanduser("~/.modal.toml"))
    ),
    "runpod": lambda home, world: (
        bool(world.environment().get("RUNPOD_API_KEY"))
        or world.exists(Path(world.environment().get("HOME", "/")) / ".runpod" / "config.toml")
    ),
    "shadeform": lambda home, world: bool(world.environment().get("SHADEFORM_API_KEY")),
}


def configured(home: Path, world: World) -> list[str]:
    """Return the providers to query by default: those that need no account, and those configured here.

    This imports adapter modules but not their SDKs, which are not needed to check for an account.
    """
    return [name for name in PROVIDERS if name not in _TRACES or _has_account(name, home, world)]


def _has_account(name: str, home: Path, world: World) -> bool:
    if not _TRACES[name](home, world):
        return False
    module_name, class_name = PROVIDERS[name][0].split(":")
    is_configured = getattr(importlib.import_module(module_name), class_name).is_configured
    return bool(is_configured(home, world))


def open_provider(name: str, *, home: Path, owner: str, world: World) -> Provider:
    """Return the provider's adapter, which can see and change only the resources of `owner`."""
    if name not in PROVIDERS:
        near = difflib.get_close_matches(name, PROVIDERS, n=1)
        raise UsageError(
            what=f"Unknown provider: {name!r}.",
            why=f"Known: {', '.join(sorted(PROVIDERS))}." + (f" Did you mean {near[0]}?" if near else ""),
            fix="Choose one with --provider, or set cloud.providers in the run file.",
        )
    where, extra = PROVIDERS[name]
    module_name, class_name = where.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        # Only a missing third-party package can be fixed by installing an extra. A missing module of our own is a bug.
        if extra is None or str(exc.name).startswith("homing"):
            raise
        raise MissingExtra("launch", extra, str(exc.name)) from exc
    return cast(Provider, getattr(module, class_name)(home=home, owner=owner, world=world))


class AdoptedOnly:
    """A provider wrapper that hides other home directories' resources unless this home directory has adopted them.

    An adoption covers individual instances and the volumes that their runs keep or name, not everything that the other
    home directory owns. All other resources stay hidden and cannot be destroyed, even if requested by id.
    """

    def __init__(self, inner: Provider, marks: frozenset[str], named: Callable[[], frozenset[str]] = frozenset) -> None:
        """Restrict the provider `inner` to the adopted marks.

        `named` returns the marks of the volumes that adopted runs refer to by name. Only the resource methods call it.
        """
        self._inner, self._marks, self._named = inner, marks, named
        self.name = inner.name

    # These are properties, evaluated only when needed, because some providers must send a request to get the value.

    @property
    def page(self) -> str:
        return self._inner.page

    @property
    def guard(self) -> str:
        return self._inner.guard

    @property
    def settle_s(self) -> float:
        return self._inner.settle_s

    @property
    def cannot(self) -> Mapping[Feature, str]:
        return self._inner.cannot

    @property
    def num_creates(self) -> int:
        return self._inner.num_creates if isinstance(self._inner, Doubling) else 1

    def account(self) -> str:
        return self._inner.account()

    def account_names(self) -> tuple[str, ...]:
        return names_of(self._inner)

    def offers(self, needs: Needs) -> list[Offer]:
        return self._inner.offers(needs)

    def plan(self, offer: Offer, order: Order) -> Request:
        return self._inner.plan(offer, order)

    def place(self, mark: str) -> Place:
        return self._inner.place(mark)

    def create(self, request: Request) -> Instance:
        raise AssertionError(f"{request.mark}: nothing is created under another home directory's mark")

    def hand_over(self, request: Request, instance_id: str) -> None:
        raise AssertionError(f"{request.mark}: nothing is created under another home directory's mark")

    def describe(self, instance_id: str) -> Instance:
        return self._checked(instance_id)

    def list_owned(self) -> list[Instance]:
        return [instance for instance in self._inner.list_owned() if instance.mark in self._marks]

    def destroy(self, instance_id: str) -> None:
        self._checked(instance_id)
        self._inner.destroy(instance_id)

    def log(self, instance_id: str) -> str:
        self._checked(instance_id)
        return self._inner.log(instance_id)

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None:
        self._checked(instance_id)
        self._inner.set_guard(instance_id, spend_limit_usd, end_by)

    def deliver(self, instance_id: str) -> None:
        self._checked(instance_id)
        if isinstance(self._inner, Delivering):
            self._inner.deliver(instance_id)

    def list_resources(self) -> list[Resource]:
        things = self._things()
        return [resource for resource in self._inner.list_resources() if resource.mark in things]

    def destroy_resource(self, resource: Resource) -> None:
        if resource.mark not in self._things():
            raise _not_adopted(resource.id, resource.mark)
        self._inner.destroy_resource(resource)

    def connection(self, instance_id: str) -> Connection | None:
        self._checked(instance_id)
        return self._inner.connection(instance_id)

    def _things(self) -> frozenset[str]:
        return self._marks | {volume_mark(mark) for mark in self._marks} | self._named()

    def _checked(self, instance_id: str) -> Instance:
        instance = self._inner.describe(instance_id)
        # An instance that is gone may no longer have a mark. Accept it anyway, because nothing is left to protect.
        if instance.state != "gone" and instance.mark not in self._marks:
            raise _not_adopted(instance_id, instance.mark)
        return instance


def _not_adopted(thing: str, mark: str) -> ProviderRefused:
    return ProviderRefused(
        what=f"{thing} was not adopted by this homing home directory.",
        why=f"Its mark (its name in homing) is {mark}." if mark else "It has no mark.",
        fix="List the resources that you can change: homing runs",
    )
