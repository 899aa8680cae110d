"""Faults of the fake cloud. They occur either at random, from a seed, or at exactly the n-th request.

    any request   lost_before lost_after    the connection is cut, before or after the request took effect
                  error_before error_after  a 5xx, likewise
                  busy                      429 with Retry-After, no effect
    create        no_capacity               refused with a message
                  dearer                    started at a higher rate than offered
                  boot_slow boot_never      the machine boots slowly, or never boots
                  boot_dies                 the machine dies instead of booting
                  preempt notice_preempt    the instance is preempted, without or with a notice
                  hang                      the instance's programs freeze, but it keeps billing
                  leaves_volume             the instance's disk remains and bills after the instance is gone
    list          list_late                 returns a list that is a few seconds old
    describe      odd_state                 returns an undocumented state
    destroy       destroy_lies              204, but the instance keeps billing and reappears after a while
                  destroy_stubborn          202, but only the n-th request takes effect

This module is pure and deterministic: the same seed and the same requests give the same result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from homing.errors import UsageError

__all__ = ["REQUEST_WAYS", "ROUTES", "WAYS", "Dice", "Faults", "Strike"]

REQUEST_WAYS = ("lost_before", "lost_after", "error_before", "error_after", "busy")
_CREATE_WAYS = (
    "no_capacity",
    "dearer",
    "boot_slow",
    "boot_never",
    "boot_dies",
    "preempt",
    "notice_preempt",
    "hang",
    "leaves_volume",
)
_OWN_WAYS: dict[str, tuple[str, ...]] = {
    "create": _CREATE_WAYS,
    "list": ("list_late",),
    "describe": ("odd_state",),
    "destroy": ("destroy_lies", "destroy_stubborn"),
}
WAYS = (*REQUEST_WAYS, *(way for ways in _OWN_WAYS.values() for way in ways))
ROUTES = ("account", "offers", "create", "list", "describe", "destroy", "guard", "log", "notice", "volumes", "keys")


@dataclass(frozen=True)
class Strike:
    """A fault that occurs at the n-th request to the route `of`, or at the n-th request overall if `of` is empty."""

    way: str
    nth: int = 1
    of: str = ""


@dataclass(frozen=True)
class Faults:
    """Which faults may occur, and their parameters. By default, no fault occurs."""

    rates: Mapping[str, float] = field(default_factory=dict)  # fault (`way` or `route.way`) -> probability per request
    strikes: tuple[Strike, ...] = ()
    retry_after_s: float = 2.0
    list_lag_s: float = 1.0  # maximum age of a list returned by list_late
    slow_boot_s: float = 30.0
    dearer_by: float = 1.5
    take_after_s: tuple[float, float] = (5.0, 60.0)  # how long after its creation an instance is preempted or hangs
    notice_s: float = 10.0
    lie_s: float = 1.0  # how long an instance is hidden after a destroy that falsely reports success
    stubborn_tries: int = 3
    clock_skew_s: float = 0.0  # offset of the provider's clock from true time

    def __post_init__(self) -> None:
        named = [(strike.of, strike.way) for strike in self.strikes]
        named += [_split(name) for name in self.rates]
        for route, way in named:
            fitting = REQUEST_WAYS + _OWN_WAYS.get(route, () if route else WAYS)
            if way not in fitting or (route and route not in ROUTES):
                raise UsageError(
                    what=f"The fake cloud has no fault named {way!r}" + (f" for {route} requests." if route else "."),
                    why=f"Known faults: {', '.join(WAYS)}. Known request types: {', '.join(ROUTES)}.",
                    fix="List all faults: homing rehearse --list-faults",
                )

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "rates": dict(self.rates)}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Faults:
        known = {item.name for item in dataclasses.fields(cls)}
        for name in body:
            if name not in known:
                raise UsageError(
                    f"The fake cloud has no fault setting {name!r}.", f"Known: {', '.join(sorted(known))}."
                )
        values = dict(body)
        values["strikes"] = tuple(Strike(**strike) for strike in body.get("strikes", ()))
        values["take_after_s"] = tuple(body.get("take_after_s", cls.take_after_s))
        return cls(**values)


class Dice:
    """Decides which faults each request gets. Its state can be saved, so that a restart continues the sequence."""

    def __init__(self, faults: Faults, rng: Random) -> None:
        self.faults, self.rng = faults, rng
        self.counts: dict[str, int] = {}
        self._chances = {route: _chances(faults, route) for route in ROUTES}

    def throw(self, route: str) -> tuple[str, ...]:
        """Return the faults for the next request to this route, at most one of them from REQUEST_WAYS."""
        for name in ("", route):
            self.counts[name] = self.counts.get(name, 0) + 1
        ways = [s.way for s in self.faults.strikes if s.of in ("", route) and self.counts[s.of] == s.nth]
        # Draw a random number for every possible fault, so that one fault does not change the faults after it.
        ways += [way for way, chance in self._chances[route] if self.rng.random() < chance]
        about_request = [way for way in ways if way in REQUEST_WAYS][:1]
        own = [way for way in ways if way in _OWN_WAYS.get(route, ())]
        return (*about_request, *own)


def _split(name: str) -> tuple[str, str]:
    route, dot, way = name.rpartition(".")
    return (route, way) if dot else ("", name)


def _chances(faults: Faults, route: str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name in sorted(faults.rates):
        of, way = _split(name)
        if of in ("", route) and way in REQUEST_WAYS + _OWN_WAYS.get(route, ()):
            found.append((way, faults.rates[name]))
    return found
