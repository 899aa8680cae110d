"""Needs to offers from every provider, at once."""

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


def test_one_dead_provider_is_told_with_its_fix_and_hides_nobody(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(monkeypatch, north=Shop(error=REFUSED), south=Shop([offer()]))
    found = list_offers(Needs(), [], home)
    assert [each.provider for each in found.offers] == ["south"]
    (problem,) = found.problems
    assert "north rejected the API key" in problem
    assert "export NORTH_API_KEY" in problem


def test_one_that_does_not_answer_is_left_behind_at_its_deadline(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.cloud.ask_providers.ASK_S", 0.2)
    open_shops(monkeypatch, north=Shop(delay_s=5.0), south=Shop([offer()]))
    began = time.monotonic()
    found = list_offers(Needs(), [], home)
    assert time.monotonic() - began < 3.0
    assert [each.provider for each in found.offers] == ["south"]
    assert "did not answer within 0.2 s" in found.problems[0]


def test_when_all_are_dead_the_error_is_theirs(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(monkeypatch, north=Shop(error=REFUSED))
    with pytest.raises(ProviderRefused, match="rejected the API key"):
        list_offers(Needs(), [], home)
    monkeypatch.setattr("homing.cloud.ask_providers.ASK_S", 0.1)
    open_shops(monkeypatch, north=Shop(delay_s=5.0))
    with pytest.raises(ProviderSilent):
        list_offers(Needs(), ["north"], home)


def test_they_are_asked_at_once_and_not_one_after_another(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(monkeypatch, **{f"shop{n}": Shop([offer()], delay_s=0.5) for n in range(6)})
    began = time.monotonic()
    assert len(list_offers(Needs(), [], home).offers) == 6
    assert time.monotonic() - began < 2.5


def test_a_mistake_of_ours_is_not_taken_for_a_provider_that_is_down(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_shops(monkeypatch, north=Shop(error=KeyError("price")), south=Shop([offer()]))
    with pytest.raises(KeyError):
        list_offers(Needs(), [], home)


def test_one_that_needs_more_than_a_key_is_told_of_only_when_it_was_named(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostless = UsageError("No SSH host is configured.")
    open_shops(monkeypatch, north=Shop(error=hostless), south=Shop([offer()]))
    assert list_offers(Needs(), [], home).problems == []
    assert "No SSH host is configured" in list_offers(Needs(), ["north", "south"], home).problems[0]


@pytest.mark.acceptance(51)
def test_so_many_cards_means_exactly_so_many_unless_all_are_wanted(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_run_with_one_provider_gets_its_error_and_with_two_the_others_offers(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_shops(monkeypatch, north=Shop(error=REFUSED), south=Shop([offer()]))
    with pytest.raises(ProviderRefused):
        find_offers(Needs(), ["north"], home)
    found = find_offers(Needs(), ["north", "south"], home)
    assert [each.provider for each in found.offers] == ["south"]
    assert "north" in found.problems[0]


def test_why_something_was_left_out_is_said_when_asked(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    open_shops(monkeypatch, north=Shop([offer("H100"), offer("T4", rate="0.30")]))
    found = find_offers(Needs(memory_bytes=40 * 2**30), ["north"], home, explain=True)
    assert [each.device for each in found.offers] == ["H100"]
    (left,) = found.left_out
    assert (left.offer.device, "memory" in left.why) == ("T4", True)


def test_what_a_provider_itself_would_not_let_us_take_is_among_them(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Choosy(Shop):
        def left_out(self) -> list[tuple[Offer, str]]:
            return [(offer("A100", rate="0.90"), "runs only Windows")]

    open_shops(monkeypatch, north=Choosy([offer("H100")]))
    (left,) = find_offers(Needs(), ["north"], home, explain=True).left_out
    assert (left.offer.device, left.why) == ("A100", "runs only Windows")


def test_an_hour_is_dear_only_while_nobody_said_what_it_may_cost() -> None:
    assert is_dear(offer(num_gpus=8, rate="33.60"), None)
    assert not is_dear(offer(num_gpus=8, rate="33.60"), Decimal(40))
    assert not is_dear(offer(rate="2.49"), None)


def test_every_rate_that_was_typed_in_has_a_date_and_a_source_and_says_that_it_was() -> None:
    assert TABLE
    for price in TABLE:
        assert price.usd_per_hour > 0
        assert price.source
        assert 1.7e9 < price.as_of < 2e9
        assert price.date in price.text
        assert "copied from" in price.text
    assert find_price("modal", "H100") is not None
    assert find_price("modal", "no such card") is None


def test_where_only_the_disk_is_too_small_that_is_what_to_mend(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Needs(memory_bytes=10**6, disk_bytes=40 * 10**6)
    monkeypatch.setattr("homing.world.World.free_bytes", lambda world, path: 9 * 10**6)
    with pytest.raises(NoOffer) as caught:
        find_offers(needs, ["local"], home)
    assert "has 9.00 MB of 40.00 MB disk" in caught.value.why
    assert caught.value.fix == f"Free 31.00 MB at {home.path}, or move the home: export HOMING_HOME=/elsewhere"
