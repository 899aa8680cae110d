"""The run file: what the user writes, resolved into run.json. Never imports torch.

paths      $HOMING_HOME, presets, ./runs      projects  NAME -> run file; which folder a run belongs to
source     YAML, TOML or JSON -> values with the line of every key        sets  --set a.b=c
schema     every key with its description                                 keys  the schema as a list of keys
check      validate values against the schema, report all mistakes        names suggestions for unknown keys
resolve    defaults, derived values, cross checks -> wire.run.Run with origins (shape, phases, dial)
derive     parameters, FLOPs, steps                                       memory  peak GPU memory, and what to lower
prepared   the output of `homing prep`                                    smoke   the same run shrunk to minutes

Only open_weights_hub, for `model.from` and `init_from: hf:...`, reaches the network.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from homing.config.load import Loaded, load_run
    from homing.config.paths import home, newest_run, preset_dir, run_files, typed_name
    from homing.config.projects import find_run_file
    from homing.config.resolve.resolve import PrepSettings
    from homing.config.resolve.smoke_profile import has_smoke_failed, has_smoke_passed, mark_smoke, needs_smoke_first

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
    "paths": ("home", "newest_run", "preset_dir", "run_files", "typed_name"),
    "projects": ("find_run_file",),
    "resolve.resolve": ("PrepSettings",),
    "resolve.smoke_profile": ("has_smoke_failed", "has_smoke_passed", "mark_smoke", "needs_smoke_first"),
}


def __getattr__(name: str) -> Any:
    """Import the module on first use: most verbs need only `home`, and the schema is a fifth of their start-up time."""
    import importlib

    for module, inside in _MODULES.items():
        if name in inside:
            found = getattr(importlib.import_module(f"homing.config.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
