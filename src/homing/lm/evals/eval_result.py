"""Evaluation results: figures as sums over units, so that they can be reported, stored and compared.

    value = shape(sum of `above` / sum of `below`)      bits per byte, perplexity, accuracy

The units are kept: intervals resample them, and two models are compared unit by unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from homing.lm.data.shards.read_shards import file_sha256
from homing.lm.evals.intervals import Floats, Interval, bootstrap, exact_share
from homing.lm.generate.load_model import Card
from homing.lm.model.open_weights import find_weights
from homing.wire import file_names

__all__ = ["Measured", "Score", "identity_of", "joint_sha256", "share"]


@dataclass(frozen=True)
class Score:
    name: str  # bits_per_byte, perplexity, acc, ...
    above: Floats  # numerator of each unit
    below: Floats
    what: str  # description of the units: "38 stretches of 4,096 bytes"
    is_exp: bool = False  # a perplexity: e to the mean
    is_more_better: bool = False
    by_tokenizer: bool = False  # depends on the tokenizer, so two tokenizers cannot be compared
    is_plain: bool = False  # every unit is 0 or 1
    is_compared: bool = True  # False: another figure says the same

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
    """The results of one model on one data set."""

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
    """Identify the model by the hashes of all files that were read."""
    listed = [*find_weights(card.folder).files, file_names.TOKENIZER]
    files = {name: file_sha256(card.folder / name) for name in listed}
    return {
        "folder": str(card.folder), "run": card.run_name, "phase": card.phase, "step": card.step,
        "sha256": joint_sha256(files.values()), "files": files, "base_sha256": card.base_sha256,
    }  # fmt: skip


def joint_sha256(hashes: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def files_sha256(paths: Iterable[Path]) -> str:
    """Return the hash of the file if there is one, else a hash over all their hashes."""
    hashes = [file_sha256(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else joint_sha256(hashes)


def _number(value: float) -> float | None:
    """Return the number, or None if not finite: JSON has no infinity or NaN."""
    return value if np.isfinite(value) else None
