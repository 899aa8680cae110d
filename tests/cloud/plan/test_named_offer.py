"""One exact offer for scripts: all three words or none where a provider rents out other clouds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.cloud.rig import make_run
from tests.cloud.shop import Shop, offer, open_shops

from homing.cloud.commands_to_type import Words
from homing.cloud.home import Home
from homing.cloud.plan.plan import Plan, make_plan
from homing.cloud.try_offers import Exact, only, without_spot
from homing.errors import NoOffer, UsageError

WORDS = Words("moss", "fern.yaml")
BROKER = [
    offer(name=f"{cloud}/{region}/H100", cloud=cloud, region=region, instance_type="H100", rate=rate)
    for cloud, region, rate in (("hyperstack", "canada-1", "2.49"), ("hyperstack", "norway-1", "2.59"))
]
OWN = [
    offer("A10G", name=f"g5.xlarge {zone}", region=zone, instance_type="g5.xlarge", rate="1.01")
    for zone in ("us-east-1", "eu-west-1")
]


@pytest.fixture
def plan(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    return make(home, tmp_path, monkeypatch, broker=Shop(BROKER), own=Shop(OWN))


def make(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **shops: Shop) -> Plan:
    open_shops(monkeypatch, **shops)
    run = make_run(tmp_path)
    return make_plan(dataclasses.replace(run, cloud=dataclasses.replace(run.cloud, providers=list(shops))), home)


def names(plan: Plan) -> list[str]:
    return [row.offer.name for row in plan.offers]


def test_nothing_named_leaves_the_plan_as_it_is(plan: Plan) -> None:
    assert only(plan, Exact(), WORDS) is plan


@pytest.mark.acceptance(52)
def test_all_three_name_one_machine_and_its_rate_stays_in_the_plan(plan: Plan) -> None:
    chosen = only(plan, Exact("Hyperstack", "norway-1", "h100"), WORDS)
    assert names(chosen) == ["hyperstack/norway-1/H100"]
    assert chosen.best.offer.rate_usd_per_hour > 0


@pytest.mark.acceptance(52)
@pytest.mark.parametrize("exact", [Exact("hyperstack"), Exact(region="canada-1"), Exact("hyperstack", "canada-1")])
def test_a_part_of_them_is_refused_where_several_clouds_are_behind_it(plan: Plan, exact: Exact) -> None:
    with pytest.raises(UsageError, match="together, or none of them") as caught:
        only(plan, exact, WORDS)
    assert "--cloud hyperstack --region canada-1 --instance-type H100" in caught.value.fix


def test_a_provider_with_machines_of_its_own_needs_no_cloud(plan: Plan) -> None:
    assert len(names(only(plan, Exact(instance_type="g5.xlarge"), WORDS))) == 2
    assert names(only(plan, Exact(region="eu-west-1", instance_type="g5.xlarge"), WORDS)) == ["g5.xlarge eu-west-1"]
    assert names(only(plan, Exact("own", "eu-west-1", "g5.xlarge"), WORDS)) == ["g5.xlarge eu-west-1"]


@pytest.mark.acceptance(52)
def test_what_is_not_there_is_refused_with_what_comes_near(plan: Plan) -> None:
    with pytest.raises(NoOffer, match="No provider currently offers --cloud hyperstack") as caught:
        only(plan, Exact("hyperstack", "canada-2", "H100"), WORDS)
    assert caught.value.why.startswith(
        "Queried the providers in cloud.providers: broker, own. Closest offers: --cloud hyperstack"
    )
    assert "--region canada-1" in caught.value.why
    fix = "See all offers: homing plan fern.yaml   or query another provider: --set cloud.providers=NAME"
    assert caught.value.fix == fix


@pytest.mark.acceptance(60)
def test_without_spot_only_what_is_not_taken_away_is_left(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spot = offer(name="cheap", rate="0.90", is_spot=True)
    plan = make(home, tmp_path, monkeypatch, shop=Shop([spot, offer(name="dear", rate="2.49")]))
    assert names(without_spot(plan, WORDS)) == ["dear"]
    plan = make(home, tmp_path, monkeypatch, other=Shop([spot]))
    with pytest.raises(NoOffer, match="non-spot offer") as caught:
        without_spot(plan, WORDS)
    assert caught.value.fix.startswith(
        "Launch without --no-spot; a preempted run resumes from its last checkpoint: homing launch fern.yaml"
    )
