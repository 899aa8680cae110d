"""List what every provider would rent out now, lowest rate first. Implements `homing offers` and `homing.offers()`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from homing.api.lookup.find_runs import open_home
from homing.cloud.api_key_table import ACCOUNTS
from homing.cloud.home import Home
from homing.cloud.plan.offers import check_gpu, list_offers
from homing.cloud.providers.base import Needs, Offer
from homing.cloud.providers.registry import PROVIDERS, configured
from homing.errors import NoOffer
from homing.gpus import MIN_CAPABILITY

__all__ = ["FoundOffers", "find_offers"]


@dataclass(frozen=True)
class FoundOffers:
    offers: list[Offer]
    problems: list[str]
    skipped: list[str]  # providers that were not queried, and how to set them up
    gpu: str  # usual name of the requested GPU; "" for any
    at: float

    def to_dict(self) -> dict[str, Any]:
        return {"offers": [self._show(offer) for offer in self.offers], "problems": self.problems}

    def _show(self, offer: Offer) -> dict[str, Any]:
        body = dataclasses.asdict(offer)
        body["rate_usd_per_hour"] = str(Decimal(offer.rate_usd_per_hour))
        body["rate_age_s"] = 0.0 if offer.as_of is None else max(0.0, self.at - offer.as_of)
        return body


def find_offers(
    *, gpu: str | None = None, num_gpus: int = 1, providers: Sequence[str] = (), home: Home | None = None
) -> FoundOffers:
    """Query the providers, by default all that are set up. Rents nothing. `num_gpus=0`: any number, including none."""
    needs = Needs(gpu=check_gpu(gpu) if gpu else "", num_gpus=num_gpus, capability=MIN_CAPABILITY)
    with open_home(home) as opened:
        asked = set(configured(opened.path, opened.world))
        try:
            found = list_offers(needs, list(providers), opened)
        except NoOffer as none:
            if providers or not (keyless := _keyless(asked)):
                raise
            # A provider that was not queried may have an offer, so suggest setting one up first.
            raise NoOffer(none.what, f"{none.why} {keyless}", f"homing setup runpod   {none.fix}") from none
        skipped = [] if providers else _skipped(asked)
        return FoundOffers(list(found.offers), found.problems, skipped, needs.gpu, opened.world.now())


def _skipped(asked: set[str]) -> list[str]:
    """Return a sentence for each provider that has an API key but is not set up, and one for those without a key."""
    said = [
        f"{account.title} has an API key but is not set up yet: homing setup {name}"
        for name, account in ACCOUNTS.items()
        if name in PROVIDERS and name not in asked and all(os.environ.get(key) for key in account.keys)
    ]
    keyless = _keyless(asked)
    return [*said, f"{keyless} homing setup NAME"] if keyless else said


def _keyless(asked: set[str]) -> str:
    """Return a sentence that names the providers skipped because no API key is set."""
    names = [name for name, account in ACCOUNTS.items() if name in PROVIDERS and name not in asked]
    names = [name for name in names if not all(os.environ.get(key) for key in ACCOUNTS[name].keys)]
    return f"Skipped, no API key: {', '.join(names)}." if names else ""
