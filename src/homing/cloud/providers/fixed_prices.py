"""The only hard-coded rates, with date and source, for cases where the provider cannot be queried.

RunPod can be queried with an API key, so its rows are used only for estimates without a key (`list_prices`), never for
offers. An offer made from a row here carries the row's date (`Offer.as_of`) and source (`Offer.rate_source`), so that
the user sees how old the rate is. A rate that the provider itself reports always takes precedence.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from decimal import Decimal

__all__ = ["TABLE", "Price", "find_price"]


@dataclass(frozen=True)
class Price:
    provider: str
    name: str  # the provider's name for the machine or GPU
    usd_per_hour: Decimal
    date: str  # when the rate was looked up
    source: str  # where the rate was looked up

    @property
    def as_of(self) -> float:
        day = datetime.date.fromisoformat(self.date)
        return datetime.datetime(day.year, day.month, day.day, tzinfo=datetime.UTC).timestamp()

    @property
    def text(self) -> str:
        return f"copied from {self.source} on {self.date}"


def _rows(provider: str, date: str, source: str, rates: dict[str, str]) -> list[Price]:
    return [Price(provider, name, Decimal(rate), date, source) for name, rate in rates.items()]


# Rates are per GPU for modal and runpod (secure cloud), and per instance for aws (Linux, shared tenancy, us-east-1, on
# demand).
TABLE: list[Price] = [
    *_rows(
        "aws",
        "2026-08-22",
        "a catalog of EC2's price list",
        {
            "p5.4xlarge": "6.88",
            "p5.48xlarge": "55.04",
            "p5en.48xlarge": "63.30",
            "p6-b200.48xlarge": "113.93",
            "p6-b300.48xlarge": "142.42",
            "p4d.24xlarge": "21.96",
            "p4de.24xlarge": "27.45",
            "g7e.2xlarge": "3.363",
            "g6e.xlarge": "1.861",
            "g6.xlarge": "0.805",
            "g5.xlarge": "1.006",
            "g4dn.xlarge": "0.526",
        },
    ),
    *_rows(
        "runpod",
        "2026-08-22",
        "a catalog of RunPod's secure cloud",
        {
            "H100": "3.29",
            "H100-PCIe": "2.89",
            "H100-NVL": "3.19",
            "H200": "4.59",
            "B200": "6.79",
            "B300": "7.89",
            "A100": "1.59",
            "L40S": "0.99",
            "L40": "0.82",
            "L4": "0.49",
            "A40": "0.44",
            "RTX3090": "0.50",
            "RTX4090": "0.74",
            "RTX5090": "0.99",
            "RTXA4000": "0.25",
            "RTXA5000": "0.27",
            "RTXA6000": "0.53",
            "RTX6000Ada": "0.84",
        },
    ),
    *_rows(
        "modal",
        "2026-06-27",
        "modal.com/pricing",
        {
            "T4": "0.59",
            "L4": "0.80",
            "A10": "1.10",
            "A10G": "1.10",
            "L40S": "1.95",
            "A100-40GB": "2.10",
            "A100-80GB": "2.50",
            "RTX-PRO-6000": "3.03",
            "H100": "3.95",
            "H200": "4.54",
            "B200": "6.25",
        },
    ),
]


def find_price(provider: str, name: str) -> Price | None:
    return next((price for price in TABLE if (price.provider, price.name) == (provider, name)), None)
