"""Estimates the time and cost of a run for a user without a provider account, at list prices or at a given rate.

    Run -> GPUs that it fits on -> speed of each, measured or modelled -> hours x a dated list price or the given rate

The resulting rows are not offers, so they cannot be launched. No requests are sent to providers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.api_key_table import ACCOUNTS
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.plan.plan import needs_of
from homing.cloud.plan.speed import estimate
from homing.cloud.plan.timing import timing_of
from homing.cloud.providers.aws.offers import TYPES
from homing.cloud.providers.base import Offer, lack
from homing.cloud.providers.fixed_prices import TABLE, Price
from homing.errors import NoOffer
from homing.gpus import GPUS, find_gpu
from homing.units import format_bytes
from homing.wire.run_json import Run

__all__ = ["Listed", "is_without_key", "list_prices"]

_OWN = "your own rate"
_NOT_IN_IT = {"modal": "plus CPU cores and memory"}


@dataclass(frozen=True)
class Listed:
    provider: str  # the provider that charges this list price, or "" for a rate given by the user
    card: str
    num_gpus: int
    tokens_per_s: float
    seconds: float  # planned seconds from the create call until the instance is gone
    speed_source: str  # measured or modelled
    speed_text: str
    rate_usd_per_hour: Decimal | None  # rate for all GPUs of the machine; None if homing has no list price for it
    rate_text: str  # the price list and its date

    @property
    def cost_usd(self) -> Decimal | None:
        return None if self.rate_usd_per_hour is None else meter.cost(self.rate_usd_per_hour, self.seconds)


def is_without_key(run: Run, home: Home) -> bool:
    """Return True if the run lists only cloud providers, and this computer has a key for none of them."""
    env, world = home.world.environment(), home.world
    known = [ACCOUNTS.get(name) for name in run.cloud.providers]
    return all(account is not None and not account.is_set(env, world) for account in known)


def list_prices(run: Run, home: Home, own_rate: Decimal | None = None) -> list[Listed]:
    """Return a row for each GPU that the run fits on, cheapest first, then fastest. `own_rate` applies to every GPU."""
    needs = dataclasses.replace(needs_of(run), disk_bytes=0, max_rate_usd_per_hour=None)
    rows, reasons = [], dict[str, None]()
    for offer, price in _own(run, own_rate) if own_rate is not None else _listed(run):
        if why := lack(offer, needs):
            if needs.gpu and find_gpu(needs.gpu) == find_gpu(offer.device):
                reasons[f"{offer.num_gpus}x {offer.device} {why}."] = None
            continue
        speed = estimate(run, offer, home, may_probe=False)
        seconds = timing_of(run, offer, speed, home).whole_s(run)
        rate = offer.rate_usd_per_hour if price else None
        rows.append(
            Listed(
                offer.provider, offer.device, offer.num_gpus, speed.tokens_per_s, seconds, speed.source, speed.text,
                rate, price,
            )
        )  # fmt: skip
    if not rows:
        raise NoOffer(
            what=f"{run.name} cannot train on any listed GPU.",
            why=" ".join(reasons)
            or f"The run needs {format_bytes(needs.memory_bytes)} of memory on {run.cloud.num_gpus} x"
            f" {run.cloud.gpu or 'any GPU'}.",
            fix="Change cloud.gpu or cloud.num_gpus, or make the model smaller; see: homing verify RUN",
        )
    return sorted(rows, key=lambda row: (row.cost_usd is None, row.cost_usd or Decimal(0), row.seconds))


def _own(run: Run, rate: Decimal) -> Iterator[tuple[Offer, str]]:
    yield from ((_on("", card, run.cloud.num_gpus, rate), _OWN) for card in GPUS)


def _listed(run: Run) -> Iterator[tuple[Offer, str]]:
    """Yield the machines in the price lists of the run's providers.

    For a provider that has no price list, yield every GPU, with a rate of zero.
    """
    for provider in run.cloud.providers:
        prices = [price for price in TABLE if price.provider == provider]
        if not prices:
            yield from ((_on(provider, card, run.cloud.num_gpus, Decimal(0)), "") for card in GPUS)
        for price in prices:
            card, num_gpus = _cards(price, run.cloud.num_gpus)
            if (gpu := find_gpu(card)) is None or num_gpus != run.cloud.num_gpus:
                continue
            rate = price.usd_per_hour if provider == "aws" else price.usd_per_hour * num_gpus
            listed = f"list price of {price.date}"
            yield _on(provider, gpu.name, num_gpus, rate), ", ".join(filter(None, [listed, _NOT_IN_IT.get(provider)]))


def _cards(price: Price, num_gpus: int) -> tuple[str, int]:
    """Return the GPU and GPU count that a list price covers. EC2 prices are per machine, all others per GPU."""
    return TYPES.get(price.name, ("", 0, 0, 0))[:2] if price.provider == "aws" else (price.name, num_gpus)


def _on(provider: str, card: str, num_gpus: int, rate: Decimal) -> Offer:
    """Return a made-up offer for the speed estimate. It is used only in this module."""
    return Offer(provider, card, card, num_gpus, 0, GPUS[card].memory_gib * 2**30, rate)
