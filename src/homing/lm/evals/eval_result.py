"""Defines evaluation results: figures as sums over units, with 95% confidence intervals, to be reported and compared.

    value = shape(sum of `above` / sum of `below`)      bits per byte, perplexity, accuracy

    exact_share   accuracies: the Clopper-Pearson interval, which is never too narrow
    exact_pairs   accuracies of two models: Clopper-Pearson, on the questions that only one of them answers correctly
    bootstrap     sums over units (stretches of text, conversations, questions): units resampled, with a seed

Results contain every unit, because intervals resample the units, and two models are compared unit by unit. Units must
be independent of each other. Single tokens are not, because neighboring tokens tend to be equally hard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from homing.lm.data.shards.read_shards import file_sha256
from homing.lm.generate.load_model import Card
from homing.lm.model.open_weights import find_weights
from homing.wire import file_names

__all__ = [
    "EXACT",
    "EXACT_PAIRS",
    "FEWEST",
    "RESAMPLES",
    "Interval",
    "Measured",
    "Score",
    "bootstrap",
    "exact_pairs",
    "exact_share",
    "identity_of",
    "joint_sha256",
    "share",
]

LEVEL = 0.95
_TAIL = (1 - LEVEL) / 2
RESAMPLES = 2000
FEWEST = 10  # minimum number of units for a bootstrap interval; with fewer, intervals are far too narrow
EXACT, EXACT_PAIRS = "exact (Clopper-Pearson)", "exact (Clopper-Pearson, on the questions where they differ)"
_NUMBERS_AT_ONCE = 2**22

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    low: float
    high: float  # low and high are NaN if the interval is unknown
    method: str

    @property
    def is_known(self) -> bool:
        return self.low == self.low


def exact_share(num_right: int, num_all: int) -> Interval:
    """Return the Clopper-Pearson interval for a proportion."""
    assert 0 <= num_right <= num_all, f"{num_right} of {num_all}"
    low = 0.0 if num_right == 0 else _solve(lambda p: _at_least(num_right, num_all, p) < _TAIL)
    high = 1.0 if num_right == num_all else _solve(lambda p: 1.0 - _at_least(num_right + 1, num_all, p) >= _TAIL)
    return Interval(low, high, EXACT)


def exact_pairs(only_first: int, only_second: int, num_all: int) -> Interval:
    """Return the interval for the second model's accuracy minus the first's, on the same `num_all` questions."""
    differing = only_first + only_second
    if differing == 0:
        return Interval(0.0, 0.0, EXACT_PAIRS)
    share = exact_share(only_second, differing)
    scale = differing / num_all
    return Interval(scale * (2 * share.low - 1), scale * (2 * share.high - 1), EXACT_PAIRS)


def bootstrap(units: Floats, figure: Callable[[Floats], Floats], *, what: str, seed: int = 0) -> Interval:
    """Return the bootstrap interval for a figure.

    `units` has one row per unit. `figure` computes the figure from sums over rows: (..., columns) -> (...).
    """
    num_units, num_columns = units.shape
    if num_units < FEWEST:
        return Interval(np.nan, np.nan, f"none: {what} are too few; at least {FEWEST} are needed")
    source = np.random.default_rng(seed)
    at_once = max(1, _NUMBERS_AT_ONCE // (num_units * num_columns))
    figures: list[Floats] = []
    for start in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - start)
        drawn = source.integers(0, num_units, size=(count, num_units))
        figures.append(figure(units[drawn].sum(axis=1)))
    low, high = np.quantile(np.concatenate(figures), [_TAIL, 1 - _TAIL])
    return Interval(float(low), float(high), f"bootstrap over {what}, {RESAMPLES:,} draws, seed {seed}")


def _at_least(count: int, num_all: int, share: float) -> float:
    """Return the probability of at least `count` successes in `num_all` trials."""
    if share <= 0.0 or share >= 1.0:
        return float(count <= 0 or share >= 1.0)
    counts = np.arange(count, num_all + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num_all + 1)))])
    logs = factorials[num_all] - factorials[counts] - factorials[num_all - counts]
    logs = logs + counts * np.log(share) + (num_all - counts) * np.log1p(-share)
    return float(min(1.0, np.exp(logs).sum()))


def _solve(is_below: Callable[[float], bool]) -> float:
    """Return the point in [0, 1] at which `is_below` changes from true to false."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Score:
    name: str  # name of the figure, such as bits_per_byte, perplexity or acc
    above: Floats  # numerator of each unit
    below: Floats
    what: str  # a description of the units, such as "38 stretches of 2,048 bytes"
    is_exp: bool = False  # whether the figure is exp(mean), like a perplexity
    is_more_better: bool = False
    by_tokenizer: bool = False  # True if the figure cannot be compared across tokenizers
    is_plain: bool = False  # whether the value of every unit is either 0 or 1
    is_compared: bool = True  # False if the comparison of another figure makes this one redundant

    @property
    def units(self) -> Floats:
        return np.stack([self.above, self.below], axis=1)

    def figure(self, sums: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            mean = sums[..., 0] / sums[..., 1]
            return np.exp(mean) if self.is_exp else mean

    @property
    def value(self) -> float:
        return float(self.figure(self.units.sum(axis=0)))

    def interval(self, seed: int) -> Interval:
        if self.is_plain:
            return exact_share(round(float(self.above.sum())), len(self.above))
        return bootstrap(self.units, self.figure, what=self.what, seed=seed)


@dataclass(frozen=True)
class Measured:
    """One model's results on one data set."""

    name: str
    kind: str  # text | conversations | choices | cloze | answers
    scores: list[Score]
    counts: dict[str, int]
    data_sha256: str
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self, seed: int) -> dict[str, Any]:
        scores = []
        for score in self.scores:
            interval = score.interval(seed)
            low, high = _number(interval.low), _number(interval.high)
            scores.append(
                {"name": score.name, "value": _number(score.value), "low": low, "high": high,
                 "method": interval.method, "num_units": len(score.above), "is_more_better": score.is_more_better}
            )  # fmt: skip
        return {
            "name": self.name, "kind": self.kind, "scores": scores, "counts": self.counts,
            "settings": self.settings, "data_sha256": self.data_sha256, "notes": self.notes,
        }  # fmt: skip


def share(name: str, is_right: Iterable[bool], what: str) -> Score:
    above = np.array(list(is_right), dtype=np.float64)
    return Score(name, above, np.ones_like(above), what, is_more_better=True, is_plain=True)


def identity_of(card: Card) -> dict[str, Any]:
    """Return data that identifies the model, including the hashes of all files that were read."""
    listed = [*find_weights(card.folder).files, file_names.TOKENIZER]
    files = {name: file_sha256(card.folder / name) for name in listed}
    return {
        "folder": str(card.folder), "run": card.run_name, "phase": card.phase, "step": card.step,
        "sha256": joint_sha256(files.values()), "files": files, "base_sha256": card.base_sha256,
    }  # fmt: skip


def joint_sha256(hashes: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def files_sha256(paths: Iterable[Path]) -> str:
    """Return the file's hash if there is only one file, else a hash of all files' hashes."""
    hashes = [file_sha256(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else joint_sha256(hashes)


def _number(value: float) -> float | None:
    """Return the number, or None if it is not finite, because JSON has no infinity or NaN."""
    return value if np.isfinite(value) else None
