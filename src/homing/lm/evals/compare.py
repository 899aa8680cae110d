"""Compares two models on the same data set: how far apart are they, and is the difference more than noise?

    figures of A and of B on the same units -> B minus A, unit by unit -> interval -> one plain sentence

Paired, because a hard question is hard for both: the difference is known far more precisely than either figure.
Accuracies are compared exactly, on the questions where the models differ; everything else by bootstrap over units, the
same ones for both. A difference is more than noise if its 95% interval excludes 0; of twenty equal figures, one will do
so by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from homing.lm.evals.eval_result import Measured, Score
from homing.lm.evals.intervals import Floats, Interval, bootstrap, exact_pairs

__all__ = ["Difference", "compare"]


@dataclass(frozen=True)
class Difference:
    """The difference in one figure on one data set: B minus A."""

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
    """Compare the figures that mean the same for both: perplexities with two tokenizers do not."""
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
    text = f"{difference:+.4g}"
    where = f"{a.name} on {set_name}"
    if difference == 0:
        return f"{where}: {names[0]} and {names[1]} are equal, {a.value:.4g}."
    if not interval.is_known:
        return f"{where}: {text}; {a.what} are too few to distinguish a difference from noise."
    text += f" (95%: {interval.low:+.4g} to {interval.high:+.4g})"
    if not is_more:
        return f"{where}: {text}; within noise: neither is shown to be better."
    better, worse = (names[1], names[0]) if (difference > 0) == a.is_more_better else names
    return f"{where}: {text}; more than noise: {better} is better than {worse}."
