"""The run file at home: what a person writes, made into run.json. Never torch, never the network.

paths      NAME -> file; $HOMING_HOME
source     YAML, TOML or JSON -> values with the line of every key        sets  --set a.b=c
schema     every key, with the words of `homing explain`                  keys  the schema, read as a list
check      values against the schema: all mistakes at once                names the nearest key, or another trainer's
resolve    defaults, derived values, cross checks -> wire.run.Run with origins (shape, phases, dial)
derive     parameters, FLOPs, steps        memory  will it fit, and what to lower
prepared   what `homing prep` left         smoke   the same file shrunk to minutes
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from homing.config.load import Loaded, load_run
    from homing.config.paths import find_run_file, home, newest_run, preset_dir, run_files, typed_name
    from homing.config.resolve import PrepSettings
    from homing.config.smoke import has_smoke_failed, has_smoke_passed, mark_smoke, needs_smoke_first

__all__ = [
    "Loaded",
    "PrepSettings",
    "find_run_file",
    "has_smoke_failed",
    "has_smoke_passed",
    "home",
    "load_run",
    "mark_smoke",
    "needs_smoke_first",
    "newest_run",
    "preset_dir",
    "run_files",
    "typed_name",
]

_MODULES = {
    "load": ("Loaded", "load_run"),
    "paths": ("find_run_file", "home", "newest_run", "preset_dir", "run_files", "typed_name"),
    "resolve": ("PrepSettings",),
    "smoke": ("has_smoke_failed", "has_smoke_passed", "mark_smoke", "needs_smoke_first"),
}


def __getattr__(name: str) -> Any:
    """Loaded when first asked for: most verbs want only the home, and the schema is a fifth of their start."""
    import importlib

    for module, inside in _MODULES.items():
        if name in inside:
            found = getattr(importlib.import_module(f"homing.config.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
