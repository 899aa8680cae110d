"""Formats an evaluation report as Markdown: models, figures with intervals, and how they were measured."""

from __future__ import annotations

from typing import Any

__all__ = ["as_markdown", "count_words", "format_score", "interval_words"]


def as_markdown(document: dict[str, Any]) -> str:
    """Format the document that --json prints."""
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
        lines += ["## Compared", "", f"The second, `{second}`, minus the first, `{first}`.", ""]
        lines += [f"- {difference['sentence']} By {difference['method']}." for difference in document["differences"]]
        lines.append("")
    lines += ["## The sets", ""]
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
    """Format a value; None means that it is not finite."""
    return "not finite" if value is None else f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"
