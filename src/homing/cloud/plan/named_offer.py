"""Select one exact offer named on the command line, for scripts that cannot answer questions.

    --cloud hyperstack --region canada-1 --instance-type H100     a provider that resells other clouds: all three
    --region us-east-1 --instance-type g5.xlarge                  a provider with its own machines: enough to tell apart

If the named offer does not exist, the error lists the nearest ones; nothing else is taken instead.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from homing.cloud.plan.plan import Plan
from homing.cloud.providers.base import Offer
from homing.cloud.run_commands import Words
from homing.errors import NoOffer, UsageError

__all__ = ["Exact", "only", "without_spot"]

_NEAR = 5


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
            why=f"{example.provider} offers instances from several clouds: give all three options, or none.",
            fix=f"For example: {flags_of(example)}",
        )
    if not rows:
        raise NoOffer(
            what=f"No provider currently offers {exact} for {plan.run.name}.",
            why=f"Queried, from cloud.providers: {', '.join(plan.run.cloud.providers)}."
            f" Closest: {'; '.join(_near(plan, exact))}.",
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
            fix=f"{words.to('launch')}   without --no-spot: a preempted run resumes from its checkpoint",
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
