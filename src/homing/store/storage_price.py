"""Monthly cost of keeping data in a store, at published prices for standard storage.

Prices are in dollars per GB (10^9 bytes) per month, excluding tax, requests, transfer and free tiers. The prices of S3
Standard (first 50 TB, by region) and Cloudflare R2 were published in 2025. Modal charges for Volumes per GiB, at the
price that `modal billing rates` showed in 2026. If no published price is known, only the size is reported: for a
self-hosted service, for any other region, and for the Hub, whose plans include storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from urllib.parse import urlsplit

from homing.store.address import parse_s3, scheme_of
from homing.units import format_bytes

__all__ = ["Kept", "kept"]

PUBLISHED = "2025"
_S3_USD_PER_GB_MONTH = {
    "us-east-1": "0.023",
    "us-east-2": "0.023",
    "us-west-1": "0.026",
    "us-west-2": "0.023",
    "ca-central-1": "0.025",
    "eu-west-1": "0.023",
    "eu-west-2": "0.024",
    "eu-west-3": "0.024",
    "eu-central-1": "0.0245",
    "eu-north-1": "0.023",
    "ap-south-1": "0.025",
    "ap-southeast-1": "0.025",
    "ap-southeast-2": "0.025",
    "ap-northeast-1": "0.025",
    "sa-east-1": "0.0405",
}
_R2_USD_PER_GB_MONTH = "0.015"
_VOLUME_USD_PER_GIB_MONTH = "0.09"


@dataclass(frozen=True)
class Kept:
    """Data that remains in a store, and what it costs each month."""

    num_bytes: int
    usd_per_month: Decimal | None  # None if no published price is known
    rate: str  # the price and where it comes from, for display

    def __str__(self) -> str:
        if self.usd_per_month is None:
            return f"{format_bytes(self.num_bytes)}; {self.rate}"
        shown = f"${self.usd_per_month:.2f}" if self.usd_per_month >= Decimal("0.005") else "under $0.01"
        return f"{format_bytes(self.num_bytes)}, about {shown} a month ({self.rate})"

    def to_dict(self) -> dict[str, object]:
        usd = None if self.usd_per_month is None else str(self.usd_per_month)
        return {"num_bytes": self.num_bytes, "usd_per_month": usd, "rate": self.rate}


def kept(url: str, num_bytes: int, region: str = "", endpoint: str = "") -> Kept:
    """Return the size and monthly cost of data in a store. `region` and `endpoint` are used if `url` omits them."""
    scheme = scheme_of(url)
    if scheme == "file":
        return Kept(num_bytes, None, "in your own folder, free of charge")
    if scheme == "hf":
        return Kept(num_bytes, None, "counted against your Hub plan")
    if scheme == "modal":
        usd = Decimal(num_bytes) / 2**30 * Decimal(_VOLUME_USD_PER_GIB_MONTH)
        rate = f"Modal Volume, ${_VOLUME_USD_PER_GIB_MONTH} per GiB, published 2026"
        return Kept(num_bytes, usd.quantize(Decimal("0.0001")), rate)
    address = parse_s3(url)
    where = urlsplit(address.endpoint or endpoint).hostname or ""
    if where.endswith(".r2.cloudflarestorage.com"):
        return _priced(num_bytes, _R2_USD_PER_GB_MONTH, "R2 standard")
    is_inside = address.region or region
    if where and not where.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return Kept(num_bytes, None, f"homing does not know the storage price of {where}")
    if is_inside not in _S3_USD_PER_GB_MONTH:
        return Kept(num_bytes, None, f"no known price for the region {is_inside or '(none set)'}")
    return _priced(num_bytes, _S3_USD_PER_GB_MONTH[is_inside], f"S3 Standard in {is_inside}")


def _priced(num_bytes: int, usd_per_gb: str, what: str) -> Kept:
    usd = Decimal(num_bytes) / Decimal(10**9) * Decimal(usd_per_gb)
    return Kept(num_bytes, usd.quantize(Decimal("0.0001")), f"{what}, ${usd_per_gb} per GB, published {PUBLISHED}")
