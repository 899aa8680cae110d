"""Questions that only a person at a terminal can answer: which offer to take, whether an SSH fingerprint is right."""

from __future__ import annotations

import sys
from decimal import Decimal

from homing.api.lookup.find_runs import usd
from homing.cli import output
from homing.cli.verbs.offers import HEADERS, row_of
from homing.cloud.commands_to_type import Words
from homing.cloud.plan.offers import DEAR_USD_PER_HOUR, is_dear
from homing.cloud.plan.plan import OfferPlan, Plan
from homing.cloud.providers.ssh.connection import HostKeyUnknown
from homing.cloud.try_offers import is_within_plan, name_of
from homing.errors import UsageError
from homing.units import format_duration

__all__ = ["agrees_to_host", "agrees_to_next", "agrees_to_rate", "select"]


def agrees_to_host(unknown: HostKeyUnknown) -> bool:
    """Ask the user to verify the fingerprint of a new SSH host; --yes does not answer this question."""
    if not sys.stdin.isatty():
        return False
    output.say(f"{unknown.what}\n{unknown.why}")
    return output.ask("Is this the host's fingerprint? It will be pinned.", yes=False)


def select(plan: Plan, *, yes: bool) -> OfferPlan | None:
    """Return the offer that the user picks, or None if the user quits.

    Return the best offer without asking if --yes is set, if there is only one offer, or if there is no terminal (in
    that case the next question raises an error).
    """
    if yes or len(plan.offers) == 1 or not sys.stdin.isatty():
        return plan.best
    rows = ([*row_of(n, row.offer), *_to_finish(row)] for n, row in enumerate(plan.offers, start=1))
    output.table([*HEADERS, "Offer", "Time", "To finish"], rows, title="Offers, cheapest to finish first")
    while True:
        print(f"Select instance [1-{len(plan.offers)}] or 'q' to quit: ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if answer.strip().lower() in ("q", "quit") or not answer:
            return None
        if answer.strip().isdigit() and 1 <= int(answer) <= len(plan.offers):
            return _picked(plan, plan.offers[int(answer) - 1])
        output.say(f"{answer.strip()!r} is not one of the choices.")


def agrees_to_rate(row: OfferPlan, words: Words, limit_usd_per_hour: Decimal | None) -> bool:
    """Ask the user to confirm a high hourly rate. One hour may cost more than a whole run, so --yes is not enough."""
    if not is_dear(row.offer, limit_usd_per_hour):
        return True
    rate = usd(row.offer.rate_usd_per_hour)
    question = f"{name_of(row.offer)} costs {rate}/h. Continue?"
    if not sys.stdin.isatty():
        # A resumed run does not accept --set, so the user cannot set limits.rate and must confirm at a terminal.
        again, change = words.to("launch"), f" --set limits.rate={row.offer.rate_usd_per_hour}   or"
        raise UsageError(
            what=f"{name_of(row.offer)} costs {rate}/h, which needs confirmation.",
            why=f"Rates over {usd(DEAR_USD_PER_HOUR)}/h need confirmation, even with --yes, unless limits.rate is set.",
            fix=f"{again}{'   and' if words.is_resume else change} confirm at a terminal",
        )
    return output.ask(question, yes=False)


def agrees_to_next(row: OfferPlan, agreed: OfferPlan, limit_usd_per_hour: Decimal | None, *, yes: bool) -> bool:
    """Return whether to use the next offer if the agreed one is gone. --yes accepts a cost close to the agreed one."""
    more = row.cost_usd - agreed.cost_usd
    if yes and is_within_plan(row, agreed, limit_usd_per_hour):
        return True
    if not sys.stdin.isatty():
        output.say(
            f"Skipped an offer: finishing the run on it would cost {usd(more)} more than on the offer you agreed to."
            " To allow such offers, pass --set limits.rate=..."
        )
        return False
    difference = f"{usd(more)} more" if more > 0 else f"{usd(-more)} less"
    return output.ask(f"Use it instead, {difference} to finish?", yes=False)


def _to_finish(row: OfferPlan) -> list[str]:
    return [row.offer.name, format_duration(row.seconds), usd(row.cost_usd)]


def _picked(plan: Plan, row: OfferPlan) -> OfferPlan:
    more = plan.more_usd(row)
    if more > 0:
        cheapest = name_of(plan.best.offer)
        output.say(f"Finishing the run on this offer costs {usd(more)} more than on the cheapest, {cheapest}.")
    return row
