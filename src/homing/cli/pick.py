"""How `launch` lets a person choose: the offers of the plan as a numbered table, and `q` for none of them."""

from __future__ import annotations

import sys
from decimal import Decimal

from homing.cli import talk
from homing.cli.control import usd
from homing.cli.offers import HEADERS, row_of
from homing.cloud.choose import is_within_plan, name_of
from homing.cloud.offers import DEAR_USD_PER_HOUR, is_dear
from homing.cloud.plan import OfferPlan, Plan
from homing.cloud.words import Words
from homing.errors import UsageError
from homing.units import format_duration

__all__ = ["agrees_to_next", "agrees_to_rate", "select"]


def select(plan: Plan, *, yes: bool) -> OfferPlan | None:
    """The best with --yes, where nobody can be asked (the question that follows refuses then), or where it is the only
    one; otherwise what the person picks, None for none."""
    if yes or len(plan.offers) == 1 or not sys.stdin.isatty():
        return plan.best
    rows = ([*row_of(n, row.offer), *_to_finish(row)] for n, row in enumerate(plan.offers, start=1))
    talk.table([*HEADERS, "Offer", "Time", "To finish"], rows, title="Offers, cheapest to finish first")
    while True:
        print(f"Select instance [1-{len(plan.offers)}] or 'q' to quit: ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if answer.strip().lower() in ("q", "quit") or not answer:
            return None
        if answer.strip().isdigit() and 1 <= int(answer) <= len(plan.offers):
            return _picked(plan, plan.offers[int(answer) - 1])
        talk.say(f"{answer.strip()!r} is none of them.")


def agrees_to_rate(row: OfferPlan, words: Words, limit_usd_per_hour: Decimal | None) -> bool:
    """--yes agrees to the plan, not to an hour that costs more than most people's whole run."""
    if not is_dear(row.offer, limit_usd_per_hour):
        return True
    rate = usd(row.offer.rate_usd_per_hour)
    question = f"{name_of(row.offer)} costs {rate} an hour. Is that meant?"
    if not sys.stdin.isatty():
        # A run that goes on takes no change, so it can only be answered for.
        again, change = words.to("launch"), f" --set limits.rate={row.offer.rate_usd_per_hour}   or"
        raise UsageError(
            what=f"{name_of(row.offer)} costs {rate} an hour, and nobody has said that it may.",
            why=f"Over {usd(DEAR_USD_PER_HOUR)}/h it is asked for by name, also with --yes, unless limits.rate is set.",
            fix=f"{again}{'   and' if words.is_resume else change} answer at a terminal",
        )
    return talk.ask(question, yes=False)


def agrees_to_next(row: OfferPlan, agreed: OfferPlan, limit_usd_per_hour: Decimal | None, *, yes: bool) -> bool:
    """Of an offer in the place of one that is gone: --yes takes it while it is about as dear as what was agreed to."""
    more = row.cost_usd - agreed.cost_usd
    if yes and is_within_plan(row, agreed, limit_usd_per_hour):
        return True
    if not sys.stdin.isatty():
        talk.say(f"It is not taken: {usd(more)} more to finish than agreed. With --set limits.rate=... it would be.")
        return False
    difference = f"{usd(more)} more" if more > 0 else f"{usd(-more)} less"
    return talk.ask(f"Take it instead, {difference} to finish?", yes=False)


def _to_finish(row: OfferPlan) -> list[str]:
    return [row.offer.name, format_duration(row.seconds), usd(row.cost_usd)]


def _picked(plan: Plan, row: OfferPlan) -> OfferPlan:
    more = plan.more_usd(row)
    if more > 0:
        talk.say(f"It costs {usd(more)} more to finish than the cheapest, {name_of(plan.best.offer)}.")
    return row
