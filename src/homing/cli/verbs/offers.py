"""`homing offers`: what every provider would rent now, lowest rate first."""

from __future__ import annotations

import dataclasses
import os
from decimal import Decimal
from typing import Annotated, Any

import typer

from homing.api.lookup.find_runs import open_home, usd
from homing.api.notices import say_problems
from homing.api.runs.plan_run import rate_age
from homing.cli import output
from homing.cli.options import Json
from homing.cloud.accounts import ACCOUNTS
from homing.cloud.plan.offers import Found, check_gpu, list_offers
from homing.cloud.providers.base import Needs, Offer
from homing.cloud.providers.registry import PROVIDERS, configured
from homing.errors import NoOffer, UsageError
from homing.gpus import MIN_CAPABILITY, find_gpu

__all__ = ["HEADERS", "command", "row_of"]

HEADERS = ["#", "Provider", "Region", "GPUs", "VRAM", "Price/hr", "NVLink"]


def command(
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Only instances with this GPU.")] = None,
    num_gpus: Annotated[int, typer.Option("--num-gpus", metavar="N", help="Number of GPUs.")] = 1,
    all_configs: Annotated[
        bool, typer.Option("--all-configs", help="Any number of GPUs: 1x, 2x, 4x, 8x and none.")
    ] = False,
    provider: Annotated[
        list[str] | None,
        typer.Option("--provider", metavar="NAME", help="Ask this provider; repeatable. Default: all that are set up."),
    ] = None,
    json_: Json = False,
) -> None:
    """List what can be rented now from every provider that is set up, lowest rate first. Rents nothing."""
    if num_gpus < 1:
        raise UsageError(
            what="--num-gpus must be 1 or more.", fix="Use --num-gpus 8, or --all-configs to allow any number."
        )
    counted = 0 if all_configs else num_gpus
    needs = Needs(gpu=check_gpu(gpu) if gpu else "", num_gpus=counted, capability=MIN_CAPABILITY)
    with open_home() as home:
        asked = set(configured(home.path, home.world))
        try:
            found = list_offers(needs, provider or [], home)
        except NoOffer as none:
            if provider or not (keyless := _keyless(asked)):
                raise
            # A provider that was not asked may have it: a new user needs the first step, homing setup.
            raise NoOffer(none.what, f"{none.why} {keyless}", f"homing setup runpod   {none.fix}") from none
        now = home.world.now()
    output.emit("offers/1", _document(found, now))
    name = f"{needs.gpu} Instances" if needs.gpu else "machines"
    extra = ["Offer", "Notes"]
    rows = (
        [*row_of(number, offer), offer.name, _notes(offer, now)] for number, offer in enumerate(found.offers, start=1)
    )
    output.table([*HEADERS, *extra], rows, title=f"Available {name} (sorted by price)")
    say_problems(found.problems)
    if not provider:
        _say_unasked(asked)
    output.say("\nThe lowest rate is not always the cheapest to finish. Next: homing plan RUN")


def _say_unasked(asked: set[str]) -> None:
    """Name providers with keys in the environment that are not set up, and those without a key."""
    for name, account in ACCOUNTS.items():
        if name in PROVIDERS and name not in asked and all(os.environ.get(key) for key in account.keys):
            output.say(f"{account.title} has an API key but is not set up yet: homing setup {name}")
    if keyless := _keyless(asked):
        output.say(f"{keyless} homing setup NAME")


def _keyless(asked: set[str]) -> str:
    """Name the clouds that were not asked because there is no key for them here."""
    names = [name for name, account in ACCOUNTS.items() if name in PROVIDERS and name not in asked]
    names = [name for name in names if not all(os.environ.get(key) for key in ACCOUNTS[name].keys)]
    return f"Skipped, no API key: {', '.join(names)}." if names else ""


def row_of(number: int, offer: Offer) -> list[str]:
    """Return one row of the offers table, which `launch` also shows for choosing."""
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


def _vram(offer: Offer) -> str:
    if not offer.num_gpus:  # the memory of such an offer is host memory
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
        said.append(f"preempted in {offer.interruptions_per_hour:.1%} of hours")
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
