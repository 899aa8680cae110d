"""Run to needs, hours and dollars; what would happen, before anything does.

    Run -> Needs -> offers of its providers -> speed of each -> hours and dollars to finish, cheapest first

Rents nothing and writes nothing but the cache of measured speeds. Never loads torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud import meter
from homing.cloud.home import Home
from homing.cloud.offers import find_offers
from homing.cloud.providers.base import Needs, Offer
from homing.cloud.speed import Speed, estimate
from homing.cloud.timing import Timing, checkpoint_bytes, timing_of
from homing.config.memory import training_memory
from homing.units import format_count, format_duration
from homing.wire.limit import allowed_s
from homing.wire.run import Run

__all__ = ["Buys", "OfferPlan", "Plan", "make_plan", "needs_of"]

_BYTES_PER_TOKEN = 4  # of a shard, at most


@dataclass(frozen=True)
class Buys:
    """What limits buy on one offer: where training would end, landing if that is before the planned end."""

    num_steps: int
    of_steps: int
    lands_after_s: float  # from the create call to the last step

    @property
    def is_landing(self) -> bool:
        return self.num_steps < self.of_steps


@dataclass(frozen=True)
class OfferPlan:
    offer: Offer
    speed: Speed
    seconds: float  # from create to gone, the whole run
    cost_usd: Decimal
    timing: Timing
    minimum_usd: Decimal  # a smaller limit could not bring a finished model home; launch refuses it
    buys: Buys | None = None  # what the run's limits buy here; None without limits


@dataclass(frozen=True)
class Plan:
    run: Run
    needs: Needs
    offers: list[OfferPlan]  # cheapest to finish first
    num_tokens: int
    num_steps: int
    flops: float
    checkpoint_bytes: int
    kept_bytes: int  # of all checkpoints that are kept at one time
    warnings: list[str]


def make_plan(run: Run, home: Home) -> Plan:
    home.configure(run)
    needs = needs_of(run)
    offers, problems = find_offers(needs, run.cloud.providers, home)
    rows = sorted((_plan_offer(run, offer, home) for offer in offers), key=lambda row: (row.cost_usd, row.seconds))
    num_tokens = sum(phase.num_steps * phase.batch_tokens for phase in run.phases)
    return Plan(
        run=run,
        needs=needs,
        offers=rows,
        num_tokens=num_tokens,
        num_steps=sum(phase.num_steps for phase in run.phases),
        flops=num_tokens * run.sizes.flops_per_token,
        checkpoint_bytes=checkpoint_bytes(run),
        kept_bytes=_kept_bytes(run),
        warnings=[*problems, *_warnings(run, rows[0])],
    )


def needs_of(run: Run) -> Needs:
    peaks = [training_memory(run, phase).peak(max(1, phase.micro_batch)) for phase in run.phases]
    shards = (run.data.num_train_tokens + run.data.num_val_tokens) * _BYTES_PER_TOKEN
    rate = run.limits.rate_usd_per_hour
    return Needs(
        gpu=run.cloud.gpu,
        num_gpus=run.cloud.num_gpus,
        memory_bytes=max(peaks),
        disk_bytes=shards + _kept_bytes(run),
        max_rate_usd_per_hour=None if rate is None else Decimal(rate),
    )


def _plan_offer(run: Run, offer: Offer, home: Home) -> OfferPlan:
    speed = estimate(run, offer, home)
    timing = timing_of(run, offer, speed, home)
    seconds, rate = timing.whole_s(run), offer.rate_usd_per_hour
    return OfferPlan(
        offer=offer,
        speed=speed,
        seconds=seconds,
        cost_usd=meter.cost(rate, seconds),
        timing=timing,
        minimum_usd=meter.cost(rate, timing.least_s(run)),
        buys=_buys(run, offer, timing),
    )


def _buys(run: Run, offer: Offer, timing: Timing) -> Buys | None:
    limit = None if run.limits.spend_usd is None else Decimal(run.limits.spend_usd)
    allowed = allowed_s(offer.rate_usd_per_hour, limit, Decimal(0), run.limits.time_s)
    if math.isinf(allowed):
        return None
    num_steps, seconds = timing.steps_in(run, allowed)
    return Buys(num_steps, sum(phase.num_steps for phase in run.phases), seconds)


def _kept_bytes(run: Run) -> int:
    # Those kept, the best, and the one being written.
    return max(phase.keep_last + 2 for phase in run.phases) * checkpoint_bytes(run)


def _warnings(run: Run, cheapest: OfferPlan) -> list[str]:
    found = []
    days = f"{cheapest.seconds / 86400:.1f} days" if cheapest.seconds >= 86400 else format_duration(cheapest.seconds)
    dollars = meter.show_usd(cheapest.cost_usd)
    if run.limits.spend_usd is not None and cheapest.cost_usd > Decimal(run.limits.spend_usd):
        found.append(
            f"The schedule is longer than the money: it takes {days} and {dollars} on {cheapest.offer.device},"
            f" limits.spend is {meter.show_usd(Decimal(run.limits.spend_usd))}. {_landing(cheapest)}"
        )
    if run.limits.time_s and cheapest.seconds > run.limits.time_s:
        found.append(
            f"The schedule is longer than the time: it takes {days} and {dollars} on {cheapest.offer.device},"
            f" limits.time is {format_duration(run.limits.time_s)}. {_landing(cheapest)}"
        )
    num_tokens = sum(phase.num_steps * phase.batch_tokens for phase in run.phases)
    if run.data.num_train_tokens and num_tokens < run.data.num_train_tokens / 10:
        found.append(
            f"It trains on {format_count(num_tokens)} of {format_count(run.data.num_train_tokens)} prepared tokens."
        )
    return found


def _landing(row: OfferPlan) -> str:
    if row.buys is None or row.buys.num_steps <= 0:
        return "It would not get to its first step."
    part = row.buys.num_steps / row.buys.of_steps
    return f"It would land at about step {row.buys.num_steps:,} of {row.buys.of_steps:,} ({part:.0%})."
