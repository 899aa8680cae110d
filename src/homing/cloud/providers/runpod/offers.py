"""Offers from RunPod's live catalogue: GPU, number of GPUs, location, availability and rate.

    GET /catalog/gpus?include=AVAILABILITY&product=POD&count=N&cloud=...&minCudaVersion=...   once per cloud and count

An offer's name contains everything that the create call needs. Availability is a hint, not a reservation.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_UP, Decimal
from typing import Any
from urllib.parse import urlencode

from homing.cloud.check_numbers import Figures
from homing.cloud.providers.base import Offer
from homing.cloud.providers.rest import Api
from homing.gpus import Gpu, find_gpu

__all__ = ["ANYWHERE", "COUNTS", "Choice", "Wanted", "dollars", "find", "storage_rate"]

log = logging.getLogger(__name__)
COUNTS = (1, 2, 4, 8)  # the GPU counts to query if the run does not need a specific one
ANYWHERE = "any"  # region of an offer whose data center RunPod chooses
# The catalogue has no storage prices. These are dollars per GB per month from RunPod's price page of 2026-08.
_DISK_USD_PER_GB_MONTH = Decimal("0.10")
_HOURS_PER_MONTH = Decimal(730)
_ROUND = Decimal("0.0001")  # rounds rates, because RunPod sends 32-bit floats: 3.29 arrives as 3.2899999618530273
_BOOT_S = 240.0  # time to pull the image, create the environment and fetch the inputs
_MOST_GB = 10**6


@dataclass(frozen=True)
class Wanted:
    """Parameters of a catalogue query."""

    counts: tuple[int, ...]
    clouds: tuple[str, ...]  # secure, community
    disk_gb: int  # size of the container's disk, included in the rate
    free_bytes: int  # the part of the disk that is available to a run
    min_cuda: str  # minimum CUDA version of the host's driver
    data_centers: tuple[str, ...] = ()  # data centers that the run file allows; empty if any is allowed


@dataclass(frozen=True)
class Choice:
    """The parts of an offer's name: GPU, number of GPUs, and cloud."""

    gpu_id: str
    count: int
    cloud: str

    @property
    def name(self) -> str:
        return f"{self.gpu_id} x{self.count} {self.cloud}"

    @classmethod
    def of(cls, name: str) -> Choice:
        found = re.fullmatch(r"(.+) x(\d+) (secure|community)", name)
        assert found is not None, f"{name!r} is not a runpod offer"
        return cls(found[1], int(found[2]), found[3])


def find(api: Api, wanted: Wanted) -> list[Offer]:
    return [
        offer
        for cloud in wanted.clouds
        for count in wanted.counts
        for body in api.items(_query(wanted, cloud, count), "gpus")
        for offer in _offers(body, wanted, cloud, count)
    ]


def dollars(amount: Decimal) -> Decimal:
    """Return the rate, rounded up, so that our figure is never below the bill.

    The digits beyond the fifth are removed first, because they are noise of a 32-bit float.
    """
    return amount.quantize(_ROUND / 10).quantize(_ROUND, ROUND_UP)


def storage_rate(num_gb: int) -> Decimal:
    """Return the hourly price of a container disk, rounded up. The rate from the API does not include the disk."""
    return (num_gb * _DISK_USD_PER_GB_MONTH / _HOURS_PER_MONTH).quantize(_ROUND, ROUND_UP)


def _query(wanted: Wanted, cloud: str, count: int) -> str:
    asked = {"include": "AVAILABILITY", "product": "POD", "count": count, "cloud": cloud.upper()}
    return "/catalog/gpus?" + urlencode({**asked, "minCudaVersion": wanted.min_cuda})


def _offers(body: dict[str, Any], wanted: Wanted, cloud: str, count: int) -> Iterator[Offer]:
    """Yield one offer for any location or, if the run file lists data centers, an offer per data center with stock.

    GPUs that are not available now or could not run our torch are skipped.
    """
    read, stock = Figures("runpod"), str(body.get("availability", "NONE"))
    rate, most = read.rate("price", body["price"][cloud]), read.whole("maxCount", body["maxCount"][cloud])
    memory_gb = read.whole("memory", body["memory"], _MOST_GB)
    if read.problems:
        log.warning("Skipping offer %s: %s", body.get("id"), " ".join(read.problems))
    if rate is None or most is None or memory_gb is None:
        return
    card, rate = _card(str(body["id"]), memory_gb), dollars(rate)
    if not body[cloud] or stock == "NONE" or rate <= 0 or count > most:
        return
    if body["manufacturer"] != "NVIDIA":
        return
    levels = {str(place["id"]): str(place["availability"]) for place in body.get("dataCenters") or ()}
    places = {name: level for name, level in levels.items() if level != "NONE"}
    if wanted.data_centers:
        places = {name: level for name, level in places.items() if name in wanted.data_centers}
    for region, level in places.items() if wanted.data_centers else [(ANYWHERE, stock)]:
        yield Offer(
            provider="runpod",
            name=Choice(str(body["id"]), count, cloud).name,
            device=card.name if card else str(body["name"]),
            num_gpus=count,
            num_cores=0,  # unknown until the pod is running
            memory_bytes=min(memory_gb, card.memory_gib if card else _MOST_GB) * 2**30,
            rate_usd_per_hour=rate * count + storage_rate(wanted.disk_gb),
            disk_bytes=wanted.free_bytes,
            region=region,
            boot_s=_BOOT_S,
            cloud=cloud,
            stock=level.lower() + (f" in {len(places)} data centers" if region == ANYWHERE and places else ""),
        )


def _card(name: str, memory_gb: int) -> Gpu | None:
    """Return the known GPU with this name and memory, or None. By its name alone, an A4000 could match the A40."""
    card = find_gpu(name)
    if card is None or abs(card.memory_gib - memory_gb) > 0.1 * card.memory_gib:
        return None
    return card
