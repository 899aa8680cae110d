"""`homing offers`: what every provider would rent now, lowest rate first."""

from __future__ import annotations

import dataclasses
import datetime
import os
from decimal import Decimal
from typing import Annotated, Any

import typer

from homing.cli import talk
from homing.cli.control import open_home, say_problems, usd
from homing.cli.options import Json
from homing.cloud.accounts import ACCOUNTS
from homing.cloud.offers import Found, check_gpu, list_offers
from homing.cloud.providers.base import Needs, Offer
from homing.cloud.providers.registry import PROVIDERS, configured
from homing.errors import NoOffer, UsageError
from homing.gpus import MIN_CAPABILITY, find_gpu
from homing.units import format_duration

__all__ = ["HEADERS", "command", "rate_age", "row_of"]

HEADERS = ["#", "Provider", "Region", "GPUs", "VRAM", "Price/hr", "NVLink"]


def command(
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Only machines with this card.")] = None,
    num_gpus: Annotated[int, typer.Option("--num-gpus", metavar="N", help="With so many of them.")] = 1,
    all_configs: Annotated[
        bool, typer.Option("--all-configs", help="Any number of cards: 1x, 2x, 4x, 8x and none.")
    ] = False,
    provider: Annotated[
        list[str] | None,
        typer.Option("--provider", metavar="NAME", help="Ask this one; may be given several times. Else: all set up."),
    ] = None,
    json_: Json = False,
) -> None:
    """What could be rented now, lowest rate first, from every provider that is set up here. Rents nothing."""
    if num_gpus < 1:
        raise UsageError(what="--num-gpus: a number from 1 on.", fix="--num-gpus 8   or any: --all-configs")
    counted = 0 if all_configs else num_gpus
    needs = Needs(gpu=check_gpu(gpu) if gpu else "", num_gpus=counted, capability=MIN_CAPABILITY)
    with open_home() as home:
        asked = set(configured(home.path, home.world))
        try:
            found = list_offers(needs, provider or [], home)
        except NoOffer as none:
            if provider or not (keyless := _keyless(asked)):
                raise
            # Who was not asked may have it: a new user's first question is answered with the first step.
            raise NoOffer(none.what, f"{none.why} {keyless}", f"homing setup runpod   {none.fix}") from none
        now = home.world.now()
    talk.emit("offers/1", _document(found, now))
    name = f"{needs.gpu} Instances" if needs.gpu else "machines"
    extra = ["Offer", "Notes"]
    rows = (
        [*row_of(number, offer), offer.name, _notes(offer, now)] for number, offer in enumerate(found.offers, start=1)
    )
    talk.table([*HEADERS, *extra], rows, title=f"Available {name} (sorted by price)")
    say_problems(found.problems)
    if not provider:
        _say_unasked(asked)
    talk.say("\nThe lowest rate is not always the cheapest to finish. Next: homing plan RUN")


def _say_unasked(asked: set[str]) -> None:
    """Somebody has a key and has not said that it is for machines."""
    for name, account in ACCOUNTS.items():
        if name in PROVIDERS and name not in asked and all(os.environ.get(key) for key in account.keys):
            talk.say(f"{account.title} has keys here and is not asked yet: homing setup {name}")
    if keyless := _keyless(asked):
        talk.say(f"{keyless} homing setup NAME")


def _keyless(asked: set[str]) -> str:
    """Clouds that were not asked because nobody has an account with them here."""
    names = [name for name, account in ACCOUNTS.items() if name in PROVIDERS and name not in asked]
    names = [name for name in names if not all(os.environ.get(key) for key in ACCOUNTS[name].keys)]
    return f"Not asked, for want of a key: {', '.join(names)}." if names else ""


def row_of(number: int, offer: Offer) -> list[str]:
    """One line of the table, also of the one that `launch` lets a person choose from."""
    nvlink = {True: "Yes", False: "No", None: "?"}[offer.nvlink] if offer.num_gpus else "-"
    return [
        str(number),
        f"{offer.provider}/{offer.cloud}" if offer.cloud else offer.provider,
        offer.region or "-",
        f"{offer.num_gpus}x {offer.device}" if offer.num_gpus else f"{offer.num_cores} cores, {_gib(offer)}GB RAM",
        _vram(offer),
        f"{usd(offer.rate_usd_per_hour)}",
        nvlink,
    ]


def rate_age(offer: Offer, now: float) -> str:
    """How old the rate is; "" where the provider told it just now."""
    if offer.as_of is None and not offer.rate_source:
        return ""
    source = f" {offer.rate_source}" if offer.rate_source else ""
    if offer.as_of is None:
        return f"rate{source}"
    day = datetime.datetime.fromtimestamp(offer.as_of, tz=datetime.UTC).strftime("%Y-%m-%d")
    return f"rate of {day}, {format_duration(max(0.0, now - offer.as_of))} old{source}"


def _vram(offer: Offer) -> str:
    if not offer.num_gpus:  # what such an offer has is the memory of the computer
        return "-"
    gpu = find_gpu(offer.device)
    return f"{gpu.memory_gib if gpu else _gib(offer)}GB"


def _gib(offer: Offer) -> int:
    return round(offer.memory_bytes / 2**30)


def _notes(offer: Offer, now: float) -> str:
    said = ["spot"] if offer.is_spot else []
    if offer.num_gpus and find_gpu(offer.device) is None:
        said.append("unknown GPU: cannot be planned")
    if offer.interruptions_per_hour:
        said.append(f"taken away {offer.interruptions_per_hour:.1%} of hours")
    said += [f"stock {offer.stock}"] if offer.stock else []
    said += [rate_age(offer, now)] if rate_age(offer, now) else []
    return ", ".join(said)


def _document(found: Found, now: float) -> dict[str, Any]:
    def show(offer: Offer) -> dict[str, Any]:
        body = dataclasses.asdict(offer)
        body["rate_usd_per_hour"] = str(Decimal(offer.rate_usd_per_hour))
        body["rate_age_s"] = 0.0 if offer.as_of is None else max(0.0, now - offer.as_of)
        return body

    return {"offers": [show(offer) for offer in found.offers], "problems": found.problems}
