"""Checks whether a local guard is on duty, and lets a launch start one in the background.

    sign_in     records a guard's pass, and the providers that responded, in $HOMING_HOME/guard.json
    is_on_duty  returns whether a guard signed in recently and will make further passes
    start       starts `homing guard` as a process that outlives the launch, and waits for its first pass
    is_needed   returns whether any run in the ledger is live or any instance may be billing

A guard in the background works like one in a terminal: it counts as armed only while it keeps making passes and
reaching the provider. When there has been nothing to guard for a while, the guard signs out and exits.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from homing.cloud.home import Home
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.providers.base import wait_until
from homing.errors import UsageError
from homing.units import format_duration

__all__ = [
    "IDLE_S",
    "LOG",
    "OnDuty",
    "guard_on_duty",
    "is_needed",
    "is_on_duty",
    "out_of_reach",
    "sign_in",
    "sign_out",
    "start",
    "words",
]

LOG = "guard.log"  # name of the guard's log file in $HOMING_HOME
_FILE = "guard.json"  # says when a guard last made a pass, and which providers responded
# A guard with nothing to guard exits after this long. By then, a launch that started it has recorded its intent.
IDLE_S = 900.0
_FIRST_ROUND_S = 90.0


def start(home: Home, provider: str) -> int:
    """Start the guard, and return its process id once it has made a pass that reached the provider.

    The launch rents nothing until then. Raises UsageError if no pass reaches the provider before the timeout.
    """
    home.world.mkdir(home.path)
    env = {**home.world.environment(), "HOMING_HOME": str(home.path)}
    argv = [home.world.python(), "-m", "homing.cli.main", "guard", "--while-billing"]
    pid = home.world.spawn(argv, env, home.path, home.path / LOG)
    if not wait_until(lambda: is_on_duty(home, provider), timeout_s=_FIRST_ROUND_S, every_s=0.5, world=home.world):
        home.world.signal(pid, signal.SIGTERM)
        raise UsageError(
            what=f"The background guard did not reach {provider} within {format_duration(_FIRST_ROUND_S)}.",
            why=f"See its log: {home.path / LOG}",
            fix="See the error: homing guard   or launch with a single guard: --one-guard",
        )
    return pid


def is_needed(home: Home) -> bool:
    return bool(billing_lines(home.ledger.open_lines())) or any(run.is_live for run in home.ledger.unfinished_runs())


def words(home: Home) -> str:
    """Return the line about the local guard that `homing runs` prints, or "" if no guard is on duty."""
    found = guard_on_duty(home)
    if found is None:
        return ""
    kind = "in the background" if found.is_background else "in a terminal or by cron"
    where = f"process {found.pid} on {found.host}" if found.pid else found.host
    reaches = f", reaches {', '.join(found.reaches)}" if found.reaches else ""
    end = f" It exits when nothing is billing. Stop it now: kill {found.pid}" if found.is_background else ""
    return f"Local guard: {kind}, {where}, last check {format_duration(found.age_s)} ago{reaches}.{end}"


def is_on_duty(home: Home, provider: str | None = None) -> bool:
    """Return True if a local guard made a pass recently, given its interval, and will make further passes.

    With `provider`, the guard must also have listed that provider's instances, because a guard that cannot list
    them, for example without an API key, cannot destroy them either.
    """
    note = _read_note(home)
    found = note if provider is None else note.get("reached", {}).get(provider, {})
    return bool(found.get("comes_again")) and _is_fresh(home, found)


def out_of_reach(home: Home, provider: str) -> str:
    """Return a sentence that says why no local guard protects instances of this provider, or "" if one does."""
    if is_on_duty(home, provider):
        return ""
    if is_on_duty(home):
        return f"The local guard cannot list instances on {provider}: start it where {provider}'s API key is set."
    return "No local guard is running."


@dataclass(frozen=True)
class OnDuty:
    """The local guard that made the most recent pass."""

    host: str
    pid: int  # 0 if unknown
    age_s: float  # seconds since the guard's last pass
    reaches: tuple[str, ...]  # names of the providers whose instances this guard can list
    is_background: bool  # True if a launch started the guard


def guard_on_duty(home: Home) -> OnDuty | None:
    if not is_on_duty(home):
        return None
    note = _read_note(home)
    there = sorted(name for name in note.get("reached", {}) if is_on_duty(home, name))
    age_s = max(0.0, home.world.now() - float(note["t"]))
    pid = note.get("pid")
    is_background = note.get("is_background") is True
    return OnDuty(str(note.get("host", "")), pid if isinstance(pid, int) else 0, age_s, tuple(there), is_background)


def sign_out(home: Home) -> None:
    """Record that this guard is exiting, so that it no longer counts as on duty.

    Any other local guard signs in again on its next pass.
    """
    note = _read_note(home)
    there = {name: {**each, "comes_again": False} for name, each in note.get("reached", {}).items()}
    if note:
        text = json.dumps({**note, "comes_again": False, "reached": there})
        home.world.write(home.path / _FILE, text.encode())


def sign_in(
    home: Home, every_s: float, *, is_once: bool = False, reached: Collection[str] = (), background_pid: int = 0
) -> None:
    """Record a guard's pass. A single pass, run manually or by cron, counts only if it closely follows another one.

    `reached` names the providers that responded to this pass's list call. Providers that other local guards reached,
    perhaps with different keys, are kept until their entries are too old.
    """
    before = _read_note(home)
    now = {"t": home.world.now(), "every_s": every_s}
    note = {**now, "host": home.world.host(), "comes_again": not is_once or _is_fresh(home, before)}
    note |= {"pid": background_pid, "is_background": bool(background_pid)}
    there = dict(before.get("reached", {}))
    for name in reached:
        there[name] = {**now, "comes_again": not is_once or _is_fresh(home, there.get(name, {}))}
    home.world.mkdir(home.path)
    home.world.write(home.path / _FILE, json.dumps({"schema": "homing.guard/3", **note, "reached": there}).encode())


def _read_note(home: Home) -> dict[str, Any]:
    """Return the record of the last guard that signed in, or an empty dict if it is missing or damaged."""
    try:
        note = json.loads(home.world.read(home.path / _FILE))
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(note, dict) and isinstance(note.get("reached", {}), dict)
    return note if is_whole and all(isinstance(each, dict) for each in note.get("reached", {}).values()) else {}


def _is_fresh(home: Home, note: dict[str, Any]) -> bool:
    """Return True if the pass recorded in `note` is recent enough, given the guard's interval."""
    try:
        age_s, every_s = home.world.now() - float(note["t"]), float(note["every_s"])
    except (ValueError, KeyError, TypeError):
        return False
    return -every_s <= age_s <= 2 * every_s + 60
