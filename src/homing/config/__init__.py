"""The run file: loads what the user wrote and resolves it into run.json. Never imports torch.

home_and_run_files  $HOMING_HOME, presets, ./runs; NAME -> run file; which folder a run belongs to
load                NAME or PATH, --set a.b=c and --smoke -> the resolved run
parse               YAML, TOML or JSON -> values with the line of every key; reports all mistakes, with suggestions
schema              every key with its description
resolve             defaults, derived values, cross checks -> wire.run_json.Run with origins; the smoke profile
estimate            parameters, FLOPs, steps, peak GPU memory, and what to lower if it does not fit
weights             open weights and adapters to start from
prepared_data       the output of `homing prep`

Only weights.fetch_from_hub, for `model.from` and `init_from: hf:...`, accesses the network.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from homing.config.home_and_run_files import find_run_file, home, newest_run, preset_dir, run_files, typed_name
    from homing.config.load import Loaded, load_run
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
    "home_and_run_files": ("find_run_file", "home", "newest_run", "preset_dir", "run_files", "typed_name"),
    "resolve.resolve": ("PrepSettings",),
    "resolve.smoke_profile": ("has_smoke_failed", "has_smoke_passed", "mark_smoke", "needs_smoke_first"),
}


def __getattr__(name: str) -> Any:
    """Import modules on first use, because most verbs need only `home`, and importing the schema is slow."""
    import importlib

    for module, inside in _MODULES.items():
        if name in inside:
            found = getattr(importlib.import_module(f"homing.config.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
