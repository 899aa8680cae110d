"""Faults that can be rehearsed, by name: configured in the fake cloud beforehand, or played as acts during the run.

cloud faults   the n-th create, list or destroy fails (fake_faults)
acts           once, during training: preempted, frozen, store gone for a while, cloud restarted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from homing.cloud.providers.fake.faults import REQUEST_WAYS, Faults, Strike
from homing.errors import UsageError

__all__ = ["SCENES", "Act", "Scene", "faults_of", "find_scenes"]

Act = Literal["", "preempt", "vanish", "hang", "store-down", "cloud-down"]


@dataclass(frozen=True)
class Scene:
    text: str
    strikes: tuple[Strike, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    act: Act = ""
    fails_launches: int = 0  # how many launches may fail because of it; the next must not


SCENES: dict[str, Scene] = {
    "bad-day": Scene(
        "Any call to the cloud may be lost, late, refused or answered with an error, depending on the seed.",
        rates={**dict.fromkeys(REQUEST_WAYS, 0.05), "list_late": 0.3, "odd_state": 0.2},
        fails_launches=2,
    ),
    "boot-dies": Scene(
        "The first instance never starts its first command; the launch undoes itself.",
        strikes=(Strike("boot_dies", 1, "create"),),
        fails_launches=1,
    ),
    "cloud-down": Scene("The cloud's API is killed while the run trains, and comes back.", act="cloud-down"),
    "create-lost": Scene(
        "The create call works but its response is lost: the instance is found by its mark, not created twice.",
        strikes=(Strike("lost_after", 1, "create"),),
    ),
    "dearer": Scene(
        "The first instance starts at a higher rate than offered; the launch destroys it.",
        strikes=(Strike("dearer", 1, "create"),),
        fails_launches=1,
    ),
    "destroy-lies": Scene(
        "The first destroy is confirmed but does nothing.", strikes=(Strike("destroy_lies", 1, "destroy"),)
    ),
    "destroy-stubborn": Scene(
        "A destroy works only on the third request.", strikes=(Strike("destroy_stubborn", 1, "destroy"),)
    ),
    "hang": Scene("The instance freezes while it trains and keeps billing.", act="hang"),
    "list-late": Scene("The list of instances is always out of date.", rates={"list_late": 1.0}),
    "no-capacity": Scene(
        "The first create is refused: sold out.", strikes=(Strike("no_capacity", 1, "create"),), fails_launches=1
    ),
    "preempt": Scene("The instance is preempted after a notice; the run resumes on another.", act="preempt"),
    "store-down": Scene("The store is unreachable for a while; training continues.", act="store-down"),
    "vanish": Scene("The instance is preempted without notice; the run resumes on another.", act="vanish"),
    "volume-left": Scene(
        "The instance's disk remains and bills after the instance is gone.",
        strikes=(Strike("leaves_volume", 1, "create"),),
    ),
}


def find_scenes(names: Sequence[str]) -> dict[str, Scene]:
    for name in names:
        if name not in SCENES:
            raise UsageError(
                what=f"Unknown fault: {name!r}.",
                why=f"Known: {', '.join(SCENES)}.",
                fix="homing rehearse --list-faults",
            )
    return {name: SCENES[name] for name in dict.fromkeys(names)}


def faults_of(scenes: dict[str, Scene]) -> Faults:
    rates: dict[str, Any] = {}
    for scene in scenes.values():
        rates |= {way: max(rates.get(way, 0.0), chance) for way, chance in scene.rates.items()}
    return Faults(rates=rates, strikes=tuple(strike for scene in scenes.values() for strike in scene.strikes))
