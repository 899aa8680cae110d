"""Table of providers by name. A provider's module is imported when it is first used."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from homing.cloud.providers.base import Provider
from homing.errors import MissingExtra, UsageError
from homing.world import World

__all__ = ["HERE_ONLY", "NEAR", "PROVIDERS", "configured", "open_provider"]

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
