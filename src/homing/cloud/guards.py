"""Which guards are armed before a launch, which of them live after it, and what happens if all machines die.

    on the instance   the agent's watchdog, and a dead-man process that needs nothing of the agent
    at the provider   its own timer or limit, where it has one
    at home           `homing guard`, which signs in on every round

They act in the order of wire/limit.py. Two that live are the least; with fewer a launch undoes itself unless told.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from homing.cloud import meter
from homing.cloud.home import Home
from homing.wire.control import Heartbeat

if TYPE_CHECKING:
    from homing.cloud.launch import Draft

__all__ = ["armed", "count_alive", "guards", "is_on_duty", "sign_in"]

LEAST = 2
_FILE = "guard.json"  # in the home: when a guard last made its round


def guards(draft: Draft, home: Home) -> list[str]:
    """For a person, before anything is rented: one sentence each, and what would happen without this computer."""
    provider = home.provider(draft.order.offer.provider)
    limit, rate = meter.show_usd(draft.spend_limit_usd), meter.show_usd(draft.order.offer.rate_usd_per_hour)
    said = [
        f"armed: the agent's watchdog on the instance ends it inside {limit}, also with this laptop closed.",
        "armed: a dead-man process beside the agent starts it again when it dies, and ends the instance without it.",
    ]
    if provider.guard:
        said.append(f"armed: {provider.guard}")
    else:
        said.append(f"not armed: {provider.cannot['native_spend_limit']}")
    if is_on_duty(home):
        said.append("armed: the guard at home, while its computer is on.")
    else:
        said.append("not armed: no guard at home is on duty. Start one anywhere: homing guard")
    if provider.guard:
        said.append("If this computer and the instance both die, the provider ends it at the limit.")
    else:
        end = f"it bills on at {rate}/h until: homing destroy {draft.run.name}"
        said.append(f"If this computer and the instance's programs both die, {end}")
    return said


def armed(draft: Draft, home: Home) -> list[str]:
    """Their names, as planned: what --json and the simulator count."""
    provider = home.provider(draft.order.offer.provider)
    others = [("provider", bool(provider.guard)), ("home", is_on_duty(home))]
    return ["agent", "dead-man", *(name for name, is_armed in others if is_armed)]


def count_alive(draft: Draft, home: Home, heartbeat: Heartbeat) -> int:
    """Those that need nothing of each other, and of which the last sign is fresh."""
    provider = home.provider(draft.order.offer.provider)
    return 1 + heartbeat.has_dead_man + bool(provider.guard) + is_on_duty(home)


def is_on_duty(home: Home) -> bool:
    """Whether a guard of this home made its round lately, as often as it said it would, and will come again."""
    found = _last_round(home)
    return found is not None and bool(found.get("comes_again"))


def sign_in(home: Home, every_s: float, *, is_once: bool = False) -> None:
    """One round alone, by hand or by cron, is no promise: it is believed when another came before it in time."""
    comes_again = not is_once or _last_round(home) is not None
    note = {"t": home.world.now(), "every_s": every_s, "host": home.world.host(), "comes_again": comes_again}
    home.world.mkdir(home.path)
    home.world.write(home.path / _FILE, json.dumps({"schema": "homing.guard/2", **note}).encode())


def _last_round(home: Home) -> dict[str, Any] | None:
    """None where there was none, or it is too long ago for the interval it named."""
    try:
        note = json.loads(home.world.read(home.path / _FILE))
        age_s, every_s = home.world.now() - float(note["t"]), float(note["every_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(note) if -every_s <= age_s <= 2 * every_s + 60 else None
