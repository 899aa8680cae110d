"""The guard at home that `launch` starts where a machine would have one guard only: `homing guard` in the background.

    start     a process of its own, which outlives the launch -> its first round, in which it reaches the provider
    is_needed whether anything of this home may bill, or is about to

It is the same guard as one in a terminal: it counts as armed only while it makes its rounds and reaches the provider.
It ends itself when nothing has been there to guard for a while, and signs out, so that nobody counts on it any more.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from homing.cloud.guards import LEAST, armed, guard_on_duty, is_on_duty
from homing.cloud.home import Home
from homing.cloud.providers.base import wait_until
from homing.cloud.status import billing_lines
from homing.errors import UsageError
from homing.units import format_duration

if TYPE_CHECKING:
    from homing.cloud.draft import Draft

__all__ = ["IDLE_S", "LOG", "is_needed", "start", "words", "would_start"]

LOG = "guard.log"  # in the home
IDLE_S = 900.0  # without anything to guard, after which it ends: longer than a launch takes to write its intent
_FIRST_ROUND_S = 90.0


def would_start(draft: Draft, home: Home) -> bool:
    """Whether this launch starts one: one guard is armed, and a guard at home would be the second."""
    names = armed(draft, home)
    return not draft.order.is_one_guard_enough and len(names) == LEAST - 1 and "home" not in names


def start(home: Home, provider: str) -> int:
    """Its process id, once it has made a round in which the provider answered. Nothing is rented before that."""
    home.world.mkdir(home.path)
    env = {**home.world.environment(), "HOMING_HOME": str(home.path)}
    argv = [home.world.python(), "-m", "homing.cli.main", "guard", "--while-billing"]
    pid = home.world.spawn(argv, env, home.path, home.path / LOG)
    if not wait_until(lambda: is_on_duty(home, provider), timeout_s=_FIRST_ROUND_S, every_s=0.5, world=home.world):
        home.world.signal(pid, signal.SIGTERM)
        raise UsageError(
            what=f"The guard in the background did not reach {provider} within {format_duration(_FIRST_ROUND_S)}.",
            why=f"Its log: {home.path / LOG}",
            fix="homing guard   in another terminal shows what keeps it; or with one guard: --one-guard",
        )
    return pid


def is_needed(home: Home) -> bool:
    return bool(billing_lines(home.ledger.open_lines())) or any(run.is_live for run in home.ledger.unfinished_runs())


def words(home: Home) -> str:
    """For `homing runs`: which guard at home is on duty; "" for none."""
    found = guard_on_duty(home)
    if found is None:
        return ""
    kind = "in the background" if found.is_background else "in a terminal or by cron"
    where = f"process {found.pid} on {found.host}" if found.pid else found.host
    reaches = f", reaches {', '.join(found.reaches)}" if found.reaches else ""
    end = f" It ends itself when nothing bills; end it now: kill {found.pid}" if found.is_background else ""
    return f"Guard at home: {kind}, {where}, last round {format_duration(found.age_s)} ago{reaches}.{end}"
