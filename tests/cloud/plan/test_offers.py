"""Offers of all providers for given needs, queried concurrently."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from tests.cloud.shop import Shop, offer, open_shops

from homing.cloud.home import Home
from homing.cloud.plan.offers import check_gpu, find_offers, is_dear, list_offers
from homing.cloud.providers.base import Needs, Offer
from homing.cloud.providers.fixed_prices import TABLE, find_price
from homing.errors import NoOffer, ProviderRefused, ProviderSilent, UsageError
from homing.gpus import GPUS

REFUSED = ProviderRefused("north rejected the API key.", "It answered 401", "export NORTH_API_KEY=...")


def test_offers_of_all_come_sorted_by_rate(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(
        monkeypatch,
        north=Shop([offer(rate="3.00"), offer(rate="1.00", region="fjord")]),
        south=Shop([offer(rate="2.00")]),
    )
    found = list_offers(Needs(gpu="H100"), [], home)
    assert [(each.provider, str(each.rate_usd_per_hour)) for each in found.offers] == [
        ("north", "1.00"),
        ("south", "2.00"),
        ("north", "3.00"),
    ]
    assert found.problems == []


def test_a_failing_provider_is_reported_with_its_fix_and_hides_no_other(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_shops(monkeypatch, north=Shop(error=REFUSED), south=Shop([offer()]))
    found = list_offers(Needs(), [], home)
    assert [each.provider for each in found.offers] == ["south"]
    (problem,) = found.problems
    assert "north rejected the API key" in problem
    assert "export NORTH_API_KEY" in problem


def test_a_provider_that_does_not_answer_in_time_is_skipped(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.cloud.ask_providers.ASK_S", 0.2)
    open_shops(monkeypatch, north=Shop(delay_s=5.0), south=Shop([offer()]))
    began = time.monotonic()
    found = list_offers(Needs(), [], home)
    assert time.monotonic() - began < 3.0
    assert [each.provider for each in found.offers] == ["south"]
    assert "did not answer within 0.2 s" in found.problems[0]


def test_if_all_providers_fail_their_error_is_raised(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(monkeypatch, north=Shop(error=REFUSED))
    with pytest.raises(ProviderRefused, match="rejected the API key"):
        list_offers(Needs(), [], home)
    monkeypatch.setattr("homing.cloud.ask_providers.ASK_S", 0.1)
    open_shops(monkeypatch, north=Shop(delay_s=5.0))
    with pytest.raises(ProviderSilent):
        list_offers(Needs(), ["north"], home)


def test_providers_are_queried_concurrently(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(monkeypatch, **{f"shop{n}": Shop([offer()], delay_s=0.5) for n in range(6)})
    began = time.monotonic()
    assert len(list_offers(Needs(), [], home).offers) == 6
    assert time.monotonic() - began < 2.5


def test_a_programming_error_does_not_count_as_a_provider_failure(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(monkeypatch, north=Shop(error=KeyError("price")), south=Shop([offer()]))
    with pytest.raises(KeyError):
        list_offers(Needs(), [], home)


def test_a_provider_that_needs_more_setup_is_reported_only_if_named(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostless = UsageError("No SSH host is configured.")
    open_shops(monkeypatch, north=Shop(error=hostless), south=Shop([offer()]))
    assert list_offers(Needs(), [], home).problems == []
    assert "No SSH host is configured" in list_offers(Needs(), ["north", "south"], home).problems[0]


@pytest.mark.acceptance(51)
def test_a_gpu_count_is_matched_exactly_and_zero_matches_all(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [offer(num_gpus=n, rate=str(n)) for n in (1, 2, 4, 8)]
    open_shops(monkeypatch, north=Shop(sizes))
    assert [each.num_gpus for each in list_offers(Needs("H100", 4), [], home).offers] == [4]
    assert [each.num_gpus for each in list_offers(Needs("H100", 0), [], home).offers] == [1, 2, 4, 8]
    with pytest.raises(NoOffer, match="3x H100"):
        list_offers(Needs("H100", 3), [], home)


def test_an_unknown_card_lists_the_known_ones_and_the_nearest() -> None:
    assert check_gpu("h100 80gb hbm3") == "H100"
    with pytest.raises(UsageError) as caught:
        check_gpu("H10O")
    assert all(name in caught.value.why for name in GPUS)
    assert "Did you mean H100" in caught.value.why


def test_a_failing_provider_is_an_error_only_if_it_is_the_only_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(monkeypatch, north=Shop(error=REFUSED), south=Shop([offer()]))
    with pytest.raises(ProviderRefused):
        find_offers(Needs(), ["north"], home)
    found = find_offers(Needs(), ["north", "south"], home)
    assert [each.provider for each in found.offers] == ["south"]
    assert "north" in found.problems[0]


def test_explain_lists_why_an_offer_was_left_out(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(monkeypatch, north=Shop([offer("H100"), offer("T4", rate="0.30")]))
    found = find_offers(Needs(memory_bytes=40 * 2**30), ["north"], home, explain=True)
    assert [each.device for each in found.offers] == ["H100"]
    (left,) = found.left_out
    assert (left.offer.device, "memory" in left.why) == ("T4", True)


def test_explain_includes_offers_that_the_provider_excludes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    class Choosy(Shop):
        def left_out(self) -> list[tuple[Offer, str]]:
            return [(offer("A100", rate="0.90"), "runs only Windows")]

    open_shops(monkeypatch, north=Choosy([offer("H100")]))
    (left,) = find_offers(Needs(), ["north"], home, explain=True).left_out
    assert (left.offer.device, left.why) == ("A100", "runs only Windows")


def test_a_high_rate_needs_approval_only_without_a_rate_limit() -> None:
    assert is_dear(offer(num_gpus=8, rate="33.60"), None)
    assert not is_dear(offer(num_gpus=8, rate="33.60"), Decimal(40))
    assert not is_dear(offer(rate="2.49"), None)


def test_every_hard_coded_rate_has_a_date_and_a_source() -> None:
    assert TABLE
    for price in TABLE:
        assert price.usd_per_hour > 0
        assert price.source
        assert 1.7e9 < price.as_of < 2e9
        assert price.date in price.text
        assert "copied from" in price.text
    assert find_price("modal", "H100") is not None
    assert find_price("modal", "no such card") is None


def test_if_only_the_disk_is_too_small_the_fix_is_to_free_space(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Needs(memory_bytes=10**6, disk_bytes=40 * 10**6)
    monkeypatch.setattr("homing.world.World.free_bytes", lambda world, path: 9 * 10**6)
    with pytest.raises(NoOffer) as caught:
        find_offers(needs, ["local"], home)
    assert "has 9.00 MB of 40.00 MB disk" in caught.value.why
    assert caught.value.fix == f"Free 31.00 MB at {home.path}, or move the home: export HOMING_HOME=/elsewhere"
