"""Providers that only have something to sell: a list of offers, a delay, or an error. For offers and plans.

open_shops(home, a=Shop([...]), b=Shop(error=...))   the home knows them by these names, and no others are set up
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest

from homing.cloud.home import Home
from homing.cloud.providers.base import Needs, Offer, lack
from homing.gpus import GPUS


def offer(device: str = "H100", num_gpus: int = 1, rate: str = "2.49", **more: Any) -> Offer:
    memory = GPUS[device].memory_gib * 2**30 if device in GPUS else 16 * 10**9
    messages = {
        "provider": "shop",
        "name": f"{num_gpus}x_{device.lower()}",
        "num_cores": 16,
        "memory_bytes": memory,
        **more,
    }
    return Offer(device=device, num_gpus=num_gpus, rate_usd_per_hour=Decimal(rate), **messages)


@dataclass
class Shop:
    sells: Sequence[Offer] = ()
    error: Exception | None = None
    delay_s: float = 0.0
    name: str = ""
    page: str = "https://shop.test/instances"
    cannot: dict[str, str] = field(default_factory=dict)
    asked: list[Needs] = field(default_factory=list)
    world: Any = None

    def offers(self, needs: Needs) -> list[Offer]:
        self.asked.append(needs)
        if self.delay_s:
            self.world.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        mine = [dataclasses.replace(each, provider=self.name) for each in self.sells]
        return [each for each in mine if not lack(each, needs)]

    def list_owned(self) -> list[Any]:
        return []


def open_shops(monkeypatch: pytest.MonkeyPatch, **shops: Shop) -> None:
    """In every Home that is opened from here on."""
    real = Home.provider

    def provider(self: Home, name: str) -> Any:
        if name not in shops:
            return real(self, name)
        shops[name].name, shops[name].world = name, self.world
        return shops[name]

    monkeypatch.setattr(Home, "provider", provider)
    monkeypatch.setattr("homing.cloud.plan.offers.configured", lambda home, world: list(shops))
