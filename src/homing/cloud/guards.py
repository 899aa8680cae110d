"""Which guards are armed before a launch, which of them live after it, and what happens if all machines die.

    on the instance   the agent's watchdog, and a dead-man process that needs nothing of the agent
    at the provider   its own timer or limit, where it has one
    at home           `homing guard`, which signs in on every round with the providers that it could reach

They act in the order of wire/limit.py. Two that live are the least; with fewer a launch undoes itself unless told.
Where a machine cannot end its own billing, its two save the work inside the limit and count for nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from homing.cloud import meter
from homing.cloud.home import Home
from homing.cloud.providers.base import Cautioning, Provider
from homing.errors import UsageError
from homing.units import format_duration
from homing.wire.control import Heartbeat

if TYPE_CHECKING:
    from homing.cloud.draft import Draft

__all__ = [
    "OnDuty",
    "armed",
    "can_end_itself",
    "check_armed",
    "count_alive",
    "guard_on_duty",
    "guards",
    "is_on_duty",
    "out_of_reach",
    "sign_in",
    "sign_out",
]

LEAST = 2
_FILE = "guard.json"  # in the home: when a guard last made its round, and which providers answered it


def guards(draft: Draft, home: Home, *, starts_one: bool = False) -> list[str]:
    """For a person, before anything is rented: one sentence each, and what would happen without this computer.
    `starts_one`: the launch starts a guard at home itself."""
    provider = home.provider(draft.order.offer.provider)
    limit, rate = meter.show_usd(draft.spend_limit_usd), meter.show_usd(draft.order.offer.rate_usd_per_hour)
    if provider.name == "local" and can_end_itself(provider):
        return _on_this_computer(limit, rate, draft.run.name, is_on_duty(home, provider.name))
    said = [
        f"armed: the agent's watchdog on the instance ends it inside {limit}, also with this laptop closed.",
        "armed: a dead-man process beside the agent starts it again when it dies, and ends the instance without it.",
    ]
    if not can_end_itself(provider):
        said = [
            f"not armed: {provider.cannot['end_itself']} Its agent stops and pushes inside {limit} all the same.",
            _unattended(draft),
        ]
    if provider.guard:
        said.append(f"armed: {provider.guard}")
    else:
        said.append(f"not armed: {provider.cannot['native_spend_limit']}")
    why_not = out_of_reach(home, provider.name)
    if starts_one:
        said.append("armed by this launch: a guard at home, in the background, while this computer is on.")
    elif not why_not:
        said.append("armed: the guard at home, while its computer is on.")
    elif is_on_duty(home):
        said.append(f"not armed: {why_not[0].lower()}{why_not[1:]}")
    else:
        said.append("not armed: no guard at home is on duty. Start one anywhere: homing guard")
    if provider.guard and "native_deadline" in provider.cannot:  # its guard is on the machine, not at the provider
        said.append("If this computer is off and our programs there die, the machine ends itself inside the limit.")
        end = f"it bills on at {rate}/h until: homing destroy {draft.run.name}"
        said.append(f"If the machine hangs or never comes up, and no guard is at home, {end}")
    elif provider.guard:
        said.append("If this computer and the instance both die, the provider ends it at the limit.")
    else:
        end = f"it bills on at {rate}/h until: homing destroy {draft.run.name}"
        said.append(f"If this computer and the instance's programs both die, {end}")
    return said + (provider.cautions() if isinstance(provider, Cautioning) else [])


def _on_this_computer(limit: str, rate: str, name: str, has_guard: bool) -> list[str]:
    """Where nothing is rented, what is not armed is no danger: nobody is frightened by it."""
    said = [
        f"Nothing is rented: it trains on this computer. {rate}/h is made up, so that limit and receipt can be tried.",
        f"armed: the agent's watchdog ends it inside {limit}, also with this terminal closed.",
        "armed: a dead-man process beside the agent starts it again when it dies, and ends the run without it.",
    ]
    if has_guard:
        said.append("armed: the guard at home, while this computer is on.")
    said.append(f"If this computer goes off, no money is lost; only the count goes on, until: homing destroy {name}")
    return said


def _unattended(draft: Draft) -> str:
    """What it costs when nobody is there at its end: the price of a machine that cannot end itself."""
    time_s, name = draft.run.limits.time_s, draft.run.name
    until = f"{format_duration(time_s)} after its launch" if time_s else "its spend limit"
    worst = meter.show_usd(draft.worst_case_usd)
    return (
        f"Done while this computer is off, it bills on until {until}, {worst} in all; `homing watch {name}` or"
        f" `homing guard` anywhere ends it at once. More time: limits.time, or homing limit {name} --time"
    )


def can_end_itself(provider: Provider) -> bool:
    return "end_itself" not in provider.cannot


def check_armed(draft: Draft, home: Home) -> None:
    """While nothing is rented: a launch that would end for lack of guards, or be guarded by one alone, is refused."""
    names = armed(draft, home)
    if len(names) >= LEAST or draft.order.is_one_guard_enough:
        return
    provider = home.provider(draft.order.offer.provider)
    raise UsageError(
        what=f"Only one guard would stand over this machine ({', '.join(names) or 'none'}), and {LEAST} are the least.",
        why=f"{provider.cannot.get('end_itself', '')} {out_of_reach(home, provider.name)}".strip(),
        fix=f"homing guard   in another terminal, or with one guard: {draft.order.words.to('launch')} --one-guard"
        f"   See: homing explain cloud.{provider.name}",
    )


def armed(draft: Draft, home: Home) -> list[str]:
    """Their names, as planned: what --json and the simulator count."""
    provider = home.provider(draft.order.offer.provider)
    own = can_end_itself(provider)
    every = [
        ("agent", own),
        ("dead-man", own),
        ("provider", bool(provider.guard)),
        ("home", is_on_duty(home, provider.name)),
    ]
    return [name for name, is_armed in every if is_armed]


def count_alive(draft: Draft, home: Home, heartbeat: Heartbeat) -> int:
    """Those that need nothing of each other, and of which the last sign is fresh."""
    provider = home.provider(draft.order.offer.provider)
    on_machine = 1 + heartbeat.has_dead_man if can_end_itself(provider) else 0
    return on_machine + bool(provider.guard) + is_on_duty(home, provider.name)


def is_on_duty(home: Home, provider: str | None = None) -> bool:
    """Whether a guard of this home made its round lately, as often as it said it would, and will come again. With
    `provider`, only if that guard could list the instances there: without its API key it could end none of them."""
    note = _read_note(home)
    found = note if provider is None else note.get("reached", {}).get(provider, {})
    return bool(found.get("comes_again")) and _is_fresh(home, found)


def out_of_reach(home: Home, provider: str) -> str:
    """Why no guard at home counts for this provider, in a sentence; "" where one does."""
    if is_on_duty(home, provider):
        return ""
    if is_on_duty(home):
        return f"The guard at home cannot list instances on {provider}: start it where {provider}'s API key is set."
    return "No guard at home is on duty."


@dataclass(frozen=True)
class OnDuty:
    """The guard of this home that made the last round."""

    host: str
    pid: int  # 0: unknown
    age_s: float  # of its last round
    reaches: tuple[str, ...]  # providers
    is_background: bool  # a launch started it


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
    """A guard that ends counts no more, from now on. Another one of this home signs in again with its next round."""
    note = _read_note(home)
    there = {name: {**each, "comes_again": False} for name, each in note.get("reached", {}).items()}
    if note:
        text = json.dumps({**note, "comes_again": False, "reached": there})
        home.world.write(home.path / _FILE, text.encode())


def sign_in(
    home: Home, every_s: float, *, is_once: bool = False, reached: Collection[str] = (), background_pid: int = 0
) -> None:
    """One round alone, by hand or by cron, is no promise: it is believed when another came before it in time.

    `reached` are the providers that answered this round's list call. What another guard of this home reached, which
    may run where other keys are set, stays until it is too old.
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
    """What guards have written; empty where none has, or it is damaged."""
    try:
        note = json.loads(home.world.read(home.path / _FILE))
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(note, dict) and isinstance(note.get("reached", {}), dict)
    return note if is_whole and all(isinstance(each, dict) for each in note.get("reached", {}).values()) else {}


def _is_fresh(home: Home, note: dict[str, Any]) -> bool:
    """False where there was no round, or it is too long ago for the interval it named."""
    try:
        age_s, every_s = home.world.now() - float(note["t"]), float(note["every_s"])
    except (ValueError, KeyError, TypeError):
        return False
    return -every_s <= age_s <= 2 * every_s + 60
