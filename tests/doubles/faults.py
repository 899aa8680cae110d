"""Which requests to a simulated provider API fail, and how: at random from a seed, or at exactly the n-th request.

    Faults(rates={"busy": 0.1, "create.lost_after": 0.5}, strikes=(Strike("lost_after", 2, "create"),))
    Dice(faults, Random(seed)).throw("create") -> the names of the faults of this request

    any request  lost_before, lost_after    the connection breaks before or after the request took effect
                 error_before, error_after  a 5xx, before or after the request took effect
                 busy                       429 with Retry-After; no effect
    create       no_capacity, dearer        refused; billed at a higher rate than offered
                 boot_slow, boot_never, boot_dies
                 preempt, notice_preempt    the provider takes the instance back, without or with a notice
                 hang                       its programs freeze and it keeps billing
                 leaves_volume              its disk stays and bills (no provider simulated in this folder does this)
    list         list_late                  the list as it was a moment ago
    describe     odd_state                  a state that is not documented
    destroy      destroy_lies               accepted, shown as gone, and back later; billed all the time
                 destroy_stubborn           only the n-th call takes effect

This module shares no code with the fake cloud of the package. Both use the same names for the same faults, so that one
simulated day can be run against any provider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

__all__ = ["ANY_REQUEST", "ROUTES", "Dice", "Faults", "Strike"]

ANY_REQUEST = frozenset({"lost_before", "lost_after", "error_before", "error_after", "busy"})
_OF_CREATE = {"no_capacity", "dearer", "boot_slow", "boot_never", "boot_dies"}
_OF_CREATE |= {"preempt", "notice_preempt", "hang", "leaves_volume"}
_OF_ROUTE = {
    "create": frozenset(_OF_CREATE),
    "list": frozenset({"list_late"}),
    "describe": frozenset({"odd_state"}),
    "destroy": frozenset({"destroy_lies", "destroy_stubborn"}),
}
ROUTES = frozenset(_OF_ROUTE) | {"account", "offers", "guard", "log", "notice", "volumes", "keys"}


def _can_happen(way: str, route: str) -> bool:
    """Whether this fault exists on this route; "" is any route."""
    specific = frozenset[str]().union(*_OF_ROUTE.values()) if not route else _OF_ROUTE.get(route, frozenset())
    return way in ANY_REQUEST or way in specific


@dataclass(frozen=True)
class Strike:
    """The n-th request of a route (or of all requests, if `of` is empty) fails in this way."""

    way: str
    nth: int = 1
    of: str = ""


@dataclass(frozen=True)
class Faults:
    """All faults of one simulation and their parameters. By default nothing fails."""

    rates: Mapping[str, float] = field(default_factory=dict)  # "way" or "route.way" -> probability
    strikes: tuple[Strike, ...] = ()
    retry_after_s: float = 2.0
    list_lag_s: float = 1.0  # greatest age of a late list
    slow_boot_s: float = 30.0
    dearer_by: float = 1.5
    take_after_s: tuple[float, float] = (5.0, 60.0)  # after create: when an instance is preempted or hangs
    notice_s: float = 10.0
    lie_s: float = 1.0  # how long destroy_lies hides the instance
    stubborn_tries: int = 3
    clock_skew_s: float = 0.0  # how far the provider's clock is ahead

    def __post_init__(self) -> None:
        named = [(strike.of, strike.way) for strike in self.strikes]
        for name in self.rates:
            route, _, way = name.rpartition(".")
            named.append((route, way))
        for route, way in named:
            assert not route or route in ROUTES, f"no such route: {route!r}"
            assert _can_happen(way, route), f"no such fault: {way!r} at {route or 'any route'}"


class Dice:
    """Draws the faults of each request. The same seed and the same requests give the same faults."""

    def __init__(self, faults: Faults, rng: Random) -> None:
        self.faults, self.rng = faults, rng
        self.counts: Counter[str] = Counter()  # route -> requests so far; "" for all of them

    def throw(self, route: str) -> tuple[str, ...]:
        """Return the faults of this request; at most one of them breaks the request itself."""
        assert route in ROUTES, route
        self.counts[""] += 1
        self.counts[route] += 1
        drawn = []
        for strike in self.faults.strikes:
            if strike.of in ("", route) and strike.nth == self.counts[strike.of]:
                drawn.append(strike.way)
        for name, chance in sorted(self.faults.rates.items()):
            of, _, way = name.rpartition(".")
            # One draw for each rate that applies, also after another fault was drawn: otherwise one fault would
            # change all later random numbers.
            if of in ("", route) and _can_happen(way, route) and self.rng.random() < chance:
                drawn.append(way)
        breaks = [way for way in drawn if way in ANY_REQUEST]
        specific = [way for way in drawn if way in _OF_ROUTE.get(route, frozenset())]
        return (*breaks[:1], *specific)
