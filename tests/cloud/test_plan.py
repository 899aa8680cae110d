"""Run to needs, hours and dollars."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import make_run

from homing.cloud.home import Home
from homing.cloud.plan import make_plan, needs_of
from homing.cloud.providers.base import Needs, Offer, lack
from homing.cloud.speed import FILE, estimate, remember
from homing.errors import NoOffer
from homing.wire.run import Cloud, Limits
from homing.world import Completed, World

H100 = Offer("runpod", "h100", "H100", 1, 16, 80 * 2**30, Decimal("2.49"))


class NoTorch(World):
    """A computer with two cores, a little memory and no torch."""

    def run(self, argv: object, timeout_s: float, env: object = None) -> Completed:
        first = str(next(iter(argv)))  # type: ignore[call-overload]
        return Completed(0, "2\n", "") if first == "getconf" else Completed(1, "", "no module named torch")


@pytest.fixture
def plain(home: Home) -> Home:
    return Home(home.path, NoTorch())


def test_a_plan_counts_tokens_steps_flops_and_dollars(plain: Home, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    plan = make_plan(run, plain)
    assert (plan.num_tokens, plan.num_steps) == (20 * 64, 20)
    assert plan.flops == plan.num_tokens * run.sizes.flops_per_token
    (row,) = plan.offers
    assert row.cost_usd == Decimal("0.36") * Decimal(str(row.seconds)) / 3600
    assert 0 < row.minimum_usd < Decimal("0.05")
    assert plan.checkpoint_bytes > 8 * 30_000


def test_where_the_speed_comes_from_is_always_said(plain: Home, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), id="moss-1")
    (offer,) = plain.provider("local").offers(Needs())
    assert estimate(run, offer, plain).text.startswith("assumed")
    remember(run, offer.device, 0, 5000.0, plain)
    known = estimate(run, offer, plain)
    assert (known.tokens_per_s, known.source) == (5000.0, "measured")
    assert "moss-1" in known.text
    other = dataclasses.replace(run, model=dataclasses.replace(run.model, width=128))
    assert estimate(other, offer, plain).source == "assumed"


def test_a_probe_is_made_once_and_kept(home: Home, tmp_path: Path) -> None:
    class Probed(NoTorch):
        probes = 0

        def run(self, argv: object, timeout_s: float, env: object = None) -> Completed:
            if list(argv)[1:2] == ["-c"]:  # type: ignore[call-overload]
                Probed.probes += 1
                return Completed(0, "2e10\n", "")
            return super().run(argv, timeout_s, env)

    probed = Home(home.path, Probed())
    run = make_run(tmp_path)
    (offer,) = probed.provider("local").offers(Needs())
    first, second = estimate(run, offer, probed), estimate(run, offer, probed)
    assert first == second
    assert first.source == "probed"
    assert Probed.probes == 1


def test_no_figure_above_a_cards_peak_is_shown_or_kept(plain: Home, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), id="moss-1")
    peak = 989e12 / run.sizes.flops_per_token
    assert estimate(run, H100, plain).tokens_per_s < peak
    remember(run, "H100", 1, peak * 2, plain)
    assert not (plain.path / FILE).exists()
    forged = {"device": "H100", "num_gpus": 1, "shape": "", "tokens_per_s": peak * 2, "run_id": "x", "at": 0.0}
    from homing.cloud.speed import shape_key

    plain.world.mkdir(plain.path)
    measured = [{**forged, "shape": shape_key(run.model)}]
    (plain.path / FILE).write_text(json.dumps({"measured": measured, "probes": {}}))
    assert estimate(run, H100, plain).source == "assumed"


def test_a_schedule_longer_than_its_limits_is_warned_of_with_time_and_dollars(plain: Home, tmp_path: Path) -> None:
    run = make_run(tmp_path, limits=Limits(spend_usd="0.001", time_s=1.0))
    long = dataclasses.replace(run, phases=[dataclasses.replace(run.phases[0], num_steps=10**8)])
    money, time = make_plan(long, plain).warnings[:2]
    assert "days" in money
    assert "$" in money
    assert "limits.time" in time


def test_when_nothing_covers_the_needs_each_provider_says_what_it_lacks(plain: Home, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), cloud=Cloud(gpu="H100", num_gpus=8))
    with pytest.raises(NoOffer) as caught:
        make_plan(run, plain)
    assert "local this-computer has no H100" in caught.value.why


def test_needs_follow_the_run(tmp_path: Path) -> None:
    needs = needs_of(make_run(tmp_path, limits=Limits(rate_usd_per_hour="2.00")))
    assert needs.max_rate_usd_per_hour == Decimal("2.00")
    assert needs.memory_bytes > 0
    assert needs.disk_bytes > 0


@pytest.mark.parametrize(
    ("needs", "word"),
    [
        (Needs(gpu="A100"), "no A100"),
        (Needs(num_gpus=2), "GPUs"),
        (Needs(memory_bytes=2**40), "memory"),
        (Needs(max_rate_usd_per_hour=Decimal(1)), "over the limit"),
        (Needs(gpu="NVIDIA H100 80GB HBM3"), ""),
    ],
)
def test_what_an_offer_lacks_is_said_in_a_few_words(needs: Needs, word: str) -> None:
    assert word in lack(H100, needs)
    assert bool(word) == bool(lack(H100, needs))
