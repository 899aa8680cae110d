"""What a seed decides about a day: the kind of cloud, the faults, the trainer, the person. Nothing happens here.

What goes wrong is drawn before anything runs, and each kind is drawn whether it is taken or not, so that a seed's day
keeps its nature when the code under test changes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults

__all__ = ["RATE_USD_PER_HOUR", "Day"]

RATE_USD_PER_HOUR = "3.6"  # a tenth of a cent a second
_REQUEST_WAYS = ("lost_before", "lost_after", "error_before", "error_after", "busy")
_ROLES = (
    "launch",
    "resume",
    "adopt",
    "watch",
    "agent",
    "dead-man",
    "trainer",
    "sync--watch",
    "sync--once",
    "sync--fetch",
    "destroy",
    "guard",
    "stop",
    "runs",
    "limit",
)
_PERSONS = (
    "watches",
    "leaves",
    "stops",
    "destroys",
    "never comes back",
    "resumes",
    "resumes",
    "does two things at once",
    "adopts elsewhere",
    "raises the limit",
)


class Day:
    """What the seed decided."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        r = self.random = random.Random(f"day {seed}")
        self.kinds: list[str] = []
        self.boot_s = r.choice((2.0, 10.0, 40.0))
        self.settings = Settings(
            has_guard=r.random() < 0.5,
            settle_s=r.choice((0.0, 2.0, 5.0)),
            boot_s=self.boot_s,
            destroy_s=r.choice((0.0, 0.0, 4.0)),
            retention_s=r.choice((86400.0, 86400.0, 60.0)),
            deduplicates=r.random() < 0.25,
        )
        self.trainer = self._trainer()
        work_s = min(200.0, self.trainer["steps"] * self.trainer["step_s"])
        self.limit_s = self.boot_s + 340.0 + r.choice((0.3, 0.7, 1.5, 2.0)) * work_s
        self.limit_usd = (Decimal(RATE_USD_PER_HOUR) * Decimal(str(round(self.limit_s))) / 3600).quantize(
            Decimal("0.001")
        )
        self.faults = self._cloud_faults()
        self.home_skew_s = self._pick("clock skew", 0.25, lambda: r.choice((-1, 1)) * r.choice((3.0, 30.0, 600.0)), 0.0)
        self.machine_skew_s = self._pick("machine clocks", 0.25, lambda: r.choice((3.0, 30.0, 600.0)), 0.0)
        self.strikes = self._strikes()
        self.guard_s = self._pick("guard at home", 0.4, lambda: r.choice((15.0, 60.0)), 0.0)
        self.person = r.choice(_PERSONS)
        self.kinds.append(f"person {self.person}")
        # Of its own dice, as is all that came later: the days from before stay what they were.
        figures = random.Random(f"figures {seed}")
        self.absurd_rate = figures.choice((0.05, 0.2, 0.5)) if figures.random() < 0.25 else 0.0
        if self.absurd_rate:
            self.kinds.append("absurd figures")
        self.has_second_guard = self.person == "adopts elsewhere" and random.Random(f"guard {seed}").random() < 0.4
        if self.has_second_guard:
            self.kinds.append("guard at the second home")
        self._overtake(random.Random(f"overtaking {seed}"))
        self.clock_steps = self._clock_steps(random.Random(f"clock steps {seed}"))
        r2 = random.Random(f"lost store {seed}")
        self.store_refuses_at = r2.uniform(0, self.limit_s) if r2.random() < 0.06 else None
        self.unsaved_s = r2.choice((20.0, 60.0, 1800.0))
        if self.store_refuses_at is not None:
            self.kinds.append("store refuses for good")
        self.is_guard_keyless = bool(self.guard_s) and random.Random(f"keys {seed}").random() < 0.15
        if self.is_guard_keyless:
            self.kinds.append("guard without keys")
        self.hostile_writes = self._hostile_writes(random.Random(f"hostile {seed}"))

    def _clock_steps(self, r: random.Random) -> list[tuple[str, float, float]]:
        """Which host gets another time of day, when, and by how many hours. Its other clocks are not changed."""
        found = []
        for owner in ("home", "machine"):
            at, step_s = r.uniform(0, self.limit_s), r.choice((-1, 1)) * r.choice((18000.0, 86400.0))
            if r.random() < 0.08:
                self.kinds.append(f"{owner} clock set by hours")
                found.append((owner, at, step_s))
        return found

    def _overtake(self, r: random.Random) -> None:
        """The trainer takes long to exit after its outcome, and the machine goes before the agent has amended it."""
        exit_s, notice_s = r.choice((3.0, 10.0)), r.choice((3.0, 10.0))
        if r.random() < 0.12:
            self.kinds.append("outcome overtakes the agent's")
            self.trainer["exit_s"] = exit_s
            rates = {**self.faults.rates, "notice_preempt": 0.8}
            self.faults = dataclasses.replace(self.faults, rates=rates, notice_s=notice_s)

    def _hostile_writes(self, r: random.Random) -> list[float]:
        """When another writer of the store replaces something: seconds from the beginning of the day."""
        is_shared, num = r.random() < 0.12, r.randint(1, 12)
        times = sorted(r.choice((r.uniform(0.0, 30.0), r.uniform(0.0, self.limit_s))) for _ in range(num))
        if is_shared:
            self.kinds.append("hostile second writer")
        return times if is_shared else []

    def _pick(self, kind: str, chance: float, draw: Callable[[], Any], otherwise: Any) -> Any:
        """Drawn whether it is taken or not, so that one kind does not shift the others."""
        is_taken, value = self.random.random() < chance, draw()
        if is_taken:
            self.kinds.append(kind)
        return value if is_taken else otherwise

    def _trainer(self) -> dict[str, float]:
        r = self.random
        messages = {"steps": float(r.choice((8, 20, 40, 200))), "step_s": r.choice((2.0, 5.0, 8.0)), "save_every": 4.0}
        messages["save_s"] = r.choice((0.2, 2.0))
        for name, chance in (("crash_at", 0.12), ("hang_at", 0.06), ("nan_at", 0.04), ("deaf", 0.08)):
            step = float(r.randint(1, 12))
            if r.random() < chance:
                messages[name] = 1.0 if name == "deaf" else step
                self.kinds.append(f"trainer {name.split('_')[0]}")
        if "crash_at" in messages:
            messages["crashes"] = float(r.choice((1, 2, 99)))
        return messages

    def _cloud_faults(self) -> Faults:
        r = self.random
        rates: dict[str, float] = {}
        chances = {
            **{way: (0.12, 0.08) for way in _REQUEST_WAYS},
            "create.lost_after": (0.12, 0.7),
            "no_capacity": (0.05, 0.7),
            "dearer": (0.03, 0.8),
            "boot_slow": (0.08, 0.8),
            "boot_never": (0.04, 0.8),
            "boot_dies": (0.04, 0.8),
            "preempt": (0.15, 0.8),
            "notice_preempt": (0.15, 0.8),
            "hang": (0.08, 0.8),
            "leaves_volume": (0.08, 0.8),
            "list_late": (0.2, 0.5),
            "list.lost_before": (0.08, 0.4),
            "odd_state": (0.08, 0.3),
            "destroy_lies": (0.1, 0.6),
            "destroy_stubborn": (0.1, 0.6),
            "destroy.error_before": (0.1, 0.5),
        }
        for way, (chance, most) in chances.items():
            rate = self._pick(f"cloud {way}", chance, lambda most=most: round(r.uniform(0.2, 1.0) * most, 3), 0.0)
            if rate:
                rates[way] = rate
        late_s = 0.9 * self.settings.settle_s
        skew_s = self._pick("provider's clock", 0.15, lambda: r.choice((-1, 1)) * r.choice((5.0, 300.0)), 0.0)
        return Faults(
            rates=rates,
            list_lag_s=late_s,
            lie_s=late_s,
            slow_boot_s=r.choice((30.0, 200.0)),
            take_after_s=(5.0, self.limit_s),
            notice_s=r.choice((5.0, 30.0, 120.0)),
            stubborn_tries=r.randint(2, 5),
            clock_skew_s=skew_s,
        )

    def _strikes(self) -> list[tuple[str, str, int, int]]:
        """kill or fail, role, which of that role, and at which of its calls."""
        r = self.random
        found = []
        for kind in ("kill", "kill", "kill", "fail", "fail"):
            role, number, at = r.choice(_ROLES), r.choice((1, 1, 1, 2)), int(10 ** r.uniform(0, 3.3))
            if r.random() < 0.25:
                found.append((kind, role, number, at))
                self.kinds.append(f"{kind} {role}")
        return found
