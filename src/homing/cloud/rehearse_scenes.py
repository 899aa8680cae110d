"""What may go wrong in a rehearsal, by name: faults that the fake cloud is told of beforehand, and acts played in time.

cloud faults   the n-th create, list or destroy goes wrong (fake_faults)
acts           done once, when the run trains: taken away, frozen, its store gone for a while, the cloud restarted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from homing.cloud.providers.fake_faults import REQUEST_WAYS, Faults, Strike
from homing.errors import UsageError

__all__ = ["SCENES", "Act", "Scene", "faults_of", "find_scenes"]

Act = Literal["", "preempt", "vanish", "hang", "store-down", "cloud-down"]


@dataclass(frozen=True)
class Scene:
    text: str
    strikes: tuple[Strike, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    act: Act = ""
    fails_launches: int = 0  # so many launches may fail of it; the next must not


SCENES: dict[str, Scene] = {
    "bad-day": Scene(
        "Every call to the cloud may be lost, late, refused or answered with an error; by the seed.",
        rates={**dict.fromkeys(REQUEST_WAYS, 0.05), "list_late": 0.3, "odd_state": 0.2},
        fails_launches=2,
    ),
    "boot-dies": Scene(
        "The first machine never starts its first command; the launch undoes itself.",
        strikes=(Strike("boot_dies", 1, "create"),),
        fails_launches=1,
    ),
    "cloud-down": Scene("The cloud's API is killed while the run trains, and comes back.", act="cloud-down"),
    "create-lost": Scene(
        "The create call works, its answer is lost: the instance is found by its mark, not made twice.",
        strikes=(Strike("lost_after", 1, "create"),),
    ),
    "dearer": Scene(
        "The first machine starts at a higher rate than it was offered at; the launch gives it back.",
        strikes=(Strike("dearer", 1, "create"),),
        fails_launches=1,
    ),
    "destroy-lies": Scene(
        "The first destroy is answered with yes and does nothing.", strikes=(Strike("destroy_lies", 1, "destroy"),)
    ),
    "destroy-stubborn": Scene(
        "A destroy works only when it was asked for three times.", strikes=(Strike("destroy_stubborn", 1, "destroy"),)
    ),
    "hang": Scene("The machine freezes while it trains, and bills on.", act="hang"),
    "list-late": Scene("The list of instances is always a while behind.", rates={"list_late": 1.0}),
    "no-capacity": Scene(
        "The first create is refused: sold out.", strikes=(Strike("no_capacity", 1, "create"),), fails_launches=1
    ),
    "preempt": Scene("The machine is taken away after a notice; the run goes on on another.", act="preempt"),
    "store-down": Scene("The store cannot be reached for a while; training goes on.", act="store-down"),
    "vanish": Scene("The machine is taken away without a notice; the run goes on on another.", act="vanish"),
    "volume-left": Scene(
        "The machine's disk stays behind and bills after the machine is gone.",
        strikes=(Strike("leaves_volume", 1, "create"),),
    ),
}


def find_scenes(names: Sequence[str]) -> dict[str, Scene]:
    for name in names:
        if name not in SCENES:
            raise UsageError(
                what=f"There is no fault {name!r} to rehearse.",
                why=f"There are: {', '.join(SCENES)}.",
                fix="homing rehearse --list-faults",
            )
    return {name: SCENES[name] for name in dict.fromkeys(names)}


def faults_of(scenes: dict[str, Scene]) -> Faults:
    rates: dict[str, Any] = {}
    for scene in scenes.values():
        rates |= {way: max(rates.get(way, 0.0), chance) for way, chance in scene.rates.items()}
    return Faults(rates=rates, strikes=tuple(strike for scene in scenes.values() for strike in scene.strikes))
