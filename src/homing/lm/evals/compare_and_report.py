"""Compares two models on the same data set, and formats the report from `homing eval` as Markdown.

The report answers two questions: how far apart are the models, and is the difference more than noise?

    figures of A and of B on the same units -> B minus A, unit by unit -> interval -> one plain sentence

The comparison is paired, because a hard question is hard for both models. This makes the difference far more precise
than either figure. Accuracies are compared exactly, on the questions where the models differ. All other figures are
compared by bootstrap, which resamples the same units for both models. A difference is more than noise if its 95%
interval excludes 0. Even if two models are equally good, this happens by chance for one figure in twenty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from homing.lm.evals.eval_result import Floats, Interval, Measured, Score, bootstrap, exact_pairs

__all__ = ["Difference", "as_markdown", "compare", "count_words", "format_score", "interval_words"]


@dataclass(frozen=True)
class Difference:
    """The difference between two models (B minus A) for one figure on one data set."""

    set_name: str
    score: str
    first: float
    second: float
    low: float | None  # low and high are None if there are too few units for an interval
    high: float | None
    method: str
    num_units: int
    is_more_than_noise: bool
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "difference": self.second - self.first}


def compare(first: Measured, second: Measured, names: tuple[str, str], *, seed: int) -> list[Difference]:
    """Compare two models on every comparable figure. Figures per token are not comparable between tokenizers."""
    assert first.data_sha256 == second.data_sha256, "both models must be measured on the same data set"
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


# -- Markdown ----------------------------------------------------------------------------------------------------------


def as_markdown(document: dict[str, Any]) -> str:
    """Convert the JSON document from `homing eval` to Markdown."""
    lines = ["# Evaluation", ""]
    for model in document["models"]:
        of = f", {model['phase']} step {model['step']:,}" if model["step"] is not None else ""
        lines.append(f"- `{model['folder']}`{of}: sha256 `{model['sha256']}`")
    made = document["made"]
    lines += [
        f"- homing {made['version']}, torch {made['torch']}, on {made['device']} in {made['precision']}, "
        f"{made['seconds']:.1f} s; seed {document['seed']}",
        "",
    ]
    for model, sets in zip(document["models"], document["results"], strict=True):
        if len(document["models"]) > 1:
            lines += [f"## `{model['folder']}`", ""]
        lines += _table(sets)
    if document["differences"]:
        first, second = (model["folder"] for model in document["models"])
        lines += ["## Comparison", "", f"Each difference is `{second}` minus `{first}`.", ""]
        lines += [f"- {difference['sentence']} By {difference['method']}." for difference in document["differences"]]
        lines.append("")
    lines += ["## Data sets", ""]
    for one in document["results"][0]:
        settings = ", ".join(f"{name} {value}" for name, value in one["settings"].items())
        lines.append(f"- {one['name']} ({one['kind']}{f'; {settings}' if settings else ''}): `{one['data_sha256']}`")
    notes = [f"- {one['name']}: {note}" for sets in document["results"] for one in sets for note in one["notes"]]
    return "\n".join([*lines, "", *(["## Notes", "", *dict.fromkeys(notes), ""] if notes else [])])


def _table(sets: list[dict[str, Any]]) -> list[str]:
    lines = ["| set | figure | value | 95% interval | units | interval by |", "|---|---|---|---|---|---|"]
    for one in sets:
        for score in one["scores"]:
            cells = [
                one["name"],
                score["name"],
                format_score(score["value"]),
                interval_words(score),
                f"{score['num_units']:,}",
            ]
            lines.append(f"| {' | '.join(cells)} | {score['method']} |")
    return [*lines, "", *(f"{one['name']}: {count_words(one)}." for one in sets), ""]


def interval_words(score: dict[str, Any]) -> str:
    return "-" if score["low"] is None else f"{format_score(score['low'])} to {format_score(score['high'])}"


def count_words(one: dict[str, Any]) -> str:
    """List the non-zero counts."""
    counts = [(name.replace("_", " "), count) for name, count in one["counts"].items() if count]
    return ", ".join(f"{count:,} {name.removesuffix('s') if count == 1 else name}" for name, count in counts)


def format_score(value: float | None) -> str:
    """Format a value for display. None stands for infinity or NaN."""
    return "not finite" if value is None else f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"
