"""Describes a run's guards: which are armed before a launch, which are alive after it, what happens if all of them die.

    on the instance    the agent's watchdog, and a dead-man process that is independent of the agent
    at the provider    its own timer or limit, if it has one
    on your computer   `homing guard`, which records on every pass which providers it could reach

They act in the order of wire/guard_timing.py. At least two must be alive. With fewer, a launch destroys what it has
started, unless --one-guard is set. If a machine cannot end its own billing, the two guards on it save the work within
the limit but do not count here.
"""

from __future__ import annotations

from homing.cloud.contact.home_guard import is_on_duty, out_of_reach
from homing.cloud.home import Home
from homing.cloud.launch.draft import Draft
from homing.cloud.ledger import meter
from homing.cloud.providers.base import Cautioning, can_end_itself
from homing.errors import UsageError
from homing.units import format_duration
from homing.wire.control_files import Heartbeat

__all__ = ["LEAST", "armed", "check_armed", "count_alive", "guards", "would_start"]

LEAST = 2


def guards(draft: Draft, home: Home, *, starts_one: bool = False) -> list[str]:
    """Return sentences that describe each of the launch's guards, and what happens if this computer is off.

    `starts_one` means that the launch itself starts a guard on this computer.
    """
    provider = home.provider(draft.order.offer.provider)
    limit, rate = meter.show_usd(draft.spend_limit_usd), meter.show_usd(draft.order.offer.rate_usd_per_hour)
    if provider.name == "local" and can_end_itself(provider):
        return _on_this_computer(limit, rate, draft.run.name, is_on_duty(home, provider.name))
    said = [
        f"armed: the agent's watchdog on the instance ends it within {limit}, even with this laptop closed.",
        "armed: a dead-man process next to the agent restarts it if it dies, or else ends the instance.",
    ]
    if not can_end_itself(provider):
        said = [
            f"not armed: {provider.cannot['end_itself']} The agent still stops and pushes within {limit}.",
            _unattended(draft),
        ]
    if provider.guard:
        said.append(f"armed: {provider.guard}")
    else:
        said.append(f"not armed: {provider.cannot['native_spend_limit']}")
    why_not = out_of_reach(home, provider.name)
    if starts_one:
        said.append("armed by this launch: a local guard, in the background, while this computer is on.")
    elif not why_not:
        said.append("armed: the local guard, while its computer is on.")
    elif is_on_duty(home):
        said.append(f"not armed: {why_not[0].lower()}{why_not[1:]}")
    else:
        said.append("not armed: no local guard is running. Start one on any computer: homing guard")
    if provider.guard and "native_deadline" in provider.cannot:  # this guard is on the machine, not at the provider
        said.append(
            "If this computer is off and homing's processes on the instance die,"
            " the instance still terminates itself within the limit."
        )
        end = f"it keeps billing at {rate}/h until you run: homing destroy {draft.run.name}"
        said.append(f"If the instance hangs or never comes up, and no local guard is running, {end}")
    elif provider.guard:
        said.append("If this computer and the instance both fail, the provider terminates the instance at the limit.")
    else:
        end = f"the instance keeps billing at {rate}/h until you run: homing destroy {draft.run.name}"
        said.append(f"If this computer is off and homing's processes on the instance die, {end}")
    return said + (provider.cautions() if isinstance(provider, Cautioning) else [])


def _on_this_computer(limit: str, rate: str, name: str, has_guard: bool) -> list[str]:
    """Describe the guards of a local run. Nothing is rented, so a missing guard is harmless and is not listed."""
    said = [
        "Nothing is rented: the run trains on this computer."
        f" {rate}/h is a made-up rate for trying out limits and receipts.",
        f"armed: the agent's watchdog ends it within {limit}, even with this terminal closed.",
        "armed: a dead-man process next to the agent restarts it if it dies, or else ends the run.",
    ]
    if has_guard:
        said.append("armed: the local guard, while this computer is on.")
    said.append(
        "If this computer is switched off, you lose no real money, but the simulated cost keeps growing until you run:"
        f" homing destroy {name}"
    )
    return said


def _unattended(draft: Draft) -> str:
    """State how much a machine that cannot end its own billing costs if this computer is off when the run finishes."""
    time_s, name = draft.run.limits.time_s, draft.run.name
    until = f"{format_duration(time_s)} after its launch" if time_s else "its spend limit"
    worst = meter.show_usd(draft.worst_case_usd)
    return (
        f"If the run finishes while this computer is off, its instance keeps billing until {until}, {worst} in total;"
        f" `homing watch {name}` or `homing guard` on any computer ends it at once. For more time:"
        f" limits.time, or homing limit {name} --time"
    )


def check_armed(draft: Draft, home: Home) -> None:
    """Raise UsageError before anything is rented if fewer than two guards are armed, unless --one-guard is set."""
    names = armed(draft, home)
    if len(names) >= LEAST or draft.order.is_one_guard_enough:
        return
    provider = home.provider(draft.order.offer.provider)
    raise UsageError(
        what=f"Only one guard would watch this instance ({', '.join(names) or 'none'}); at least {LEAST} are required.",
        why=f"{provider.cannot.get('end_itself', '')} {out_of_reach(home, provider.name)}".strip(),
        fix=f"Run homing guard in another terminal, or accept one guard: {draft.order.words.to('launch')} --one-guard"
        f"   See: homing explain cloud.{provider.name}",
    )


def armed(draft: Draft, home: Home) -> list[str]:
    """Return the names of the guards that this launch will have. Both --json and the simulator count them."""
    provider = home.provider(draft.order.offer.provider)
    own = can_end_itself(provider)
    every = [
        ("agent", own),
        ("dead-man", own),
        ("provider", bool(provider.guard)),
        ("home", is_on_duty(home, provider.name)),
    ]
    return [name for name, is_armed in every if is_armed]


def would_start(draft: Draft, home: Home) -> bool:
    """Return True if only one guard is armed, and it is not the local one, so that this launch starts a local one."""
    names = armed(draft, home)
    return not draft.order.is_one_guard_enough and len(names) == LEAST - 1 and "home" not in names


def count_alive(draft: Draft, home: Home, heartbeat: Heartbeat) -> int:
    """Return the number of independent guards that are alive, according to their latest reports."""
    provider = home.provider(draft.order.offer.provider)
    on_machine = 1 + heartbeat.has_dead_man if can_end_itself(provider) else 0
    return on_machine + bool(provider.guard) + is_on_duty(home, provider.name)
