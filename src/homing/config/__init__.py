"""The run file at home: what a person writes, made into run.json. Never torch, never the network.

paths      NAME -> file; $HOMING_HOME
source     YAML, TOML or JSON -> values with the line of every key        sets  --set a.b=c
schema     every key, with the words of `homing explain`                  keys  the schema, read as a list
check      values against the schema: all mistakes at once                names the nearest key, or another trainer's
resolve    defaults, derived values, cross checks -> wire.run.Run with origins (shape, phases, dial)
derive     parameters, FLOPs, steps        memory  will it fit, and what to lower
prepared   what `homing prep` left         smoke   the same file shrunk to minutes
"""

from homing.config.load import Loaded, load_run, preset_dir
from homing.config.paths import find_run_file, home, newest_run, run_files, typed_name
from homing.config.resolve import PrepSettings
from homing.config.smoke import has_smoke_passed, mark_smoke_passed, needs_smoke_first

__all__ = [
    "Loaded",
    "PrepSettings",
    "find_run_file",
    "has_smoke_passed",
    "home",
    "load_run",
    "mark_smoke_passed",
    "needs_smoke_first",
    "newest_run",
    "preset_dir",
    "run_files",
    "typed_name",
]
