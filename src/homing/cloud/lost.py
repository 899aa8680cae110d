"""What a home has lost that would know its machines again: told by `homing runs` and `homing doctor`.

    owner lost    the marks in the ledger tell it, and the next look writes it anew
    ledger lost   the owner's mark finds every machine; what a run may spend comes back with `homing adopt`
    both lost     machines carry a mark that nobody here knows: only the runs' own records in their stores tell it

Looks, and changes nothing.
"""

from __future__ import annotations

import shlex

from homing.cloud.home import LAUNCH_NOTE, Home
from homing.units import counted
from homing.wire import codec, names
from homing.wire.run import Run

__all__ = ["lost_owner", "unknown_runs", "what_is_lost"]

_SHOWN = 5


def what_is_lost(home: Home) -> list[str]:
    """One sentence each. Asked before anything else: a lost owner is made good by the first who needs it."""
    owner, runs = lost_owner(home), unknown_runs(home)
    said = [f"{home.owner_path} was lost; the marks in the ledger tell that it is {owner}."] if owner else []
    if not runs:
        return said
    adopt = "   ".join(f"homing adopt {shlex.quote(store)} {run_id}" for run_id, store in list(runs.items())[:_SHOWN])
    text = f"The ledger does not know {counted(len(runs), 'run')} launched from here."
    if not home.has_owner and not owner:
        text += f" {home.owner_path} is gone too, so what was rented may bill under a mark that is not known here."
    return [*said, f"{text} What the store knows: {adopt}"]


def lost_owner(home: Home) -> str:
    """As the ledger tells it; "" where nothing is lost, or nothing tells it."""
    return "" if home.has_owner else home.owner_in_ledger()


def unknown_runs(home: Home) -> dict[str, str]:
    """Runs that were launched from here and are in no ledger, newest first -> the store where their records are."""
    folder = home.path / "runs"
    ids = home.world.listdir(folder) if home.world.is_dir(folder) else []
    known = home.ledger.run_ids() if ids and home.has_ledger else set()
    unknown = [each for each in sorted(ids, reverse=True) if each not in known]
    return {each: _store_of(home, each) for each in unknown if home.world.exists(folder / each / LAUNCH_NOTE)}


def _store_of(home: Home, run_id: str) -> str:
    try:
        return codec.loads(Run, home.world.read(home.run_dir(run_id) / names.RUN)).store
    except (OSError, codec.WireError):
        return "STORE"
