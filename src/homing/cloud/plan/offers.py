"""Finds offers at all providers in parallel, each with a deadline.

    providers -> offers(needs), in parallel -> those that fit | rejected ones and why | providers that failed

If a provider fails or does not answer, the others' offers are still returned. They are sorted by hourly rate here;
`plan` sorts them by the cost to finish.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Protocol, runtime_checkable

from homing.cloud.ask_providers import ask_all
from homing.cloud.home import Home
from homing.cloud.providers.base import Needs, Offer, Provider, lack
from homing.cloud.providers.registry import configured
from homing.errors import HomingError, NoOffer, ProviderSilent, UsageError
from homing.gpus import GPUS, find_gpu, nearest_gpus
from homing.units import format_bytes, format_duration

__all__ = ["DEAR_USD_PER_HOUR", "Found", "LeftOut", "check_gpu", "find_offers", "is_dear", "list_offers", "rate_age"]

# A higher hourly rate than this must be allowed by limits.rate; --yes alone is not enough.
DEAR_USD_PER_HOUR = Decimal(20)
_KEEP = "checkpoint.keep_last"


@runtime_checkable
class Choosy(Protocol):
    """A provider that also lists machines homing cannot use, such as those with an unsupported operating system."""

    def left_out(self) -> list[tuple[Offer, str]]: ...  # offers of the last query that homing cannot use, and why


@dataclass(frozen=True)
class LeftOut:
    offer: Offer
    why: str


@dataclass(frozen=True)
class Found:
    offers: list[Offer] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # providers that could not be queried, one sentence each


def find_offers(needs: Needs, providers: Sequence[str], home: Home, *, explain: bool = False) -> Found:
    """Return all offers from these providers that meet the needs.

    If there is none, raises a NoOffer that says why each offer does not fit.

    With `explain`, each provider is queried again for its other offers, so that a plan can say why they do not fit.
    """
    found, errors = _ask(providers, lambda provider: _look(provider, needs, explain=explain), home)
    if errors and len(providers) == 1:
        raise next(iter(errors.values()))
    if not found.offers:
        raise _no_offer(needs, providers, home, found)
    return found


def list_offers(needs: Needs, providers: Sequence[str], home: Home) -> Found:
    """Return the offers from these providers (by default, all that are configured here), lowest rate first."""
    names = list(providers) or configured(home.path, home.world)
    found, errors = _ask(names, lambda provider: _look(provider, needs), home)
    # The number of GPUs must match exactly. Machines without GPUs stay in the list, unless a GPU was requested.
    if needs.num_gpus:
        kept = [offer for offer in found.offers if offer.num_gpus in (needs.num_gpus, 0)]
        found = Found(kept, found.left_out, found.problems)
    if not providers:
        # The user did not request these providers by name, so do not report providers that need more than a key, such
        # as a host or a run file.
        unnamed = {name for name, error in errors.items() if isinstance(error, UsageError)}
        problems = [_problem(name, error) for name, error in errors.items() if name not in unnamed]
        found = Found(found.offers, found.left_out, problems)
        errors = {name: error for name, error in errors.items() if name not in unnamed}
    if errors and not found.offers and len(errors) == len(names):
        raise _none_answered(errors)
    if not found.offers:
        raise NoOffer(
            what=f"No provider currently offers {_wanted(needs)}.",
            why=" ".join([*found.problems, f"Queried: {', '.join(names)}."]),
            fix="See all offers: homing offers --all-configs   or use another GPU: --gpu   or check keys and accounts:"
            " homing doctor",
        )
    ranked = sorted(found.offers, key=lambda offer: (offer.rate_usd_per_hour, offer.provider, offer.region, offer.name))
    return Found(ranked, found.left_out, found.problems)


def check_gpu(name: str) -> str:
    """Return the GPU's name as homing spells it, or raise a UsageError that lists the known names."""
    gpu = find_gpu(name)
    if gpu is None:
        near = nearest_gpus(name)
        raise UsageError(
            what=f"Unknown GPU: {name!r}.",
            why=f"Known: {', '.join(GPUS)}." + (f" Did you mean {' or '.join(near)}?" if near else ""),
            fix=f"Use --gpu {near[0] if near else 'H100'}",
        )
    return gpu.name


def is_dear(offer: Offer, limit_usd_per_hour: Decimal | None) -> bool:
    """Return True if an offer's hourly rate is so high that the user must agree to it explicitly."""
    return limit_usd_per_hour is None and offer.rate_usd_per_hour > DEAR_USD_PER_HOUR


def rate_age(offer: Offer, now: float) -> str:
    """Return a phrase with the rate's date, age and source, or "" if the provider has just reported the rate."""
    if offer.as_of is None and not offer.rate_source:
        return ""
    source = f" {offer.rate_source}" if offer.rate_source else ""
    if offer.as_of is None:
        return f"rate{source}"
    day = datetime.datetime.fromtimestamp(offer.as_of, tz=datetime.UTC).strftime("%Y-%m-%d")
    return f"rate of {day}, {format_duration(max(0.0, now - offer.as_of))} old{source}"


def _look(provider: Provider, needs: Needs, *, explain: bool = False) -> Found:
    offers = provider.offers(needs)
    if not explain:
        return Found(offers)
    every = provider.offers(Needs(gpu=needs.gpu, num_gpus=needs.num_gpus))
    left_out = [LeftOut(offer, why) for offer in every if (why := lack(offer, needs))]
    if isinstance(provider, Choosy):
        left_out += [LeftOut(offer, why) for offer, why in provider.left_out()]
    return Found(offers, left_out)


def _ask(
    names: Sequence[str], look: Callable[[Provider], Found], home: Home
) -> tuple[Found, dict[str, HomingError | OSError]]:
    """Query all providers in parallel. Opening them first, one by one, is fast, because it reads only a file or two."""
    found, errors = Found(), dict[str, HomingError | OSError]()
    opened: dict[str, Provider] = {}
    for name in names:
        try:
            opened[name] = home.provider(name)
        except HomingError as exc:
            errors[name] = exc
    questions = {name: lambda provider=provider: look(provider) for name, provider in opened.items()}
    for name, answer in ask_all(questions, home.world).items():
        if isinstance(answer, Found):
            found.offers.extend(answer.offers)
            found.left_out.extend(answer.left_out)
        else:
            errors[name] = _of_offers(answer)
    found.problems.extend(_problem(name, error) for name, error in errors.items())
    return found, errors


def _of_offers(error: HomingError | OSError) -> HomingError | OSError:
    """Reword a timeout error for an offer query. Unlike other calls, such a query cannot start any billing."""
    if not isinstance(error, ProviderSilent):
        return error
    fix = "Try again in a minute. To check whether a firewall blocks it: homing doctor"
    return ProviderSilent(error.what, error.reason, fix)


def _none_answered(errors: dict[str, HomingError | OSError]) -> HomingError | OSError:
    if len(errors) == 1:
        return next(iter(errors.values()))
    said = "\n".join(_problem(name, error) for name, error in errors.items())
    kind = UsageError if all(isinstance(error, UsageError) for error in errors.values()) else ProviderSilent
    return kind(what="Could not query any provider.", why=said, fix="Check your provider accounts: homing doctor")


def _problem(name: str, error: Exception) -> str:
    why, fix = (error.why, error.fix) if isinstance(error, HomingError) else ("", "")
    said = " ".join(part.splitlines()[0] for part in (str(error), why, fix) if part)
    return f"Could not query {name}: {said}"


def _wanted(needs: Needs) -> str:
    count = f"{needs.num_gpus}x " if needs.num_gpus else ""
    if needs.gpu:
        return f"{count}{needs.gpu}"
    return f"a machine with {format_bytes(needs.memory_bytes)}" if needs.memory_bytes else "a machine"


def _no_offer(needs: Needs, providers: Sequence[str], home: Home, found: Found) -> NoOffer:
    reasons, lacking = list(found.problems), list[Offer]()
    for name in providers:
        if not any(problem.startswith(f"Could not query {name}: ") for problem in reasons):
            lacking += home.provider(name).offers(Needs())
    reasons += [f"{offer.provider} {offer.name} {lack(offer, needs)}." for offer in lacking]
    fix = "Change cloud.gpu, cloud.providers or limits.rate, or make the model smaller; see: homing verify RUN"
    if set(providers) == {"local"}:  # usually the provider was chosen by the preset, not by the user
        fix = "Rent a GPU: homing plan RUN --set cloud.providers=runpod   or use a smaller model: homing verify RUN"
    small = [offer for offer in lacking if not lack(offer, dataclasses.replace(needs, disk_bytes=0))]
    if small:  # offers that would fit if they had more disk space
        more = format_bytes(min(needs.disk_bytes - offer.disk_bytes for offer in small))
        here = f"Free {more} at {home.path}, or move the home: export HOMING_HOME=/elsewhere"
        fix = here if all(offer.provider == "local" for offer in small) else f"Keep fewer checkpoints: {_KEEP}. {fix}"
    return NoOffer(
        what=f"No provider can start {_wanted(needs)} now.",
        why="\n".join(reasons) or f"Queried: {', '.join(providers)}.",
        fix=fix,
    )
