"""Draws a run's losses as one SVG: a panel per phase, with training loss as a line and held-out loss as dots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from homing.report.report_data import Phase

__all__ = ["draw"]

_WIDTH, _HEIGHT = 760, 300  # size of one panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 40, 46  # margins
_LEARNED, _HELD_OUT = "#0077bb", "#cc3311"


def draw(phases: Sequence[Phase]) -> str:
    """Return the losses of all phases as one SVG, or "" if no phase has at least two points."""
    shown = [phase for phase in phases if len(phase.curve) > 1]
    if not shown:
        return ""
    height = _HEIGHT * len(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="13" fill="#222">',
        "<title>Training and held-out metrics over steps, by phase</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for number, phase in enumerate(shown):
        parts += [f'<g transform="translate(0 {number * _HEIGHT})">', *_panel(phase), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Maps steps and values to positions in a panel."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        steps, values = [step for step, _ in points], [value for _, value in points]
        self.first, self.last = min(steps), max(steps)
        self.tick = _round(max(max(values) - min(values), 1e-3 * max(1.0, abs(values[0]))) / 5)
        self.low = self.tick * math.floor(min(values) / self.tick)
        self.high = self.tick * max(math.ceil(max(values) / self.tick), math.floor(min(values) / self.tick) + 1)

    def x(self, step: float) -> float:
        return round(_LEFT + (step - self.first) / max(1, self.last - self.first) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _panel(phase: Phase) -> list[str]:
    # In an rl phase the held-out metric is the missing reward, which does not belong in a plot of rewards.
    held_out = [(each.step, each.loss) for each in phase.validations] if phase.curve_of == "loss" else []
    scale = _Scale([*phase.curve, *held_out])
    parts = [
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{escape(phase.kind)}</text>',
        *_axes(scale, "nats per token" if phase.curve_of == "loss" else phase.curve_of),
        f'<path d="{_line(scale, phase.curve)}" fill="none" stroke="{_LEARNED}" stroke-width="2"/>',
        *_legend(0, _LEARNED, "training loss" if phase.curve_of == "loss" else phase.curve_of),
    ]
    if held_out:
        parts += [
            f'<circle cx="{scale.x(step)}" cy="{scale.y(loss)}" r="4" fill="{_HELD_OUT}"/>' for step, loss in held_out
        ]
        parts += _legend(1, _HELD_OUT, "held-out loss")
    return parts


def _legend(number: int, colour: str, text: str) -> list[str]:
    y = _TOP + 16 + 20 * number
    return [
        f'<path d="M{_WIDTH - 170} {y - 4}h24" stroke="{colour}" stroke-width="3"/>',
        f'<text x="{_WIDTH - 138}" y="{y}">{escape(text)}</text>',
    ]


def _axes(scale: _Scale, named: str) -> list[str]:
    parts = []
    every = max(1, round(_round((scale.last - scale.first) / 6 or 1)))
    for step in range(-(-scale.first // every) * every, scale.last + 1, every):
        x = scale.x(step)
        parts.append(f'<path d="M{x} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{step:,}</text>')
    for number in range(round((scale.high - scale.low) / scale.tick) + 1):
        value = scale.low + number * scale.tick
        parts.append(f'<path d="M{_LEFT} {scale.y(value)}H{_WIDTH - _RIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{scale.y(value) + 4:g}" text-anchor="end">{value:.4g}</text>')
    parts.append(f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" stroke="#222" fill="none"/>')
    middle, across = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text x="{middle:g}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>')
    turned = f'transform="translate(16 {across:g}) rotate(-90)" text-anchor="middle"'
    return [*parts, f"<text {turned}>{escape(named)}</text>"]


def _round(about: float) -> float:
    """Return the round number (1, 2 or 5 times a power of ten) closest to `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return min((power * nice for nice in (1, 2, 5, 10)), key=lambda nice: abs(math.log(nice / about)))


def _line(scale: _Scale, points: Iterable[tuple[int, float]]) -> str:
    return "M" + "L".join(f"{scale.x(step)} {scale.y(value)}" for step, value in points)
