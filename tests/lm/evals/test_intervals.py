"""Intervals hold what they promise: by counting all outcomes where that can be done, else by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from homing.lm.evals.eval_result import FEWEST, Floats, bootstrap, exact_pairs, exact_share
from homing.lm.rl.rl_metrics import pass_at_k


def binomial(count: int, num_all: int, share: float) -> float:
    return math.comb(num_all, count) * share**count * (1 - share) ** (num_all - count)


@pytest.mark.parametrize(
    ("num_right", "num_all", "low", "high"),
    [(0, 10, 0.0, 0.30850), (5, 10, 0.18709, 0.81291), (10, 10, 0.69150, 1.0), (1, 4, 0.00631, 0.80588)],
)
def test_a_share_has_the_interval_of_the_tables(num_right: int, num_all: int, low: float, high: float) -> None:
    interval = exact_share(num_right, num_all)
    assert (interval.low, interval.high) == (pytest.approx(low, abs=1e-5), pytest.approx(high, abs=1e-5))


def test_the_exact_interval_is_never_too_narrow() -> None:
    num_all = 20
    intervals = [exact_share(count, num_all) for count in range(num_all + 1)]
    for share in np.linspace(0.01, 0.99, 50).tolist():
        covered = sum(
            binomial(count, num_all, share)
            for count, interval in enumerate(intervals)
            if interval.low <= share <= interval.high
        )
        assert covered >= 0.95, share


def test_many_questions_are_no_problem() -> None:
    interval = exact_share(50_000, 100_000)
    assert interval.low == pytest.approx(0.5 - 1.96 * math.sqrt(0.25 / 100_000), abs=1e-4)
    assert interval.high == pytest.approx(1 - interval.low)


def mean(sums: Floats) -> Floats:
    return sums[..., 0] / sums[..., 1]


@pytest.mark.acceptance(100)
def test_the_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    source = np.random.default_rng(1)
    covered = 0
    for trial in range(300):
        below = source.integers(50, 150, size=60).astype(np.float64)
        above = below * source.lognormal(0.0, 0.5, size=60)  # skewed, as losses are
        interval = bootstrap(np.stack([above, below], axis=1), mean, what="units", seed=trial)
        covered += interval.low <= math.exp(0.125) <= interval.high
    # 95% of 300 is 285; what is left below is what the bootstrap is known to lack on 60 skewed units.
    assert 268 <= covered <= 297


def test_the_bootstrap_is_the_same_for_the_same_seed_and_names_how_it_was_made() -> None:
    units = np.random.default_rng(2).random((30, 2)) + 1
    first, again = (bootstrap(units, mean, what="30 stretches", seed=5) for _ in range(2))
    assert first == again
    assert first.method == "bootstrap over 30 stretches, 2,000 draws, seed 5"
    assert bootstrap(units, mean, what="30 stretches", seed=6) != first


def test_too_few_units_have_no_interval_instead_of_a_narrow_one() -> None:
    interval = bootstrap(np.ones((FEWEST - 1, 2)), mean, what="9 stretches")
    assert not interval.is_known
    assert "too few" in interval.method


def test_pairs_that_differ_by_chance_alone_are_rarely_called_different() -> None:
    """All outcomes of 12 questions on which two equal models differ, counted with their chances."""
    wrong = sum(
        binomial(only_second, 12, 0.5)
        for only_second in range(13)
        if not (interval := exact_pairs(12 - only_second, only_second, 100)).low <= 0 <= interval.high
    )
    assert wrong <= 0.05


def test_pairs_that_all_point_one_way_differ_significantly_and_equal_ones_do_not() -> None:
    interval = exact_pairs(0, 10, 50)
    assert 0 < interval.low < 0.2 <= interval.high
    assert (exact_pairs(0, 0, 50).low, exact_pairs(0, 0, 50).high) == (0.0, 0.0)
    turned = exact_pairs(10, 0, 50)
    assert (turned.low, turned.high) == (pytest.approx(-interval.high), pytest.approx(-interval.low))


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("chance", [0.05, 0.3, 0.9])
def test_pass_at_k_is_right_on_average_whatever_the_chance(k: int, chance: float) -> None:
    expected = sum(binomial(right, 8, chance) * pass_at_k(8, right, k) for right in range(9))
    assert expected == pytest.approx(1 - (1 - chance) ** k)
