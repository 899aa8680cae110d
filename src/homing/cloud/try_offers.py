"""Decides which offer a launch uses: the one named on the command line, or the next in the plan if an offer is gone.

    --cloud hyperstack --region canada-1 --instance-type H100     a provider that resells other clouds: all three
    --region us-east-1 --instance-type g5.xlarge                  a provider with its own machines: these two are enough

    launch -> started
           -> sold out, or the machine never came up -> the next offer that may be used without asking, or that the
                                                        user agrees to

If a named offer does not exist, the error lists the nearest ones, and no other offer is used instead.

A failed launch leaves nothing behind, so the run continues with its next attempt, and its limit covers all attempts. If
an agent starts and then gives up, the next offer is not tried, because the agent would give up there too. Between two
offers, the run has no instance, so a lock shows that the launch is still in progress. Meanwhile, `homing stop`,
`homing destroy` and `homing limit` in another terminal still take effect. The user may take a long time to answer, so
the run is checked again after each answer. If it was ended, it stays ended. If its limit changed, the user is asked
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.commands_to_type import Words
from homing.cloud.guard import relaunch
from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, Launched, draft, hold_lock, launch
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import UNDONE, RunRow
from homing.cloud.plan.offers import is_dear
from homing.cloud.plan.plan import OfferPlan, Plan
from homing.cloud.providers.base import Offer
from homing.errors import EndedElsewhere, NeverCame, NoOffer, UsageError
from homing.units import format_duration
from homing.wire.run_json import Limits

__all__ = ["MAY_COST", "Exact", "is_within_plan", "launch_any", "name_of", "only", "without_spot"]

_NEAR = 5
MAY_COST = Decimal("1.5")  # finishing on a replacement may cost at most this many times as much as on the agreed offer
_TRIES = 5


@dataclass(frozen=True)
class Exact:
    cloud: str | None = None
    region: str | None = None
    instance_type: str | None = None

    @property
    def is_asked(self) -> bool:
        return any(self._pairs().values())

    @property
    def is_whole(self) -> bool:
        return all(self._pairs().values())

    def fits(self, offer: Offer) -> bool:
        has = {
            "--cloud": offer.cloud or offer.provider,
            "--region": offer.region,
            "--instance-type": offer.instance_type or offer.name,
        }
        return all(not wanted or wanted.lower() == has[flag].lower() for flag, wanted in self._pairs().items())

    def __str__(self) -> str:
        return " ".join(f"{flag} {wanted}" for flag, wanted in self._pairs().items() if wanted)

    def _pairs(self) -> dict[str, str | None]:
        return {"--cloud": self.cloud, "--region": self.region, "--instance-type": self.instance_type}


def only(plan: Plan, exact: Exact, words: Words) -> Plan:
    """Return the plan with only the offers that match."""
    if not exact.is_asked:
        return plan
    rows = [row for row in plan.offers if exact.fits(row.offer)]
    if not exact.is_whole and any(row.offer.cloud for row in rows or plan.offers):
        example = next(row.offer for row in rows or plan.offers if row.offer.cloud)
        raise UsageError(
            what=f"{exact} does not identify a single offer.",
            why=f"{example.provider} offers instances from several clouds:"
            " give --cloud, --region and --instance-type together, or none of them.",
            fix=f"For example: {flags_of(example)}",
        )
    if not rows:
        raise NoOffer(
            what=f"No provider currently offers {exact} for {plan.run.name}.",
            why=f"Queried the providers in cloud.providers: {', '.join(plan.run.cloud.providers)}."
            f" Closest offers: {'; '.join(_near(plan, exact))}.",
            fix=f"See all offers: {words.to('plan')}   or query another provider: --set cloud.providers=NAME",
        )
    return dataclasses.replace(plan, offers=rows)


def without_spot(plan: Plan, words: Words) -> Plan:
    """Return the plan without offers that may be preempted (--no-spot)."""
    rows = [row for row in plan.offers if not row.offer.is_spot]
    if not rows:
        raise NoOffer(
            what=f"No provider currently has a non-spot offer for {plan.run.name}.",
            why=f"{len(plan.offers)} offers fit, but each may be preempted.",
            fix=f"Launch without --no-spot; a preempted run resumes from its last checkpoint: {words.to('launch')}",
        )
    return dataclasses.replace(plan, offers=rows)


def flags_of(offer: Offer) -> str:
    region = f" --region {offer.region}" if offer.region else ""
    return f"--cloud {offer.cloud or offer.provider}{region} --instance-type {_type(offer)}"


def _type(offer: Offer) -> str:
    return offer.instance_type or offer.name


def _near(plan: Plan, exact: Exact) -> list[str]:
    said = list(dict.fromkeys(flags_of(row.offer) for row in plan.offers))
    return difflib.get_close_matches(str(exact), said, n=_NEAR, cutoff=0.0)


# --- launching on it, or on the next one ---


def is_within_plan(row: OfferPlan, agreed: OfferPlan, limit_usd_per_hour: Decimal | None) -> bool:
    """Return True if this offer may replace the agreed one without asking again.

    If limits.rate is set, only the offer's rate is checked.
    """
    if limit_usd_per_hour is not None:
        return row.offer.rate_usd_per_hour <= limit_usd_per_hour
    return row.cost_usd <= agreed.cost_usd * MAY_COST and not is_dear(row.offer, None)


def launch_any(
    first: Draft,
    others: Sequence[OfferPlan],
    home: Home,
    *,
    notify: Callable[[str], None],
    agree: Callable[[OfferPlan, Draft], bool],
) -> tuple[Draft, Launched]:
    """Launch on `first`, which the user has already agreed to, or else on one of `others`, in order.

    `agree` is called for each of the others. Raises the last NoOffer or NeverCame if none is left or the user declines.
    """
    ready, rest = first, [row for row in others if row.offer != first.order.offer][: _TRIES - 1]
    last: RunRow | None = None
    with _resuming(first, home):
        while True:
            try:
                return ready, launch(ready, home, notify=notify, last=last)
            except (NoOffer, NeverCame) as exc:
                how = "is gone" if isinstance(exc, NoOffer) else "never came up and was destroyed"
                notify(f"{name_of(ready.order.offer)} {how}: {' '.join(exc.why.split()) or exc.what}")
                found = _next(first, rest, home, notify, agree)
                if found is None:
                    raise
                ready, last = found


@contextlib.contextmanager
def _resuming(first: Draft, home: Home) -> Iterator[None]:
    """Hold a lock, so that `homing stop` and `homing destroy` know that a run between two offers has not ended."""
    hold_lock(first.run.id, first.run.id, first.run.name, home)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the lock is released anyway when this process exits
            home.world.remove(home.launch_lock(first.run.id))


def _as_undone(first: Draft, home: Home) -> RunRow:
    """Return the run's ledger row after the failed launch. Raise EndedElsewhere if the run was ended since then."""
    run = home.ledger.run(first.run.id)
    if run is None or not run.reason.startswith(UNDONE):
        said = ("gone", "") if run is None else (run.state, run.reason)
        raise EndedElsewhere(f"{first.run.id} was not launched on the next offer: it is now {said[0]}.", said[1])
    return run


def _next(
    first: Draft,
    rest: list[OfferPlan],
    home: Home,
    notify: Callable[[str], None],
    agree: Callable[[OfferPlan, Draft], bool],
) -> tuple[Draft, RunRow] | None:
    """Go through the offers in `rest` until one can be launched. Return its draft and the run's current ledger row.

    Returns None if no offer is left or the user declined.
    """
    last = _as_undone(first, home)
    while rest:
        row = rest.pop(0)
        agreed: Draft | None = None
        while True:
            try:
                ready = _instead(first, last, row, home)
            except UsageError as exc:  # the offer is too expensive for the rest of the limit, or cannot reach the store
                notify(f"{name_of(row.offer)}: {exc.what}")
                break
            if agreed is not None:
                if _limits(ready) == _limits(agreed):
                    return ready, last
                time = f", time {format_duration(ready.run.limits.time_s)}" if ready.run.limits.time_s else ""
                notify(f"The run's limits have changed: {meter.show_usd(ready.spend_limit_usd)}{time}")
            rate = meter.show_usd(row.offer.rate_usd_per_hour)
            notify(f"Next offer: {name_of(row.offer)} at {rate}/h, {meter.show_usd(row.cost_usd)} to finish")
            if not agree(row, ready):
                return None
            agreed, last = ready, _as_undone(first, home)
    return None


def _instead(first: Draft, last: RunRow, row: OfferPlan, home: Home) -> Draft:
    """Return a draft of the same launch on a different offer, with the current limits (see `homing limit`)."""
    documents = relaunch.load_documents(home, last).run
    run = dataclasses.replace(first.order.run, id=first.run.id, limits=documents.limits, origin=documents.origin)
    limit = None if last.spend_limit_usd is None else Decimal(last.spend_limit_usd)
    order = dataclasses.replace(
        first.order, run=run, offer=row.offer, timing=row.timing, resume=True, spend_limit_usd=limit
    )
    return draft(order, home)


def _limits(ready: Draft) -> tuple[Decimal, Limits]:
    return ready.spend_limit_usd, ready.order.run.limits


def name_of(offer: Offer) -> str:
    return " ".join(part for part in (offer.provider, offer.cloud, offer.name, offer.region) if part)
