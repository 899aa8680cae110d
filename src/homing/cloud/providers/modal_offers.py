"""What Modal would rent: a table of its GPUs, at the rates it tells or, where it does not, at dated ones.

    cards x 1, 2, 4, 8  ->  GPU + reserved cores + reserved memory  ->  one rate per hour

Modal bills the larger of what is reserved and what is used, so both are capped at what is reserved: then the rate is
the most it can be. There is no list of what is free: a sandbox without a free GPU waits in a queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.prices import find_price
from homing.cloud.providers.base import Needs, Offer, lack
from homing.gpus import GPUS

__all__ = ["CPU_ONLY", "Size", "gpu_string", "make_offers", "rate_key"]

CPU_ONLY = "cpu"
_CPU_ONLY_FACTOR = 2  # a machine without a card gets twice what goes with one: all the work is the processor's
LIFETIME_S = 86400.0  # no sandbox lives longer, whatever is asked
_BOOT_S = 90.0  # a container with a large image; the agent's bootstrap and first push included
_COUNTS = (1, 2, 4, 8)
# Sandboxes pay about three times what functions pay for cores and memory: modal.com/pricing, 2026-06-27.
_CORE_USD_PER_HOUR = Decimal("0.1419")
_GIB_USD_PER_HOUR = Decimal("0.0242")
_REST_SOURCE = "typed in from modal.com/pricing of 2026-06-27"


@dataclass(frozen=True)
class Card:
    name: str  # as Modal calls it
    device: str  # as we do
    most: int  # in one machine
    asked_as: str = ""  # where the plain name may bring another card


_CARDS = (
    Card("T4", "T4", 8),
    Card("L4", "L4", 8),
    Card("A10", "A10", 4),
    Card("A10G", "A10G", 4),
    Card("L40S", "L40S", 8),
    Card("A100-40GB", "A100-40GB", 8),
    Card("A100-80GB", "A100", 8),
    Card("RTX-PRO-6000", "RTXPRO6000", 8),
    Card("H100", "H100", 8, "H100!"),  # else Modal may give an H200, which is not the card that was planned with
    Card("H200", "H200", 8),
    Card("B200", "B200", 8),
)


@dataclass(frozen=True)
class Size:
    """What goes with each GPU, or makes up a machine without one."""

    cores: float
    memory_bytes: int

    def of(self, num_gpus: int) -> tuple[float, int]:
        """Cores and MiB of the whole machine, as the create call takes them."""
        factor = num_gpus or _CPU_ONLY_FACTOR
        return self.cores * factor, self.memory_bytes * factor // 2**20


def make_offers(needs: Needs, size: Size, told: Mapping[str, Decimal]) -> list[Offer]:
    """`told` is Modal's own list of rates, empty where it gave none. Lowest rate first."""
    found = [_offer(card, count, size, told) for card in _CARDS for count in _COUNTS if count <= card.most]
    found.append(_cpu_offer(size))
    fitting = [offer for offer in found if not lack(offer, needs)]
    return sorted(fitting, key=lambda offer: (offer.rate_usd_per_hour, offer.name))


def gpu_string(offer: Offer) -> str | None:
    """What the create call asks for; None for a machine without a card."""
    if not offer.num_gpus:
        return None
    card = next(card for card in _CARDS if card.name == offer.name.partition(":")[0])
    return f"{card.asked_as or card.name}:{offer.num_gpus}"


def rate_key(name: str) -> str:
    """How a card is called in Modal's list of rates: gpu_hour_cost_a100_80gb."""
    plain = "A10" if name == "A10G" else name
    return "gpu_hour_cost_" + plain.lower().replace("-", "_")


def _offer(card: Card, count: int, size: Size, told: Mapping[str, Decimal]) -> Offer:
    rate, price = told.get(rate_key(card.name)), find_price("modal", card.name)
    as_of, source = None, f"of Modal; cores and memory {_REST_SOURCE}"
    if rate is None:
        assert price is not None, f"{card.name} has no dated rate"
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
