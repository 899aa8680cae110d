"""What a simulated provider knows: the rented things, when each changes by itself, and what each has cost so far.

    _add      -> a new Rental that bills from now on; _draw_fate puts its faults on its schedule
    tick      -> everything that was scheduled until now: boot, failure, notice, hang, preemption, spend guard, deletion
    next_due  -> when tick has something to do again
    bill      -> who was billed from when to when: the truth that tests compare the ledger with

The simulated providers of this folder (RunPod) and of tests/sim (EC2, Modal) put their own API on top. This module
shares no code with the fake cloud of the package: a mistake there about states, billing or time must not hide here. It
has no clock, randomness or I/O of its own; only its arguments and the calls decide what happens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from random import Random
from typing import Any, Protocol

from tests.doubles.faults import Dice, Faults

__all__ = ["BillLine", "CloudState", "Machines", "Refusal", "Rental", "Settings"]

# What can be scheduled for a rental. Of two events at the same moment the one named first comes first.
_EVENTS = ("fail", "boot", "notice", "hang", "delete", "preempt", "guard")
_ENDS = {"delete": "deleted", "preempt": "preempted", "guard": "guard"}


class Refusal(Exception):
    """The provider understands a request and refuses it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {text}")
        self.status, self.text = status, text


class Machines(Protocol):
    """Runs the rented machines. Every call may be repeated; none may wait for a machine."""

    def start(self, instance_id: str, files: dict[str, bytes], argv: list[str], env: dict[str, str]) -> None: ...

    def end(self, instance_id: str) -> None: ...  # immediate and final; an unknown id is success

    def is_running(self, instance_id: str) -> bool: ...

    def notice(self, instance_id: str, seconds: float) -> None: ...  # the machine will be taken away

    def freeze(self, instance_id: str) -> None: ...

    def log(self, instance_id: str) -> str: ...


@dataclass(frozen=True)
class Settings:
    """How a provider works when nothing fails. `has_guard` and `deduplicates` concern only the fake cloud."""

    has_guard: bool = True  # it ends an instance by itself at a spend or a date
    settle_s: float = 2.0  # how old its list may be
    boot_s: float = 0.5  # from create to the first command
    destroy_s: float = 0.0  # from the delete call until the instance is gone; it bills until then
    retention_s: float = 86400.0  # how long it still describes an instance that ended
    deduplicates: bool = False  # by name


@dataclass(frozen=True)
class BillLine:
    id: str
    mark: str
    since: float
    until: float | None  # None: it still bills
    usd: Decimal
    kind: str = "instance"


@dataclass
class Rental:
    """One instance or volume. It bills from `created_at` to `ended_at`, whatever its machine does."""

    id: str
    mark: str
    rate: Decimal  # dollars per hour
    created_at: float
    kind: str = "instance"
    schedule: dict[str, float] = field(default_factory=dict)  # event -> when; events that happened are removed
    booted_at: float | None = None
    has_failed: bool = False
    is_hung: bool = False
    ended_at: float | None = None
    ended_by: str = ""  # deleted, preempted, guard, itself
    notice_s: float = 0.0  # from the notice to the preemption
    guard_usd: str | None = None
    hidden_until: float = -math.inf  # destroy_lies: shown as gone until then
    deletes_left: int = 0  # destroy_stubborn: delete calls that it still ignores, and the one that works
    files: dict[str, Any] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def rate_usd_per_hour(self) -> str:
        return str(self.rate)

    def spend(self, now: float) -> Decimal:
        last = now if self.ended_at is None or now < self.ended_at else self.ended_at
        seconds = Decimal(str(last - self.created_at)) if last > self.created_at else Decimal(0)
        return seconds * self.rate / 3600

    def limit_spend(self, usd: Decimal) -> None:
        """Schedule the end at the moment at which it has cost this much."""
        self.guard_usd = str(usd)
        self.schedule["guard"] = self.created_at + 3600 * float(usd / self.rate)

    def is_listed(self, at: float) -> bool:
        """Whether a list made at this time has it."""
        return self.created_at <= at and self.state(at) != "gone"

    def state(self, at: float) -> str:
        """Return pending, running, ending or gone, as the provider shows it."""
        if at < self.hidden_until or (self.ended_at is not None and self.ended_at <= at):
            return "gone"
        if self.deletes_left or "delete" in self.schedule:
            return "ending"
        return "pending" if self.booted_at is None and not self.has_failed else "running"


class CloudState:
    def __init__(
        self,
        *,
        now: Callable[[], float],
        machines: Any,
        settings: Settings | None = None,
        faults: Faults | None = None,
        seed: int = 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called after each effect and before its answer."""
        self.settings, self.faults = settings or Settings(), faults or Faults()
        self._true_now, self._machines, self._on_change = now, machines, on_change
        self._dice = Dice(self.faults, Random(seed))
        self._rentals: dict[str, Rental] = {}
        self._num_made = 0
        self._is_changed = False

    # --- time and money ---

    def now(self) -> float:
        """Return the time by the provider's clock."""
        return self._true_now() + self.faults.clock_skew_s

    def tick(self) -> None:
        """Let everything happen that was scheduled until now."""
        now = self.now()
        if self._earliest() > now:
            return
        for rental in list(self._live.values()):
            while rental.ended_at is None and (due := self._due(rental, now)):
                self._happen(rental, *due)
        self._publish()

    def next_due(self) -> float | None:
        """Return when the next scheduled event happens, by the true clock; None if there is none."""
        at = self._earliest()
        return None if math.isinf(at) else at - self.faults.clock_skew_s

    def spend(self, rental: Rental) -> Decimal:
        return rental.spend(self.now())

    def bill(self) -> list[BillLine]:
        return [
            BillLine(each.id, each.mark, each.created_at, each.ended_at, self.spend(each), each.kind)
            for each in self._rentals.values()
        ]

    @property
    def _live(self) -> dict[str, Rental]:
        """What bills now, by id."""
        return {key: each for key, each in self._rentals.items() if each.ended_at is None}

    @property
    def _things(self) -> dict[str, Rental]:
        """Everything that was ever rented, under the name that the simulator's checks use for any cloud."""
        return self._rentals

    def live(self) -> dict[str, int]:
        """Return mark -> number of instances that bill now; two under one mark are a duplicate."""
        return dict(Counter(each.mark for each in self._live.values() if each.kind == "instance"))

    # --- what a test does to an instance ---

    def preempt(self, instance_id: str, notice_s: float | None = None) -> None:
        """Take the instance back: at once, or this many seconds after a notice."""
        rental, now = self._live[instance_id], self.now()
        rental.schedule["preempt"] = now + (notice_s or 0.0)
        if notice_s is not None:
            rental.schedule["notice"], rental.notice_s = now, notice_s
        self.tick()

    def hang(self, instance_id: str) -> None:
        self._live[instance_id].schedule["hang"] = self.now()
        self.tick()

    def change_faults(self, faults: Faults) -> None:
        """Use these faults from the next request on; the counts of requests start again."""
        self.faults, self._dice = faults, Dice(faults, self._dice.rng)

    # --- for the API on top: rent, end ---

    def _add(self, kind: str, mark: str, rate: Decimal, rental_id: str = "") -> Rental:
        self._num_made += 1
        rental = Rental(rental_id or f"{kind}-{self._num_made}", mark, rate, self.now(), kind)
        self._rentals[rental.id] = rental
        self._is_changed = True
        return rental

    def _draw_fate(self, rental: Rental, ways: tuple[str, ...]) -> None:
        """Schedule the boot, and what the faults of its create call do to it later."""
        faults, began = self.faults, rental.created_at
        first, last = faults.take_after_s
        # Drawn for each instance, so that one fault does not change the random numbers of all later ones.
        struck_at = began + first + (last - first) * self._dice.rng.random()
        boots_at = began + self.settings.boot_s + (faults.slow_boot_s if "boot_slow" in ways else 0.0)
        if "boot_dies" in ways:
            rental.schedule["fail"] = boots_at
        elif "boot_never" not in ways:
            rental.schedule["boot"] = boots_at
        if "notice_preempt" in ways:
            rental.notice_s = faults.notice_s
            rental.schedule.update(notice=struck_at, preempt=struck_at + faults.notice_s)
        elif "preempt" in ways:
            rental.schedule["preempt"] = struck_at
        if "hang" in ways:
            rental.schedule["hang"] = struck_at

    def _request_end(self, rental: Rental, ways: tuple[str, ...]) -> None:
        """Handle a delete call that the provider accepts; with a fault it only says so."""
        now = self.now()
        self._is_changed = True
        # After a lie the instance is visible again for as long as a list may be old: otherwise a second lie
        # could not be distinguished from the real end.
        if "destroy_lies" in ways and now - rental.hidden_until >= self.settings.settle_s:
            rental.hidden_until = now + self.faults.lie_s
            return
        if "destroy_stubborn" in ways and rental.deletes_left == 0:
            rental.deletes_left = self.faults.stubborn_tries
        if rental.deletes_left > 1:
            rental.deletes_left -= 1
        elif self.settings.destroy_s:
            rental.schedule.setdefault("delete", now + self.settings.destroy_s)
        else:
            self._end(rental, now, "deleted")

    def _end(self, rental: Rental, at: float, by: str) -> None:
        """Stop billing, and then the machine."""
        rental.ended_at, rental.ended_by = at, by
        rental.schedule.clear()
        self._is_changed = True
        if rental.kind == "instance":
            self._publish()
            self._machines.end(rental.id)

    def _start(self, rental: Rental) -> None:
        """Start the machine of an instance that has booted. The API on top says what it runs."""
        raise NotImplementedError

    def _publish(self) -> None:
        if self._is_changed:
            self._is_changed = False
            self._on_change()

    # --- scheduled events ---

    def _earliest(self) -> float:
        return min((at for each in self._live.values() for at in each.schedule.values()), default=math.inf)

    def _due(self, rental: Rental, now: float) -> tuple[str, float] | None:
        found = [(at, _EVENTS.index(event)) for event, at in rental.schedule.items() if at <= now]
        if not found:
            return None
        at, number = min(found)
        return _EVENTS[number], at

    def _happen(self, rental: Rental, event: str, at: float) -> None:
        del rental.schedule[event]
        self._is_changed = True
        if event in _ENDS:
            self._end(rental, at, _ENDS[event])
        elif event == "boot":
            rental.booted_at = at
            self._start(rental)
        elif event == "fail":
            rental.has_failed = True
        elif event == "notice":
            self._machines.notice(rental.id, rental.notice_s)
        elif rental.booted_at is not None:
            rental.is_hung = True
            self._machines.freeze(rental.id)
        elif "boot" in rental.schedule:  # what does not run yet hangs as soon as it does
            rental.schedule["hang"] = rental.schedule["boot"]
