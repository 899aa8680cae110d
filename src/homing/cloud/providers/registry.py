"""Providers by name: a table, sorted; a module is imported when its provider is first used."""

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
    "aws": ("homing.cloud.providers.aws:Aws", "aws"),
    "fake": ("homing.cloud.providers.fake:Fake", None),
    "local": ("homing.cloud.providers.local:Local", None),
    "modal": ("homing.cloud.providers.modal:Modal", "modal"),
    "shadeform": ("homing.cloud.providers.shadeform:Shadeform", None),
    "runpod": ("homing.cloud.providers.runpod:Runpod", None),
    "ssh": ("homing.cloud.providers.ssh:Ssh", None),
}
# Those whose instances no other computer can see: asked from elsewhere they would show nothing, which is not "gone".
HERE_ONLY = ("fake", "local", "ssh")
# Those that are on this computer: they answer at once or not at all.
NEAR = ("fake", "local")
# What an account of it leaves here at the very least. Where that is missing its module, which takes long to load, is
# not asked whether there is one.
_TRACES: dict[str, Callable[[Path, World], bool]] = {
    "aws": lambda home, world: world.exists(home / "aws"),
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
    """Providers that can be asked here although nobody named them: those that need no account, or have one.

    An adapter's module is imported without its SDK: whether there is an account can be told without it.
    """
    found = []
    for name, (where, _) in PROVIDERS.items():
        if name in _TRACES and not _TRACES[name](home, world):
            continue
        module_name, class_name = where.split(":")
        is_configured = getattr(getattr(importlib.import_module(module_name), class_name), "is_configured", None)
        if is_configured is None or is_configured(home, world):
            found.append(name)
    return found


def open_provider(name: str, *, home: Path, owner: str, world: World) -> Provider:
    """`owner` bounds what it may see and touch."""
    if name not in PROVIDERS:
        near = difflib.get_close_matches(name, PROVIDERS, n=1)
        raise UsageError(
            what=f"There is no provider {name!r}.",
            why=f"Known: {', '.join(sorted(PROVIDERS))}." + (f" Did you mean {near[0]}?" if near else ""),
            fix="Name one of them: --provider, or cloud.providers in the run file.",
        )
    where, extra = PROVIDERS[name]
    module_name, class_name = where.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        # Only a missing package of somebody else's is a matter of extras; one of ours is our own mistake.
        if extra is None or str(exc.name).startswith("homing"):
            raise
        raise MissingExtra("launch", extra, str(exc.name)) from exc
    return cast(Provider, getattr(module, class_name)(home=home, owner=owner, world=world))
