"""Modal's offers: a fixed list of its GPUs, at the rates that Modal reports, or at dated list prices otherwise.

    GPUs x 1, 2, 4, 8  ->  GPU + reserved cores + reserved memory  ->  one rate per hour

Modal bills for the reserved or the used cores and memory, whichever is more. Usage is capped at the reservation, so
that the rate is also the maximum. Modal does not list free GPUs. If none is free, a sandbox waits in a queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.providers.base import Needs, Offer, lack
from homing.cloud.providers.fixed_prices import find_price
from homing.gpus import GPUS

__all__ = ["CPU_ONLY", "Size", "gpu_string", "make_offers", "rate_key"]

CPU_ONLY = "cpu"
_CPU_ONLY_FACTOR = 2  # without a GPU, twice the cores and memory, because the CPU does all the work
LIFETIME_S = 86400.0  # maximum lifetime of a sandbox
_BOOT_S = 90.0  # time to start a container with a large image, including the agent's bootstrap and first push
_COUNTS = (1, 2, 4, 8)
# Prices for sandboxes, which are about three times as high as for functions: modal.com/pricing, 2026-06-27.
_CORE_USD_PER_HOUR = Decimal("0.1419")
_GIB_USD_PER_HOUR = Decimal("0.0242")
_REST_SOURCE = "copied from modal.com/pricing on 2026-06-27"


@dataclass(frozen=True)
class Card:
    name: str  # Modal's name
    device: str  # our name
    most: int  # maximum number of GPUs in one machine
    asked_as: str = ""  # the name to request, if `name` may yield a different GPU


_CARDS = (
    Card("T4", "T4", 8),
    Card("L4", "L4", 8),
    Card("A10", "A10", 4),
    Card("A10G", "A10G", 4),
    Card("L40S", "L40S", 8),
    Card("A100-40GB", "A100-40GB", 8),
    Card("A100-80GB", "A100", 8),
    Card("RTX-PRO-6000", "RTXPRO6000", 8),
    # A request for H100 may get an H200, which the plan did not assume. A request for H100! always gets an H100.
    Card("H100", "H100", 8, "H100!"),
    Card("H200", "H200", 8),
    Card("B200", "B200", 8),
)


@dataclass(frozen=True)
class Size:
    """Cores and memory for each GPU. A machine without a GPU gets twice these amounts."""

    cores: float
    memory_bytes: int

    def of(self, num_gpus: int) -> tuple[float, int]:
        """Return the whole machine's number of cores and its memory in MiB, as the create call expects them."""
        factor = num_gpus or _CPU_ONLY_FACTOR
        return self.cores * factor, self.memory_bytes * factor // 2**20


def make_offers(needs: Needs, size: Size, rates: Mapping[str, Decimal]) -> list[Offer]:
    """Return the offers that meet the run's needs, sorted by rate.

    `rates` contains the rates that Modal reported, if any.
    """
    found = [_offer(card, count, size, rates) for card in _CARDS for count in _COUNTS if count <= card.most]
    found.append(_cpu_offer(size))
    fitting = [offer for offer in found if not lack(offer, needs)]
    return sorted(fitting, key=lambda offer: (offer.rate_usd_per_hour, offer.name))


def gpu_string(offer: Offer) -> str | None:
    """Return the GPU string for the create call, or None for a machine without a GPU."""
    if not offer.num_gpus:
        return None
    card = next(card for card in _CARDS if card.name == offer.name.partition(":")[0])
    return f"{card.asked_as or card.name}:{offer.num_gpus}"


def rate_key(name: str) -> str:
    """Return the key of a GPU in Modal's list of rates, such as gpu_hour_cost_a100_80gb."""
    plain = "A10" if name == "A10G" else name
    return "gpu_hour_cost_" + plain.lower().replace("-", "_")


def _offer(card: Card, count: int, size: Size, rates: Mapping[str, Decimal]) -> Offer:
    rate, price = rates.get(rate_key(card.name)), find_price("modal", card.name)
    as_of, source = None, f"of Modal; cores and memory {_REST_SOURCE}"
    if rate is None:
        assert price is not None, f"{card.name} has no listed rate"
        rate, as_of, source = price.usd_per_hour, price.as_of, price.text
    cores, _ = size.of(count)
    return Offer(
        provider="modal",
        name=card.name if count == 1 else f"{card.name}:{count}",
        device=card.device,
        num_gpus=count,
        num_cores=max(1, int(cores)),
        memory_bytes=GPUS[card.device].memory_gib * 2**30,
        rate_usd_per_hour=rate * count + _rest_usd(count, size),
        boot_s=_BOOT_S,
        as_of=as_of,
        rate_source=source,
        lifetime_s=LIFETIME_S,
    )


def _cpu_offer(size: Size) -> Offer:
    cores, mib = size.of(0)
    price = find_price("modal", "T4")
    assert price is not None, "the dated table has Modal's rows"
    return Offer(
        provider="modal",
        name=CPU_ONLY,
        device="CPU",
        num_gpus=0,
        num_cores=max(1, int(cores)),
        memory_bytes=mib * 2**20,
        rate_usd_per_hour=_rest_usd(0, size),
        boot_s=_BOOT_S,
        as_of=price.as_of,
        rate_source=_REST_SOURCE,
        lifetime_s=LIFETIME_S,
    )


def _rest_usd(num_gpus: int, size: Size) -> Decimal:
    cores, mib = size.of(num_gpus)
    usd = Decimal(str(cores)) * _CORE_USD_PER_HOUR + Decimal(mib) / 1024 * _GIB_USD_PER_HOUR
    return usd.quantize(Decimal("0.0001"))
