"""Two models on the same set: how far apart, and is that more than noise?

    figures of A and of B on the same units -> B less A, unit by unit -> interval -> one plain sentence

Pairs, because what makes a question hard makes it hard for both: the difference is known far better than either figure.
Shares of yes and no are compared exactly, on the questions where they differ; everything else by drawing units anew,
the same ones for both. It is more than noise where the 95% interval leaves out 0; of twenty figures that do not differ
one will all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from homing.lm.evals.intervals import Floats, Interval, bootstrap, exact_pairs
from homing.lm.evals.result import Measured, Score

__all__ = ["Difference", "compare"]


@dataclass(frozen=True)
class Difference:
    """Of one figure of one set: B less A."""

    set_name: str
    score: str
    first: float
    second: float
    low: float | None  # None: too few units
    high: float | None
    method: str
    num_units: int
    is_more_than_noise: bool
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "difference": self.second - self.first}


def compare(first: Measured, second: Measured, names: tuple[str, str], *, seed: int) -> list[Difference]:
    """Only figures that mean the same for both: perplexities of two tokenizers do not."""
    assert first.data_sha256 == second.data_sha256, "both were measured on the same set"
    differences = []
    for a, b in zip(first.scores, second.scores, strict=True):
        same_below = np.array_equal(a.below, b.below)
        if a.is_compared and len(a.above) == len(b.above) and (same_below or not a.by_tokenizer):
            differences.append(_difference(first.name, a, b, names, seed))
    return differences


def _difference(set_name: str, a: Score, b: Score, names: tuple[str, str], seed: int) -> Difference:
    interval = _interval(a, b, seed)
    num_units = len(a.above)
    is_more = interval.is_known and not interval.low <= 0.0 <= interval.high
    sentence = _sentence(set_name, a, b, interval, names, is_more)
    return Difference(
        set_name, a.name, a.value, b.value, interval.low if interval.is_known else None,
        interval.high if interval.is_known else None, interval.method, num_units, is_more, sentence,
    )  # fmt: skip


def _interval(a: Score, b: Score, seed: int) -> Interval:
    if a.is_plain and b.is_plain:
        only_a = int(((a.above > 0) & (b.above == 0)).sum())
        only_b = int(((b.above > 0) & (a.above == 0)).sum())
        return exact_pairs(only_a, only_b, len(a.above))

    def figure(sums: Floats) -> Floats:
        return b.figure(sums[..., 2:]) - a.figure(sums[..., :2])

    return bootstrap(np.concatenate([a.units, b.units], axis=1), figure, what=f"pairs of {a.what}", seed=seed)


def _sentence(set_name: str, a: Score, b: Score, interval: Interval, names: tuple[str, str], is_more: bool) -> str:
    difference = b.value - a.value
    told = f"{difference:+.4g}"
    where = f"{a.name} on {set_name}"
    if difference == 0:
        return f"{where}: {names[0]} and {names[1]} are equal, {a.value:.4g}."
    if not interval.is_known:
        return f"{where}: {told}; {a.what} are too few to tell a difference from noise."
    told += f" (95%: {interval.low:+.4g} to {interval.high:+.4g})"
    if not is_more:
        return f"{where}: {told}; no more than noise may give: neither is shown to be better."
    better, worse = (names[1], names[0]) if (difference > 0) == a.is_more_better else names
    return f"{where}: {told}; more than noise: {better} is better than {worse}."
