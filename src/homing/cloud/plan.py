"""Run to needs, hours and dollars; what would happen, before anything does.

    Run -> Needs -> offers of its providers -> speed of each -> hours and dollars to finish, cheapest first

Rents nothing and writes nothing but the cache of measured speeds. Never loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from homing.cloud import meter
from homing.cloud.home import Home
from homing.cloud.offers import find_offers
from homing.cloud.providers.base import Needs, Offer
from homing.cloud.speed import Speed, estimate
from homing.config.memory import training_memory
from homing.units import format_count, format_duration
from homing.wire.run import Phase, Run

__all__ = ["OfferPlan", "Plan", "make_plan", "needs_of"]

_HOME_S = 30.0  # last checkpoint pushed, billing ended
_FORWARD_SHARE = 1 / 3  # an evaluated token costs the forward third of a trained one
_BYTES_PER_TOKEN = 4  # of a shard, at most


@dataclass(frozen=True)
class OfferPlan:
    offer: Offer
    speed: Speed
    seconds: float  # from create to gone, the whole run
    cost_usd: Decimal
    minimum_usd: Decimal  # a smaller limit could only boot and come home


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
        checkpoint_bytes=_checkpoint_bytes(run),
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
    work = sum(phase.num_steps * phase.batch_tokens + _eval_tokens(phase) * _FORWARD_SHARE for phase in run.phases)
    seconds = offer.boot_s + work / speed.tokens_per_s + _HOME_S
    rate = offer.rate_usd_per_hour
    return OfferPlan(
        offer, speed, seconds, meter.cost(rate, seconds), minimum_usd=meter.minimum_spend(rate, offer.boot_s)
    )


def _eval_tokens(phase: Phase) -> int:
    num_evals = 1 + (phase.num_steps // phase.eval_every if phase.eval_every else 0)
    return num_evals * phase.eval_tokens


def _checkpoint_bytes(run: Run) -> int:
    """Weights and optimizer state of the largest phase; the rest of a checkpoint is small."""
    memories = [training_memory(run, phase) for phase in run.phases]
    return max(memory.weights + memory.optimizer for memory in memories)


def _kept_bytes(run: Run) -> int:
    # Those kept, the best, and the one being written.
    return max(phase.keep_last + 2 for phase in run.phases) * _checkpoint_bytes(run)


def _warnings(run: Run, cheapest: OfferPlan) -> list[str]:
    found = []
    days = f"{cheapest.seconds / 86400:.1f} days" if cheapest.seconds >= 86400 else format_duration(cheapest.seconds)
    dollars = meter.show_usd(cheapest.cost_usd)
    if run.limits.spend_usd is not None and cheapest.cost_usd > Decimal(run.limits.spend_usd):
        limit = Decimal(run.limits.spend_usd)
        found.append(
            f"The schedule is longer than the money: it takes {days} and {dollars} on {cheapest.offer.device},"
            f" limits.spend is {meter.show_usd(limit)}. It would end early, at about {limit / cheapest.cost_usd:.0%}."
        )
    if run.limits.time_s and cheapest.seconds > run.limits.time_s:
        found.append(
            f"The schedule is longer than the time: it takes {days} and {dollars} on {cheapest.offer.device},"
            f" limits.time is {format_duration(run.limits.time_s)}."
        )
    num_tokens = sum(phase.num_steps * phase.batch_tokens for phase in run.phases)
    if run.data.num_train_tokens and num_tokens < run.data.num_train_tokens / 10:
        found.append(
            f"It trains on {format_count(num_tokens)} of {format_count(run.data.num_train_tokens)} prepared tokens."
        )
    return found
