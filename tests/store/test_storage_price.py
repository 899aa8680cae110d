"""What lives on in a store shows its price where one is published, and bytes where none is."""

from __future__ import annotations

from decimal import Decimal

import pytest

from homing.store.storage_price import kept


@pytest.mark.acceptance(139)
def test_s3_is_priced_by_region() -> None:
    found = kept("s3://bucket/x?region=us-east-1", 100 * 10**9)
    assert found.usd_per_month == Decimal("2.3")
    assert "$2.30 a month" in str(found)
    assert "us-east-1" in str(found)
    assert kept("s3://bucket", 10**12, region="sa-east-1").usd_per_month == Decimal("40.5")


def test_r2_has_a_price_of_its_own() -> None:
    assert kept("s3://bucket?endpoint=https://a.r2.cloudflarestorage.com", 10**9).usd_per_month == Decimal("0.015")


@pytest.mark.acceptance(139)
def test_without_a_known_price_only_bytes_are_shown() -> None:
    for found in (
        kept("s3://bucket", 10**9),
        kept("s3://bucket?region=mars-1", 10**9),
        kept("s3://bucket?endpoint=http://minio.local:9000&region=us-east-1", 10**9),
        kept("s3://bucket", 10**9, region="us-east-1", endpoint="http://127.0.0.1:9000"),
        kept("hf:me/x", 10**9),
        kept("file:/x", 10**9),
    ):
        assert found.usd_per_month is None
        assert "$" not in str(found)
        assert found.to_dict()["num_bytes"] == 10**9
