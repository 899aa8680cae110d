"""Needs to offers from every provider that the run file names."""

from __future__ import annotations

from homing.cloud.home import Home
from homing.cloud.providers.base import Needs, Offer, lack
from homing.errors import HomingError, NoOffer
from homing.units import format_bytes

__all__ = ["find_offers"]


def find_offers(needs: Needs, providers: list[str], home: Home) -> tuple[list[Offer], list[str]]:
    """Offers that cover the needs, and what could not be asked. One provider's failure does not hide another's offers.

    None at all is NoOffer, with what each provider lacks.
    """
    offers: list[Offer] = []
    problems: list[str] = []
    for name in providers:
        try:
            offers += home.provider(name).offers(needs)
        except (HomingError, OSError) as exc:
            if len(providers) == 1:
                raise
            problems.append(f"{name} could not be asked: {str(exc).splitlines()[0]}")
    if not offers:
        raise _no_offer(needs, providers, home, problems)
    return offers, problems


def _no_offer(needs: Needs, providers: list[str], home: Home, problems: list[str]) -> NoOffer:
    reasons = list(problems)
    for name in providers:
        if not any(problem.startswith(name) for problem in problems):
            reasons += [f"{name} {offer.name} {lack(offer, needs)}." for offer in home.provider(name).offers(Needs())]
    wanted = f"{needs.num_gpus}x {needs.gpu}" if needs.gpu else f"a machine with {format_bytes(needs.memory_bytes)}"
    return NoOffer(
        what=f"No provider can start {wanted} now.",
        why="\n".join(reasons) or f"Asked: {', '.join(providers)}.",
        fix="Change cloud.gpu, cloud.providers or limits.rate, or make the model smaller; see: homing verify",
    )
