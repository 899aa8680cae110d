"""EC2 market data: GPU instance types, the zones that offer them, their prices, and the account's quotas.

    describe_instance_types -> offerings by zone -> spot prices by zone, price list -> offers

A spot offer is named after its zone, or after its region if any zone may be used. Its rate is the most that an hour can
cost: the price in its most expensive zone plus the headroom that `MaxPrice` allows, the root disk and the public
address. Results are cached for a few minutes. This module rents nothing.

`guide` needs neither an account nor the network. It shows which instance types from a fixed list can train a model,
based on the memory that each phase needs on the type's GPU, with rates from the dated price table. By contrast,
`homing plan RUN` queries AWS itself.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, ROUND_UP, Decimal
from typing import Any

from homing.cloud.check_numbers import MOST_USD_PER_HOUR, Figures, read_figure
from homing.cloud.providers.aws.api import GLOBAL, AwsApi, AwsRefused
from homing.cloud.providers.base import Offer
from homing.cloud.providers.fixed_prices import Price, find_price
from homing.config.estimate.memory import Fit, fits_every_phase
from homing.errors import HomingError, ProviderSilent
from homing.gpus import GPUS, Gpu, find_gpu
from homing.wire.run_json import Run
from homing.world import World

__all__ = [
    "FAMILIES",
    "LEAST_GB",
    "SYSTEM_GB",
    "TYPES",
    "Choice",
    "Market",
    "Quota",
    "Row",
    "card_of",
    "disk_usd_per_hour",
    "guide",
    "quota_code",
    "quota_page",
    "region_of",
]

log = logging.getLogger(__name__)
# Families with NVIDIA GPUs suitable for training. g5g is left out because our image does not support its ARM CPU. p3 is
# left out because neither our torch nor the open driver in the image supports its old V100.
FAMILIES = ("g4dn", "g5", "g6", "gr6", "g6e", "g7", "g7e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300")
# Size of the machine image, and of the smallest root disk that also has room for a Python environment.
SYSTEM_GB, LEAST_GB = 75, 100
# Instance type -> GPU, number of GPUs, vCPUs, GiB of host memory, from AWS's web pages. p3 is almost phased out.
TYPES: dict[str, tuple[str, int, int, int]] = {
    "g4dn.xlarge": ("T4", 1, 4, 16),
    "g4dn.2xlarge": ("T4", 1, 8, 32),
    "g5.xlarge": ("A10G", 1, 4, 16),
    "g6.xlarge": ("L4", 1, 4, 16),
    "g6e.xlarge": ("L40S", 1, 4, 32),
    "p3.2xlarge": ("V100", 1, 8, 61),
    "p3.8xlarge": ("V100", 4, 32, 244),
    "p4d.24xlarge": ("A100-40GB", 8, 96, 1152),
    "p4de.24xlarge": ("A100", 8, 96, 1152),
    "p5.4xlarge": ("H100", 1, 16, 256),
    "p5.48xlarge": ("H100", 8, 192, 2048),
}
FRESH_S = 300.0
BOOT_S = 150.0  # typical boot time; long, because the first reads from an image of tens of GB are slow
_HOURS = 730  # hours in a month, as AWS counts them
# Prices of gp3 disks and of a public address. The us-east-1 list of 2026-08 has 0.08 and 0.005. Other regions charge up
# to 50% more for disks. We do not parse the disk prices in the price list, so the disk price here is an upper
# bound.
_DISK_USD_PER_GB_MONTH = Decimal("0.12")
_ADDRESS_USD_PER_HOUR = Decimal("0.005")
_SAME_AS_LIST = ("us-east-1", "us-east-2", "us-west-2")  # regions with the same list prices as us-east-1
# Codes of the vCPU quotas: (families, on-demand code, spot code). We do not know the spot code of p6.
_QUOTAS = (
    (("p5", "p5e", "p5en"), "L-417A185B", "L-C4BD4855"),
    (("p6-b200", "p6-b300"), "L-417A185B", ""),
    (("p3", "p3dn", "p4d", "p4de"), "L-417A185B", "L-7212CCBC"),
    (("g4dn", "g5", "g6", "gr6", "g6e", "g7", "g7e"), "L-DB2E81BA", "L-3819A6DF"),
    (("c", "m", "r", "t"), "L-1216C47A", "L-34B43A08"),  # instance types without a GPU, by the first letter of the type
)


@dataclass(frozen=True)
class Choice:
    """What the run file allows (regions, types, spot), and the disk sizes, which add to the hourly rate."""

    regions: tuple[str, ...]
    types: tuple[str, ...] = ()  # instance type patterns in the format of AWS filters, such as g5.*
    is_spot: bool = True
    headroom: Decimal = Decimal("0.1")
    root_gb: int = LEAST_GB
    volume_gb: int = 0


@dataclass(frozen=True)
class Kind:
    name: str
    device: str
    num_gpus: int  # 0 for a CPU-only type, which is offered only if the run file names that exact type
    memory_bytes: int  # memory of one GPU, or of the machine if it has no GPU
    num_cores: int
    can_spot: bool
    zones: tuple[str, ...]
    host_bytes: int = 0  # host memory


@dataclass(frozen=True)
class Quota:
    code: str
    num_cores: Decimal | None  # None if the quota could not be queried


@dataclass
class Region:
    """One region's instance types and prices at the time of the query."""

    name: str
    at: float
    kinds: list[Kind] = field(default_factory=list)
    spot: dict[tuple[str, str], Decimal] = field(default_factory=dict)  # (type, zone) -> dollars per hour
    listed: dict[str, Decimal] = field(default_factory=dict)  # type -> dollars per hour on demand
    list_problem: str = ""


class Market:
    def __init__(self, api: AwsApi, world: World) -> None:
        self._api, self._world = api, world
        self._looked: dict[tuple[str, tuple[str, ...]], Region] = {}
        self._quotas: dict[tuple[str, str], Quota] = {}

    def offers(self, choice: Choice) -> list[Offer]:
        return [offer for name in choice.regions for offer in self._offers_of(self._region(name, choice.types), choice)]

    def zones(self, offer: Offer, choice: Choice) -> list[str]:
        """Return the zones that can fill this offer without exceeding its rate, cheapest first."""
        place, kind_name, market = offer.name.split("/")
        region = self._region(region_of(place), choice.types, max_age_s=0.0)
        kind = next((kind for kind in region.kinds if kind.name == kind_name), None)
        if kind is None:
            return []
        if market != "spot":
            return list(kind.zones)
        prices = {zone: region.spot[kind.name, zone] for zone in kind.zones if (kind.name, zone) in region.spot}
        rates = {zone: self._rate(usd, choice, is_spot=True) for zone, usd in prices.items()}
        fitting = [zone for zone, rate in rates.items() if rate <= offer.rate_usd_per_hour]
        return sorted(fitting, key=lambda zone: (prices[zone], zone))

    def most_usd(self, offer: Offer, choice: Choice) -> Decimal:
        """Return the maximum spot price: the offer's rate minus disk and public address, which AWS bills separately."""
        return offer.rate_usd_per_hour - self._disk_and_address_usd(choice).quantize(
            Decimal("0.0001"), rounding=ROUND_DOWN
        )

    def quota(self, region: str, kind: str, *, is_spot: bool) -> Quota:
        code = quota_code(kind, is_spot=is_spot)
        if (region, code) not in self._quotas:
            self._quotas[region, code] = Quota(code, self._ask_quota(region, code))
        return self._quotas[region, code]

    def num_cores(self, region: str, kind: str, choice: Choice) -> int:
        return next((each.num_cores for each in self._region(region, choice.types).kinds if each.name == kind), 0)

    # --- one region ---

    def _region(self, name: str, types: tuple[str, ...], max_age_s: float = FRESH_S) -> Region:
        key, now = (name, types), self._world.monotonic()
        known = self._looked.get(key)
        if known is None or now - known.at >= max_age_s:
            known = self._look(name, types, now)
            self._looked[key] = known
        return known

    def _look(self, name: str, types: tuple[str, ...], now: float) -> Region:
        wanted = list(types) or [f"{family}.*" for family in FAMILIES]
        only = [{"Name": "instance-type", "Values": wanted}]
        found = self._api.items("ec2", "describe_instance_types", "InstanceTypes", name, Filters=only)
        by_zone = self._api.items("ec2", "describe_instance_type_offerings", "InstanceTypeOfferings", name,
                                  LocationType="availability-zone", Filters=only)  # fmt: skip
        zones: dict[str, list[str]] = {}
        for row in by_zone:
            if re.fullmatch(f"{name}[a-z]", row["Location"]):  # excludes local zones in other cities
                zones.setdefault(row["InstanceType"], []).append(row["Location"])
        seen = [_kind(each, zones.get(each["InstanceType"], []), types) for each in found]
        kinds = [kind for kind in seen if kind is not None]
        region = Region(name, now, sorted(kinds, key=lambda kind: kind.name))
        region.spot = self._spot_prices(name, [kind.name for kind in kinds if kind.can_spot])
        try:
            region.listed = self._list_prices(name, types)
        except (AwsRefused, ProviderSilent) as exc:
            # Fall back to the dated price table. Offers based on it show the table's date.
            region.list_problem = (exc.reason if isinstance(exc, ProviderSilent) else exc.why) or exc.what
        return region

    def _spot_prices(self, region: str, kinds: list[str]) -> dict[tuple[str, str], Decimal]:
        if not kinds:
            return {}
        since = datetime.datetime.fromtimestamp(self._world.now(), tz=datetime.UTC)
        rows = self._api.items("ec2", "describe_spot_price_history", "SpotPriceHistory", region,
                               InstanceTypes=kinds, ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
                               StartTime=since)  # fmt: skip
        # With a start time of now, AWS returns the latest price change in each zone, which is the current price.
        rows.sort(key=lambda row: row["Timestamp"])
        read = Figures("aws")
        prices = {
            (row["InstanceType"], row["AvailabilityZone"]): read.rate("SpotPrice", row["SpotPrice"]) for row in rows
        }
        for problem in read.problems:
            log.warning("%s Skipping offers in this zone.", problem)
        return {where: usd for where, usd in prices.items() if usd}

    def _list_prices(self, region: str, types: tuple[str, ...]) -> dict[str, Decimal]:
        """Return list prices, from one query for all GPU instances, or one query per type if exact types are given."""
        exact = [{"instanceType": name} for name in types if "*" not in name]
        asked = exact if exact and len(exact) == len(types) else [{"instanceFamily": "GPU instance"}]
        prices = {}
        for which in asked:
            match = {"regionCode": region, "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA",
                     "capacitystatus": "Used", **which}  # fmt: skip
            filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in match.items()]
            texts: list[Any] = self._api.items("pricing", "get_products", "PriceList", GLOBAL,
                                               ServiceCode="AmazonEC2", Filters=filters)  # fmt: skip
            for product in (json.loads(text) for text in texts):
                usd = _on_demand(product)
                if usd is not None:
                    prices[str(product["product"]["attributes"]["instanceType"])] = usd
        return prices

    def _ask_quota(self, region: str, code: str) -> Decimal | None:
        if not code:
            return None
        try:
            found = self._api.call("service-quotas", "get_service_quota", region, ServiceCode="ec2", QuotaCode=code)
            return read_figure(found["Quota"]["Value"], 10**9)
        except (HomingError, KeyError):
            return None  # the key may lack permission to query quotas, but EC2 itself enforces them

    # --- offers ---

    def _offers_of(self, region: Region, choice: Choice) -> list[Offer]:
        found = []
        for kind in region.kinds:
            found += self._spot_offers(region, kind, choice) if choice.is_spot and kind.can_spot else []
            listed = self._on_demand_offer(region, kind, choice)
            found += [listed] if listed is not None else []
        return found

    def _spot_offers(self, region: Region, kind: Kind, choice: Choice) -> list[Offer]:
        prices = {zone: region.spot[kind.name, zone] for zone in kind.zones if (kind.name, zone) in region.spot}
        if not prices:
            return []
        least, most = min(prices.values()), max(prices.values())
        cheapest = min(prices, key=lambda zone: (prices[zone], zone))
        offers = [self._offer(kind, region.name, "spot", self._rate(most, choice, is_spot=True), choice)]
        if least < most:
            offers.insert(0, self._offer(kind, cheapest, "spot", self._rate(least, choice, is_spot=True), choice))
        return offers

    def _on_demand_offer(self, region: Region, kind: Kind, choice: Choice) -> Offer | None:
        if kind.name in region.listed:
            return self._offer(kind, region.name, "on-demand", self._rate(region.listed[kind.name], choice), choice)
        typed = find_price("aws", kind.name) if region.name in _SAME_AS_LIST else None
        if typed is None:
            return None
        rate, why = self._rate(typed.usd_per_hour, choice), f" ({region.list_problem})" if region.list_problem else ""
        return self._offer(kind, region.name, "on-demand", rate, choice, typed.as_of, typed.text + why)

    def _rate(self, usd: Decimal, choice: Choice, *, is_spot: bool = False) -> Decimal:
        most = usd * (1 + choice.headroom) if is_spot else usd
        return (most + self._disk_and_address_usd(choice)).quantize(Decimal("0.0001"), rounding=ROUND_UP)

    def _disk_and_address_usd(self, choice: Choice) -> Decimal:
        return disk_usd_per_hour(choice.root_gb + choice.volume_gb) + _ADDRESS_USD_PER_HOUR

    def _offer(
        self,
        kind: Kind,
        place: str,
        market: str,
        rate: Decimal,
        choice: Choice,
        as_of: float | None = None,
        source: str = "",
    ) -> Offer:
        return Offer(
            provider="aws",
            name=f"{place}/{kind.name}/{market}",
            device=kind.device,
            num_gpus=kind.num_gpus,
            num_cores=kind.num_cores,
            memory_bytes=kind.memory_bytes,
            rate_usd_per_hour=rate,
            disk_bytes=(choice.root_gb - SYSTEM_GB) * 10**9,
            region=place,
            instance_type=kind.name,
            boot_s=BOOT_S,
            is_spot=market == "spot",
            as_of=as_of,
            rate_source=source,
            host_bytes=kind.host_bytes,
        )


def region_of(place: str) -> str:
    """Return the region of a zone: us-east-1a -> us-east-1. A region is returned unchanged."""
    return place[:-1] if place[-1].isalpha() else place


def disk_usd_per_hour(num_gb: int) -> Decimal:
    return num_gb * _DISK_USD_PER_GB_MONTH / _HOURS


def quota_code(kind: str, *, is_spot: bool) -> str:
    family = kind.partition(".")[0]
    codes = next(((listed, spot) for names, listed, spot in _QUOTAS if family in names or family[0] in names), ("", ""))
    return codes[1] if is_spot else codes[0]


def quota_page(region: str, code: str) -> str:
    return f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/{code}"


def card_of(name: str, mebibytes: int) -> Gpu | None:
    """Return the GPU with this name and memory size. AWS gives both A100 sizes the same name, and both V100 sizes."""
    first = find_gpu(name)
    if first is None:
        return None
    kin = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] == first.name.partition("-")[0]]
    return min(kin, key=lambda gpu: (abs(gpu.memory_gib * 1024 - mebibytes), gpu.name != first.name))


def _kind(body: dict[str, Any], zones: list[str], types: tuple[str, ...]) -> Kind | None:
    name, cards = str(body["InstanceType"]), body.get("GpuInfo", {}).get("Gpus", [])
    if not zones or name.endswith(".metal") or (not cards and name not in types):
        return None
    device, num_gpus, mebibytes = "CPU", 0, int(body["MemoryInfo"]["SizeInMiB"])
    if cards:
        mebibytes = int(cards[0]["MemoryInfo"]["SizeInMiB"])
        card = card_of(str(cards[0]["Name"]), mebibytes)
        num_gpus = int(cards[0].get("Count", 0))
        # Skip types with only a fraction of a GPU, which have a GPU count of 0.
        if len(cards) != 1 or cards[0].get("Manufacturer") != "NVIDIA" or not num_gpus:
            return None
        device = card.name if card else str(cards[0]["Name"])
    return Kind(
        name=name,
        device=device,
        num_gpus=num_gpus,
        memory_bytes=mebibytes * 2**20,
        num_cores=int(body["VCpuInfo"]["DefaultVCpus"]),
        can_spot="spot" in body.get("SupportedUsageClasses", []),
        zones=tuple(sorted(zones)),
        host_bytes=int(body["MemoryInfo"]["SizeInMiB"]) * 2**20,
    )


def _on_demand(product: dict[str, Any]) -> Decimal | None:
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term.get("priceDimensions", {}).values():
            usd = read_figure(dimension.get("pricePerUnit", {}).get("USD", "0"), MOST_USD_PER_HOUR)
            if dimension.get("unit") == "Hrs" and usd:
                return usd
    return None


@dataclass(frozen=True)
class Row:
    type: str
    card: str
    num_gpus: int
    num_cores: int
    memory_gib: int
    fit: Fit  # how the phase that needs the most memory fits on the GPU
    price: Price | None  # the on-demand price in us-east-1, with its date

    @property
    def is_fitting(self) -> bool:
        return self.fit.is_fitting


def guide(run: Run) -> list[Row]:
    """Return one row per instance type, in table order. Each phase must fit on a single GPU, without sharding."""
    rows = []
    for name, (card, num_gpus, num_cores, memory_gib) in TYPES.items():
        (worst,) = fits_every_phase(run, {card: GPUS[card]})
        rows.append(Row(name, card, num_gpus, num_cores, memory_gib, worst, find_price("aws", name)))
    return rows
