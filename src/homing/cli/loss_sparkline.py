"""Draws a run's loss in a terminal: one column per interval of steps, and a mark for each validation.

    points --add--> Curve --lines(phase, width, height)--> a chart;  --summary(phase)--> one line for the scrollback

In an rl phase the values are rewards. Steps that a resumed run trains again replace the earlier points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.text import Text

__all__ = ["Curve", "HeldOut"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_MARK = "◆"
_SUMMARY_WIDTH = 40


class HeldOut(NamedTuple):
    step: int
    value: float
    bits_per_byte: float | None


class Curve:
    def __init__(self) -> None:
        self._learned: dict[str, list[tuple[int, float]]] = {}  # maps a phase to its steps and values
        self._held_out: dict[str, list[HeldOut]] = {}
        self.last_phase = ""

    def add(self, points: Iterable[tuple[str, int, float | None, float | None, float | None]]) -> None:
        """Add points: phase, step, value, held-out value, its bits per byte."""
        for phase, step, value, held_out, bits in points:
            self.last_phase = phase
            learned, measured = self._learned.setdefault(phase, []), self._held_out.setdefault(phase, [])
            while learned and learned[-1][0] >= step:
                learned.pop()
            while measured and measured[-1].step >= step:
                measured.pop()
            if value is not None and math.isfinite(value):
                learned.append((step, value))
            if held_out is not None and math.isfinite(held_out):
                measured.append(HeldOut(step, held_out, bits))

    def held_out(self, phase: str) -> HeldOut | None:
        found = self._held_out.get(phase)
        return found[-1] if found else None

    def lines(self, phase: str, width: int, height: int) -> list[Text]:
        """Return the chart in at most `height` lines, the first of which is its title; [] if it does not fit."""
        learned, measured = self._learned.get(phase, []), self._held_out.get(phase, [])
        if len(learned) < 2 or height < 3 or width < 24:
            return []
        named = "reward" if phase == "rl" else "loss"
        values = [value for _, value in learned] + [each.value for each in measured]
        low, high = min(values), max(values)
        labels = [f"{high:.3g}", f"{low:.3g}"]
        margin = max(map(len, labels)) + 1
        columns, rows = width - margin, height - 1
        first, last = learned[0][0], learned[-1][0]
        levels = [_level(value, low, high, rows) for value in _intervals(learned, columns)]
        marks = {_column(each.step, first, last, columns): _level(each.value, low, high, rows) for each in measured}
        title = Text.assemble((f"{named.capitalize()} of {phase} ", "bold"))
        title.append(f"{_BLOCKS[-1]} training", style="cyan")
        if measured:
            title.append("  ").append(f"{_MARK} validation", style="magenta")
        title.append(f"  steps {first:,} to {last:,}", style="dim")
        made = [title]
        for row in range(rows - 1, -1, -1):
            label = labels[0] if row == rows - 1 else labels[1] if row == 0 else ""
            line = Text.assemble((f"{label:>{margin - 1}} ", "dim"))
            for column, level in enumerate(levels):
                marked = marks.get(column)
                if marked is not None and (max(marked, 1) - 1) // 8 == row:
                    line.append(_MARK, style="bold magenta")
                else:
                    line.append(_BLOCKS[max(0, min(8, level - 8 * row))], style="cyan")
            made.append(line)
        return made

    def summary(self, phase: str) -> str:
        """Return the curve in one line with its first and last value; "" if there are fewer than two points."""
        learned = self._learned.get(phase, [])
        if len(learned) < 2:
            return ""
        values = _intervals(learned, min(_SUMMARY_WIDTH, len(learned)))
        low, high = min(values), max(values)
        drawn = "".join(_BLOCKS[max(1, _level(value, low, high, 1))] for value in values)
        measured = self.held_out(phase)
        validation = f", validation {measured.value:.3f} at step {measured.step:,}" if measured else ""
        return f"{phase} {drawn} {learned[0][1]:.3f} to {learned[-1][1]:.3f}{validation}"


def _level(value: float, low: float, high: float, rows: int) -> int:
    """Return the height of a value in eighths of a row, at least 1 so that the lowest value is visible."""
    share = (value - low) / (high - low) if high > low else 0.5
    return max(1, round(share * rows * 8))


def _column(step: int, first: int, last: int, columns: int) -> int:
    return min(columns - 1, int((step - first) / max(1, last - first) * columns))


def _intervals(points: Sequence[tuple[int, float]], columns: int) -> list[float]:
    """Return one value per column: the mean of its points, or the previous column's value if it has none."""
    first, last = points[0][0], points[-1][0]
    sums, counts = [0.0] * columns, [0] * columns
    for step, value in points:
        column = _column(step, first, last, columns)
        sums[column] += value
        counts[column] += 1
    made: list[float] = []
    for total, count in zip(sums, counts, strict=True):
        made.append(total / count if count else made[-1])
    return made
