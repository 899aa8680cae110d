"""Plans a run before anything is rented: its needs, and the hours and dollars on every offer.

    Run -> Needs -> offers of its providers -> speed of each -> hours and dollars to finish, cheapest first
                                               including boot, transfer, preemptions and storage

Planning rents nothing, writes nothing but the cache of measured speeds, and never loads torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal

from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.plan.offers import LeftOut, find_offers
from homing.cloud.plan.speed import Speed, estimate
from homing.cloud.plan.timing import Odds, Timing, checkpoint_bytes, odds_of, timing_of
from homing.cloud.providers.base import Needs, Offer
from homing.config.estimate.memory import fits, rank_memories, training_memory
from homing.config.estimate.params_and_flops import flops_of_step
from homing.errors import HomingError, NoOffer
from homing.gpus import MIN_CAPABILITY, find_gpu
from homing.store.storage_price import kept
from homing.units import format_bytes, format_count, format_duration
from homing.wire.guard_timing import allowed_s
from homing.wire.run_json import Run

__all__ = ["Buys", "OfferPlan", "PhaseCost", "Plan", "make_plan", "needs_of", "relay_of", "suggested_limit"]

_BYTES_PER_TOKEN = 4  # upper bound: a shard stores each token in at most this many bytes
_MONTH_S = 730 * 3600.0
_UNKNOWN = "has a GPU unknown to homing, so time and cost cannot be estimated"


@dataclass(frozen=True)
class Buys:
    """How much training the limits allow on one offer: how many steps, and when the last one would end."""

    num_steps: int
    of_steps: int
    lands_after_s: float  # seconds from the create call to the last step

    @property
    def is_landing(self) -> bool:
        return self.num_steps < self.of_steps


@dataclass(frozen=True)
class PhaseCost:
    name: str
    seconds: float
    cost_usd: Decimal


@dataclass(frozen=True)
class OfferPlan:
    offer: Offer
    speed: Speed
    seconds: float  # from the create call until the instance is gone, including expected preemptions
    cost_usd: Decimal  # cost to finish: rate x seconds, plus storage for that time
    timing: Timing
    # the lowest limit that is enough to finish, push the model and end billing; launch refuses a lower one
    minimum_usd: Decimal
    worst_usd: Decimal  # the most that the run can cost: within its limits or, if it has none, at the pessimistic speed
    odds: Odds
    storage_usd: Decimal = Decimal(0)
    buys: Buys | None = None  # how much training the run's limits allow on this offer; None without limits

    def phases(self, run: Run) -> list[PhaseCost]:
        """Return the planned time and cost of each phase, excluding preemptions."""
        rate = self.offer.rate_usd_per_hour
        return [PhaseCost(name, seconds, meter.cost(rate, seconds)) for name, seconds in self.timing.parts(run)]


@dataclass(frozen=True)
class Plan:
    run: Run
    needs: Needs
    offers: list[OfferPlan]  # cheapest to finish first
    num_tokens: int
    num_steps: int
    flops: float
    checkpoint_bytes: int
    kept_bytes: int  # maximum size of all checkpoints kept at the same time
    warnings: list[str]
    left_out: list[LeftOut] = field(default_factory=list)  # lowest rate first; filled only with explain=True

    @property
    def best(self) -> OfferPlan:
        return self.offers[0]

    def more_usd(self, row: OfferPlan) -> Decimal:
        """Return how much more it costs to finish the run on this offer than on the best one."""
        return row.cost_usd - self.best.cost_usd


def make_plan(run: Run, home: Home, *, explain: bool = False) -> Plan:
    """Plan the run on all offers.

    With `explain`, the plan includes rejected offers with reasons, at the cost of one more request per provider.
    """
    home.configure(run)
    needs = needs_of(run)
    try:
        found = find_offers(needs, run.cloud.providers, home, explain=explain)
    except NoOffer as exc:
        if not (lever := _how_to_fit(run, home)):
            raise
        raise NoOffer(what=exc.what, why=exc.why, fix=f"{lever} Or: {exc.fix}") from exc
    reached, beyond = _reached(run, found.offers, home)
    every = [_plan_offer(run, offer, home) for offer in reached]
    unknown = [LeftOut(row.offer, f"{_UNKNOWN}: {row.offer.device}") for row in every if _is_unknown(row)]
    planned = [row for row in every if not _is_unknown(row)]
    if not planned:
        raise _only_unknown(run, unknown)
    never_done = [row for row in planned if math.isinf(row.seconds)]
    rows = sorted((row for row in planned if row not in never_done), key=lambda row: _rank(run, row))
    if not rows:
        raise _taken_too_often(run, never_done)
    lost = [LeftOut(row.offer, f"is preempted faster than it makes progress: {_odds_text(row)}") for row in never_done]
    left_out = sorted([*found.left_out, *beyond, *unknown, *lost], key=lambda each: each.offer.rate_usd_per_hour)
    num_tokens = sum(phase.num_steps * phase.batch_tokens for phase in run.phases)
    return Plan(
        run=run,
        needs=needs,
        offers=rows,
        num_tokens=num_tokens,
        num_steps=sum(phase.num_steps for phase in run.phases),
        flops=sum(phase.num_steps * flops_of_step(run, phase) for phase in run.phases),
        checkpoint_bytes=checkpoint_bytes(run),
        kept_bytes=_kept_bytes(run),
        warnings=[*found.problems, *_unknown_text(unknown), *_warnings(run, rows[0])],
        left_out=left_out if explain else [],
    )


def suggested_limit(plan: Plan) -> str:
    """Suggest a spend limit: 1.5 times the planned cost, because a probe or an assumption may be off by that much.

    If no limit is set yet, suggest at least the worst-case cost, because the user sees both figures. Suggest a limit
    even if the machine is free.
    """
    best = plan.best
    has_worst = plan.run.limits.spend_usd is None and best.worst_usd.is_finite()
    enough = max(best.cost_usd * 3 / 2, best.minimum_usd * 2, best.worst_usd if has_worst else Decimal(0))
    return meter.as_limit(enough or Decimal(1))


def needs_of(run: Run) -> Needs:
    memories = [training_memory(run, phase) for phase in run.phases]
    # With train.parallel: auto, the GPUs divide the model as far as their memory demands.
    peaks = [min(memory.peak(max(1, phase.micro_batch)) for memory in rank_memories(run, phase).values())
             for phase in run.phases]  # fmt: skip
    shards = (run.data.num_train_tokens + run.data.num_val_tokens) * _BYTES_PER_TOKEN
    rate = run.limits.rate_usd_per_hour
    return Needs(
        gpu=run.cloud.gpu,
        num_gpus=run.cloud.num_gpus,
        memory_bytes=max(peaks),
        disk_bytes=shards + _kept_bytes(run),
        max_rate_usd_per_hour=None if rate is None else Decimal(rate),
        precision=run.train.precision,
        capability=MIN_CAPABILITY,
        host_bytes=max(memory.host_needed(run.cloud.num_gpus) for memory in memories),
    )


def _how_to_fit(run: Run, home: Home) -> str:
    """Return a sentence that says which settings to lower so that training fits in the largest offered GPU's memory.

    The result is "" if memory is not the problem or the offers cannot be listed.
    """
    try:
        asked = Needs(gpu=run.cloud.gpu, num_gpus=run.cloud.num_gpus)
        every = [offer for name in run.cloud.providers for offer in home.provider(name).offers(asked)]
    except (HomingError, OSError):
        return ""
    cards = [card for offer in every if offer.num_gpus and (card := find_gpu(offer.device))]
    if not cards:
        return ""
    largest = max(cards, key=lambda card: card.memory_gib)
    levers = [fit.lower for phase in run.phases for fit in fits(run, phase, {largest.name: largest}) if fit.lower]
    return f"To fit {largest.name}, lower {', '.join(levers)}." if levers else ""


def _reached(run: Run, offers: list[Offer], home: Home) -> tuple[list[Offer], list[LeftOut]]:
    """Split the offers by whether their machines can reach the run's store.

    If no machine can, treat all offers as reachable, because a user may plan before choosing a store, and launch
    checks again.
    """
    if not run.store.startswith("file:"):
        return offers, []
    far = {name for name in {offer.provider for offer in offers} if home.provider(name).cannot.get("file_store")}
    reached = [offer for offer in offers if offer.provider not in far]
    if not reached:
        return offers, []
    return reached, [LeftOut(offer, f"cannot reach {run.store}") for offer in offers if offer.provider in far]


def _plan_offer(run: Run, offer: Offer, home: Home) -> OfferPlan:
    speed = estimate(run, offer, home)
    timing = timing_of(run, offer, speed, home)
    odds, rate = odds_of(run, offer, timing, home), offer.rate_usd_per_hour
    is_finite = math.isfinite(odds.seconds)
    storage = _storage_usd(run, odds.seconds, home) if is_finite else Decimal(0)
    minimum = meter.cost(rate, timing.least_s(run))
    worst = _worst_usd(run, rate, odds.seconds * timing.doubt) + storage if is_finite else Decimal("Infinity")
    if run.limits.spend_usd is None:  # a launch then gets at least the minimum as its limit, and may spend it
        worst = max(worst, minimum)
    return OfferPlan(
        offer=offer,
        speed=speed,
        seconds=odds.seconds,
        cost_usd=meter.cost(rate, odds.seconds) + storage if is_finite else Decimal("Infinity"),
        timing=timing,
        minimum_usd=minimum,
        worst_usd=worst,
        odds=odds,
        storage_usd=storage,
        buys=_buys(run, offer, timing),
    )


def _rank(run: Run, row: OfferPlan) -> tuple[bool, Decimal, float]:
    """Return a sort key: cheapest to finish first. Offers that cannot produce a model within the limit come last."""
    limit = run.limits.spend_usd
    return (limit is not None and row.minimum_usd > Decimal(limit), row.cost_usd, row.seconds)


def _storage_usd(run: Run, seconds: float, home: Home) -> Decimal:
    """Return the storage cost of the checkpoints during the run, which is zero if the store's price is unknown."""
    if not run.store.startswith(("file:", "s3:", "hf:")):
        return Decimal(0)
    env = home.world.environment()
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION", "")
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL", "")
    month = kept(run.store, _kept_bytes(run), region, endpoint).usd_per_month
    return Decimal(0) if month is None else month * Decimal(str(seconds / _MONTH_S))


def _worst_usd(run: Run, rate: Decimal, slow_s: float) -> Decimal:
    if run.limits.spend_usd is not None:
        return meter.worst_case(rate, Decimal(run.limits.spend_usd), run.limits.time_s)
    return meter.cost(rate, min(slow_s, run.limits.time_s + meter.MARGIN_S) if run.limits.time_s else slow_s)


def _odds_text(row: OfferPlan) -> str:
    return f"{row.odds.per_hour:g} times an hour, losing {format_duration(row.odds.lost_s)} each time"


def _is_unknown(row: OfferPlan) -> bool:
    """Return True if the offer is for a rented GPU of unknown speed. Always False for the user's own machines."""
    return row.speed.source == "unknown" and row.offer.provider not in ("local", "ssh")


def _unknown_text(rows: list[LeftOut]) -> list[str]:
    names = sorted({row.offer.device for row in rows})
    return [f"Left out: offers with a GPU unknown to homing ({', '.join(names)})."] if names else []


def _only_unknown(run: Run, rows: list[LeftOut]) -> NoOffer:
    return NoOffer(
        what=f"Cannot plan any offer for {run.name}.",
        why="\n".join(f"{row.offer.provider} {row.offer.name} {row.why}." for row in rows),
        fix="Set cloud.gpu to a GPU that homing knows; see: homing explain cloud.gpu",
    )


def _taken_too_often(run: Run, rows: list[OfferPlan]) -> NoOffer:
    return NoOffer(
        what=f"No offer would ever finish {run.name}.",
        why="\n".join(f"{row.offer.provider} {row.offer.name} is preempted {_odds_text(row)}." for row in rows),
        fix="Save checkpoints more often (checkpoint.every), or allow non-spot offers.",
    )


def _buys(run: Run, offer: Offer, timing: Timing) -> Buys | None:
    limit = None if run.limits.spend_usd is None else Decimal(run.limits.spend_usd)
    allowed = allowed_s(offer.rate_usd_per_hour, limit, Decimal(0), run.limits.time_s)
    if math.isinf(allowed):
        return None
    num_steps, seconds = timing.steps_in(run, allowed)
    return Buys(num_steps, sum(phase.num_steps for phase in run.phases), seconds)


def _kept_bytes(run: Run) -> int:
    # Besides the checkpoints that are kept, count the best one and the one that is being written.
    return max(phase.keep_last + 2 for phase in run.phases) * checkpoint_bytes(run)


def _warnings(run: Run, cheapest: OfferPlan) -> list[str]:
    found = []
    days = f"{cheapest.seconds / 86400:.1f} days" if cheapest.seconds >= 86400 else format_duration(cheapest.seconds)
    dollars = meter.show_usd(cheapest.cost_usd)
    if run.limits.spend_usd is not None and cheapest.cost_usd > Decimal(run.limits.spend_usd):
        found.append(
            f"The schedule exceeds the spend limit: it takes {days} and {dollars} on {cheapest.offer.device},"
            f" but limits.spend is {meter.show_usd(Decimal(run.limits.spend_usd))}. {_landing(cheapest)}"
        )
    if run.limits.time_s and cheapest.seconds > run.limits.time_s:
        found.append(
            f"The schedule exceeds the time limit: it takes {days} and {dollars} on {cheapest.offer.device},"
            f" but limits.time is {format_duration(run.limits.time_s)}. {_landing(cheapest)}"
        )
    found += _all_weights(run)
    if relay := relay_of(run, cheapest.offer, cheapest.seconds):
        found.append(relay)
    num_tokens = sum(phase.num_steps * phase.batch_tokens for phase in run.phases)
    if run.data.num_train_tokens and num_tokens < run.data.num_train_tokens / 10:
        found.append(
            f"The run trains on only {format_count(num_tokens)} of {format_count(run.data.num_train_tokens)} prepared"
            " tokens."
        )
    return found


def _all_weights(run: Run) -> list[str]:
    """Warn about each full fine-tuning phase that follows LoRA: it needs far more memory and may be a mistake."""
    found = []
    for before, phase in zip([None, *run.phases], run.phases, strict=False):
        is_after = bool(phase.init_base) or (not phase.init_from and before is not None and before.method != "full")
        if not is_after or phase.method != "full":
            continue
        memory = training_memory(run, phase)
        kept, peak = memory.weights + memory.gradients + memory.optimizer, memory.peak(max(1, phase.micro_batch))
        found.append(
            f"{phase.kind} trains all {run.sizes.num_params:,} weights in fp32. Weights, gradients and optimizer state"
            f" take {format_bytes(kept)}, and GPU memory peaks at {format_bytes(peak)}. The adapters of earlier phases"
            f" are merged into the weights first; to train adapters again, set method: lora in the phase."
        )
    return found


def relay_of(run: Run, offer: Offer, seconds: float) -> str:
    """Return a message for the user if the run takes longer than the provider lets an instance live, otherwise ""."""
    if not offer.lifetime_s or seconds <= offer.lifetime_s:
        return ""
    times = math.ceil(seconds / offer.lifetime_s) - 1
    text = (
        f"An instance on {offer.provider} runs for at most {format_duration(offer.lifetime_s)}, and this run takes"
        f" {format_duration(seconds)}: it saves in time and resumes on a new instance, {times} times. For that,"
        " `homing guard` must be running on your computer."
    )
    if run.cloud.on_preempt != "relaunch":
        return f"{text} But cloud.on_preempt is {run.cloud.on_preempt}: it would end with the first instance."
    if times > run.limits.relaunches:
        return f"{text} But limits.relaunches is {run.limits.relaunches}: raise it."
    return text


def _landing(row: OfferPlan) -> str:
    if row.buys is None or row.buys.num_steps <= 0:
        return "It would not reach its first step."
    part = row.buys.num_steps / row.buys.of_steps
    return f"It would land at about step {row.buys.num_steps:,} of {row.buys.of_steps:,} ({part:.0%})."
