"""`homing offers`: what can be rented now from every provider, lowest rate first."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.lookup.find_runs import usd
from homing.api.notices import say_problems
from homing.api.runs.find_offers import find_offers
from homing.cli import output
from homing.cli.options import Json
from homing.cloud.plan.offers import rate_age
from homing.cloud.providers.base import Offer
from homing.errors import UsageError
from homing.gpus import find_gpu

__all__ = ["HEADERS", "command", "row_of"]

HEADERS = ["#", "Provider", "Region", "GPUs", "VRAM", "Price/hr", "NVLink"]


def command(
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Show only instances with this GPU.")] = None,
    num_gpus: Annotated[int, typer.Option("--num-gpus", metavar="N", help="Number of GPUs.")] = 1,
    all_configs: Annotated[
        bool, typer.Option("--all-configs", help="Show offers with any number of GPUs, including none.")
    ] = False,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            "--provider",
            metavar="NAME",
            help="Query only this provider; repeatable. Default: every provider that is set up.",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """List what can be rented now from every provider that is set up, lowest rate first. Rents nothing."""
    if num_gpus < 1:
        raise UsageError(
            what="--num-gpus must be 1 or more.", fix="Use --num-gpus 8, or --all-configs to allow any number."
        )
    found = find_offers(gpu=gpu, num_gpus=0 if all_configs else num_gpus, providers=provider or [])
    output.emit("offers/1", found.to_dict())
    name = f"{found.gpu} Instances" if found.gpu else "machines"
    extra = ["Offer", "Notes"]
    rows = ([*row_of(n, offer), offer.name, _notes(offer, found.at)] for n, offer in enumerate(found.offers, start=1))
    output.table([*HEADERS, *extra], rows, title=f"Available {name} (sorted by price)")
    say_problems(found.problems)
    for sentence in found.skipped:
        output.say(sentence)
    output.say("\nThe offer with the lowest rate is not always the cheapest way to finish a run. Next: homing plan RUN")


def row_of(number: int, offer: Offer) -> list[str]:
    """Return one row of the offers table. `launch` shows the same rows when the user chooses an offer."""
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
    if not offer.num_gpus:  # without a GPU, the offer's memory is host memory
        return "-"
    gpu = find_gpu(offer.device)
    return f"{gpu.memory_gib if gpu else _gib(offer)}GB"


def _gib(offer: Offer) -> int:
    return round(offer.memory_bytes / 2**30)


def _notes(offer: Offer, now: float) -> str:
    said = ["spot"] if offer.is_spot else []
    if offer.num_gpus and find_gpu(offer.device) is None:
        said.append("unknown GPU: homing cannot plan runs on it")
    if offer.interruptions_per_hour:
        said.append(f"{offer.interruptions_per_hour:.1%} preemption risk per hour")
    said += [f"stock {offer.stock}"] if offer.stock else []
    said += [rate_age(offer, now)] if rate_age(offer, now) else []
    return ", ".join(said)
