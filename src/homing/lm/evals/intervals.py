"""95% confidence intervals: how far a figure may be from what more data would give.

    exact       accuracies: Clopper-Pearson, never too narrow
    exact pairs two models on the same questions: the same, on the questions where only one of them is right
    bootstrap   sums over units (stretches of text, conversations, questions): units resampled, with a seed

A unit is something that can be considered independent. Tokens are not: neighbors are hard or easy together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["EXACT", "EXACT_PAIRS", "FEWEST", "RESAMPLES", "Interval", "bootstrap", "exact_pairs", "exact_share"]

LEVEL = 0.95
RESAMPLES = 2000
FEWEST = 10  # units; with fewer, bootstrap intervals are far too narrow
EXACT, EXACT_PAIRS = "exact (Clopper-Pearson)", "exact (Clopper-Pearson, on the questions where they differ)"
_NUMBERS_AT_ONCE = 2**22

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    low: float
    high: float  # both NaN: unknown
    method: str

    @property
    def is_known(self) -> bool:
        return self.low == self.low


def exact_share(num_right: int, num_all: int) -> Interval:
    """Return the Clopper-Pearson interval of a proportion."""
    assert 0 <= num_right <= num_all, f"{num_right} of {num_all}"
    low = 0.0 if num_right == 0 else _solve(lambda p: _at_least(num_right, num_all, p) < _TAIL)
    high = 1.0 if num_right == num_all else _solve(lambda p: 1.0 - _at_least(num_right + 1, num_all, p) >= _TAIL)
    return Interval(low, high, EXACT)


def exact_pairs(only_first: int, only_second: int, num_all: int) -> Interval:
    """Return the interval of the second accuracy minus the first, for two models on the same `num_all` questions."""
    differing = only_first + only_second
    if differing == 0:
        return Interval(0.0, 0.0, EXACT_PAIRS)
    share = exact_share(only_second, differing)
    scale = differing / num_all
    return Interval(scale * (2 * share.low - 1), scale * (2 * share.high - 1), EXACT_PAIRS)


def bootstrap(units: Floats, figure: Callable[[Floats], Floats], *, what: str, seed: int = 0) -> Interval:
    """Return the bootstrap interval.

    `units` has a row per unit; `figure` maps sums over rows (..., columns) to (...).
    """
    num_units, num_columns = units.shape
    if num_units < FEWEST:
        return Interval(np.nan, np.nan, f"none: {what} are too few, {FEWEST} at least")
    source = np.random.default_rng(seed)
    at_once = max(1, _NUMBERS_AT_ONCE // (num_units * num_columns))
    figures: list[Floats] = []
    for start in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - start)
        drawn = source.integers(0, num_units, size=(count, num_units))
        figures.append(figure(units[drawn].sum(axis=1)))
    low, high = np.quantile(np.concatenate(figures), [_TAIL, 1 - _TAIL])
    return Interval(float(low), float(high), f"bootstrap over {what}, {RESAMPLES:,} draws, seed {seed}")


_TAIL = (1 - LEVEL) / 2


def _at_least(count: int, num_all: int, share: float) -> float:
    """Return the probability of `count` or more of `num_all`."""
    if share <= 0.0 or share >= 1.0:
        return float(count <= 0 or share >= 1.0)
    counts = np.arange(count, num_all + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num_all + 1)))])
    logs = factorials[num_all] - factorials[counts] - factorials[num_all - counts]
    logs = logs + counts * np.log(share) + (num_all - counts) * np.log1p(-share)
    return float(min(1.0, np.exp(logs).sum()))


def _solve(is_below: Callable[[float], bool]) -> float:
    """Return where `is_below` changes from true to false, in [0, 1]."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2
