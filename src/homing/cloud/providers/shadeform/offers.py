"""Offers from Shadeform's catalogue: one for each machine type, region and rental type.

    instance type x availability (region, on_demand | spot) -> Offer | left out, with the reason

The price of a type is a whole number of cents, but the price of a spot entry is a string in dollars. Type names are
free-form, so the GPU is identified by gpu_type, memory and interconnect, never by parsing the type name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from homing.cloud.check_numbers import MOST_USD_PER_HOUR, Figures
from homing.cloud.providers.base import Offer
from homing.gpus import GPUS, Gpu, find_gpu

__all__ = ["ON_DEMAND", "SPOT", "Catalogue", "Choice", "choose_os", "offer_name", "rate_of", "read_catalogue"]

ON_DEMAND, SPOT = "on_demand", "spot"
_MOST = 10**6  # maximum plausible number of GPUs, cores or GB in one machine
_BOOT_S = 600.0  # used if the catalogue gives no boot time; 3 to 20 minutes are typical
_HAND_OVER_S = 60.0
_MEMORY_OFF = 0.1  # tolerance when comparing GPU memory with our table, because some clouds list a 192 GB GPU as 180 GB


@dataclass(frozen=True)
class Choice:
    """The run file's settings that select catalogue entries: clouds, spot and OS."""

    clouds: tuple[str, ...] = ()
    is_spot_fine: bool = False
    os: str = ""


@dataclass(frozen=True)
class Catalogue:
    offers: list[Offer] = field(default_factory=list)
    left_out: list[tuple[Offer, str]] = field(default_factory=list)  # unusable entries, each with a short reason
    types: dict[str, dict[str, Any]] = field(default_factory=dict)  # offer name -> catalogue entry of the machine type


def read_catalogue(types: list[dict[str, Any]], provider: str, choice: Choice) -> Catalogue:
    found = Catalogue()
    for body in types:
        why_not = _unfit(body, choice)
        for entry in _entries(body):
            rental = str(entry.get("rental_type") or ON_DEMAND)
            name = offer_name(body["cloud"], entry["region"], body["shade_instance_type"], rental)
            if rental == SPOT and not choice.is_spot_fine:
                continue  # not requested
            read = Figures("Shadeform")
            offer = _offer(provider, name, body, entry, rental, read)
            reason = why_not or _unfit_entry(entry, rental)
            if not reason and (read.problems or not offer.rate_usd_per_hour):
                reason = " ".join(["has numbers that are not valid.", *read.problems])
            if reason:
                found.left_out.append((offer, reason))
                continue
            found.offers.append(offer)
            found.types[name] = body
    return found


def offer_name(cloud: str, region: str, instance_type: str, rental: str) -> str:
    return f"{cloud}/{region}/{instance_type}" + (f"/{SPOT}" if rental == SPOT else "")


def rate_of(read: Figures, cents: Any, dollars: Any = None) -> Decimal | None:
    """Return the price in dollars per hour, from the string `dollars` if it is set, else from the integer `cents`.

    Return None if the price is not plausible.
    """
    if isinstance(dollars, str) and dollars:
        return read.rate("hourly_price", dollars)
    number = read.whole("hourly_price", cents, int(MOST_USD_PER_HOUR * 100))
    return None if number is None else Decimal(number) / 100


def choose_os(options: list[str], wanted: str = "") -> str:
    """Return the operating system to request: `wanted`, or "" if `wanted` is not in `options`.

    Without `wanted`, return the newest Ubuntu, preferably one of Shadeform's own images.
    """
    if wanted:
        return wanted if wanted in options else ""
    ubuntu = [option for option in options if option.startswith("ubuntu")]
    return max(ubuntu or options, key=_os_rank, default="")


def _os_rank(option: str) -> tuple[bool, list[int]]:
    return option.endswith("_shade_os"), [int(number) for number in re.findall(r"\d+", option)]


def _entries(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one entry per region and rental type. A region with spot instances yields two entries."""
    seen = set()
    for entry in body.get("availability") or []:
        key = (entry["region"], entry.get("rental_type") or ON_DEMAND)
        if entry.get("available") and key not in seen:
            seen.add(key)
            yield entry


def _unfit(body: dict[str, Any], choice: Choice) -> str:
    has = body["configuration"]
    gpu_type, maker = str(has["gpu_type"]), str(has.get("gpu_manufacturer") or "nvidia").lower()
    if choice.clouds and body["cloud"] not in choice.clouds:
        return f"is on {body['cloud']}, which cloud.shadeform.clouds does not list"
    if re.match(r"(?i)g[hb]\d", gpu_type):
        return f"has arm64 processors ({gpu_type}), which homing has no wheels for"
    if maker != "nvidia":
        return f"has {maker} GPUs, and training needs CUDA"
    if not has["num_gpus"]:
        return "has no GPU"
    if body["deployment_type"] == "container":
        return "is a container, where Shadeform runs no startup script"
    if not choose_os(list(has.get("os_options") or []), choice.os):
        return f"does not offer {choice.os}" if choice.os else "lists no operating system"
    return ""


def _unfit_entry(entry: dict[str, Any], rental: str) -> str:
    if rental not in (ON_DEMAND, SPOT):
        return f"is rented out as {rental!r}"
    if rental == SPOT and not isinstance(entry.get("hourly_price"), str):
        return "has no spot price"
    return ""


def _offer(provider: str, name: str, body: dict[str, Any], entry: dict[str, Any], rental: str, read: Figures) -> Offer:
    has, boot = body["configuration"], body.get("boot_time")
    shape = {
        key: read.whole(key, has.get(key), _MOST) or 0
        for key in ("vram_per_gpu_in_gb", "num_gpus", "vcpus", "storage_in_gb", "memory_in_gb")
    }
    rate = rate_of(read, body.get("hourly_price"), entry.get("hourly_price") if rental == SPOT else None)
    boot_s = read.seconds("max_boot_in_sec", boot.get("max_boot_in_sec"), 86400.0) if isinstance(boot, dict) else None
    card = _card(str(has["gpu_type"]), shape["vram_per_gpu_in_gb"], str(has.get("interconnect") or ""))
    return Offer(
        provider=provider,
        name=name,
        device=card.name if card else str(has["gpu_type"]),
        num_gpus=shape["num_gpus"],
        num_cores=shape["vcpus"],
        memory_bytes=shape["vram_per_gpu_in_gb"] * 2**30,
        rate_usd_per_hour=rate if rate is not None else Decimal(0),
        disk_bytes=shape["storage_in_gb"] * 10**9,
        region=str(entry["region"]),
        boot_s=(boot_s or _BOOT_S) + _HAND_OVER_S,
        cloud=str(body["cloud"]),
        instance_type=str(body["shade_instance_type"]),
        nvlink=has.get("nvlink") if isinstance(has.get("nvlink"), bool) else None,
        is_spot=rental == SPOT,
        host_bytes=shape["memory_in_gb"] * 2**30,
    )


def _card(gpu_type: str, memory_gb: int, interconnect: str) -> Gpu | None:
    """Return the GPU in our table with this name and memory. `A4000` contains "A40" but is a different GPU."""
    named = find_gpu(gpu_type)
    if named is None:
        return None
    family = [gpu for gpu in GPUS.values() if gpu.name.split("-")[0] == named.name.split("-")[0]]
    fitting = [gpu for gpu in family if abs(gpu.memory_gib - memory_gb) <= _MEMORY_OFF * memory_gb]
    is_pcie = "pcie" in interconnect.lower()
    # GPUs with the same name and memory may differ in their interconnect: a PCIe H100 is slower than an SXM H100.
    return min(fitting, key=lambda gpu: gpu.name.endswith(("-PCIe", "-NVL")) != is_pcie, default=None)
