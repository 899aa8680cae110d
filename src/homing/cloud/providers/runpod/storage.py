"""RunPod's network volumes: disks that are bound to a data center, outlive pods, and bill until deleted.

ours       named homing-<owner6>-NAME: created on demand, listed, and deleted only at the user's request
others     found by id or name: mounted, but never changed
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from homing.cloud.check_numbers import read_figure
from homing.cloud.providers.base import Resource
from homing.cloud.providers.rest import Api, Unsure
from homing.cloud.providers.runpod.api import CONSOLE
from homing.errors import CreateFailed, UsageError
from homing.units import format_bytes, format_usd

__all__ = ["Volume", "check_volume", "find_volume", "list_volumes", "make_volume", "monthly_usd", "resource"]

# Dollars per GB per month for the first TB, and for every GB above that. From RunPod's price page of 2026-08.
_USD_PER_GB_MONTH = (Decimal("0.07"), Decimal("0.05"))
# Factor for high-performance volumes. The API reports no price for them, so assume twice the standard price. homing
# never creates such a volume.
_HIGH_PERFORMANCE = 2
_FIRST_GB = 1000
_HOURS_PER_MONTH = Decimal(730)
_LOOKS = 3
_MOST_GB = 10**7


@dataclass(frozen=True)
class Volume:
    id: str
    name: str
    num_gb: int
    data_center: str
    kind: str


def list_volumes(api: Api) -> list[Volume]:
    return [_volume(body) for body in api.items("/network-volumes", "networkVolumes")]


def find_volume(volumes: list[Volume], wanted: str, prefix: str) -> Volume | None:
    """Find a volume by its id, its full name, or its name in the run file; raise UsageError if two match."""
    found = [each for each in volumes if wanted in (each.id, each.name) or each.name == f"{prefix}{wanted}"]
    if len(found) > 1:
        ids = ", ".join(f"{each.id} in {each.data_center}" for each in found)
        raise UsageError(
            what=f"More than one network volume is named {wanted!r}.",
            why=f"RunPod lists {ids}.",
            fix="Use the id of the volume that you want: cloud.runpod.volume: ID",
        )
    return found[0] if found else None


def make_volume(api: Api, name: str, num_gb: int, data_center: str, settle_s: float) -> Volume:
    """Create exactly one volume. The API does not deduplicate by name, so check the list if the response is lost."""
    # Specify the volume type, because a data center's default may be the more expensive type.
    body = {"name": name, "size": num_gb, "dataCenter": data_center, "type": "STANDARD"}
    try:
        return _volume(api.post("/network-volumes", body))
    except Unsure as exc:
        for look in range(_LOOKS):
            if look:
                api.world.sleep(settle_s / (_LOOKS - 1))
            made = next((each for each in list_volumes(api) if each.name == name), None)
            if made is not None:
                return made
        raise CreateFailed(
            what=f"runpod may have created the network volume {name}.",
            why=f"{exc}. RunPod does not list the volume.",
            fix="Check whether the volume is listed now: homing reconcile   Then launch again.",
        ) from exc


def resource(volume: Volume) -> Resource:
    month = monthly_usd(volume.num_gb, volume.kind)
    text = f"{volume.num_gb} GB in {volume.data_center}, {format_usd(month)} a month until it is deleted"
    if not volume.num_gb:
        text = f"in {volume.data_center}; runpod reports no valid size, so its price is unknown"
    rate = month / _HOURS_PER_MONTH
    return Resource("volume", volume.id, volume.name, "runpod", rate, detail=text, is_kept=True)


def monthly_usd(num_gb: int, kind: str = "STANDARD") -> Decimal:
    first, more = _USD_PER_GB_MONTH
    usd = min(num_gb, _FIRST_GB) * first + max(0, num_gb - _FIRST_GB) * more
    return usd * (_HIGH_PERFORMANCE if kind == "HIGH_PERFORMANCE" else 1)


def check_volume(volume: Volume, settings: dict[str, Any]) -> None:
    places = settings["data_centers"]
    if places and volume.data_center not in places:
        raise UsageError(
            what=f"The network volume {volume.name} is in {volume.data_center}.",
            why=f"cloud.runpod.data_centers allows only {', '.join(places)},"
            " but a pod must be in the same data center as its volume.",
            fix=f"Set cloud.runpod.data_centers: [{volume.data_center}]",
        )
    if volume.num_gb * 10**9 < settings["volume_size"]:
        raise UsageError(
            what=f"The network volume {volume.name} has only {volume.num_gb} GB.",
            why=f"cloud.runpod.volume_size is {format_bytes(settings['volume_size'])}. homing does not resize volumes.",
            fix=f"Resize it at {CONSOLE}/user/storage, or lower cloud.runpod.volume_size",
        )


def _volume(body: dict[str, Any]) -> Volume:
    # Accept a volume with an implausible size, so that it is listed and can be deleted.
    size = read_figure(body["size"], _MOST_GB)
    return Volume(str(body["id"]), str(body["name"]), int(size or 0), str(body["dataCenter"]), str(body["type"]))
