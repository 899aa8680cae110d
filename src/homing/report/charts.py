"""Draws a run's curves as SVG: loss, learning rate, tokens per second and dollars.

    Report --make_charts--> [Chart] --draw--> one SVG each, for the HTML page;  --draw_all--> one SVG file for Markdown

Colors are CSS variables of the shared stylesheet, so that the charts follow the theme of the page. An SVG file has no
stylesheet and uses the light colors after the comma. Each series also differs in shape, not by color alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from html import escape

from homing.report.report_data import Attempt, Phase, Report
from homing.units import format_count

__all__ = ["Chart", "Charts", "Series", "draw", "draw_all", "make_charts"]

_WIDTH, _HEIGHT = 520, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 26, 30, 44  # margins
_TEXT, _MUTED, _GRID, _SURFACE = (
    "var(--text,#1f1d1a)",
    "var(--muted,#625c53)",
    "var(--grid,#e9e5dd)",
    "var(--surface,#fff)",
)
_TRAINING, _VALIDATION = "var(--series-1,#0072b2)", "var(--series-2,#c4500a)"
_RATE, _SPEED, _MONEY = "var(--series-5,#7a5cc4)", "var(--series-3,#00805a)", "var(--series-2,#c4500a)"


@dataclass(frozen=True)
class Series:
    name: str
    color: str
    points: Sequence[tuple[float, float]]
    is_dots: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    show: Callable[[float], str] = field(default=lambda value: f"{value:.4g}")  # text of a value on the y axis

    @property
    def description(self) -> str:
        """What the chart shows, for a person who cannot see it."""
        parts = [
            f"{each.name}: {self.show(each.points[0][1])} at {each.points[0][0]:,.4g},"
            f" {self.show(each.points[-1][1])} at {each.points[-1][0]:,.4g},"
            f" lowest {self.show(min(value for _, value in each.points))}"
            for each in self.series
        ]
        return f"{self.y_label} over {self.x_label}. {'; '.join(parts)}."


@dataclass(frozen=True)
class Charts:
    """A block of a section: charts that are shown side by side."""

    title: str
    charts: Sequence[Chart]


def make_charts(report: Report) -> list[Chart]:
    """Return the charts that have at least two points."""
    made = [chart for phase in report.phases for chart in _phase_charts(phase)]
    money = _spend(report.attempts, report.made_at)
    if len(money) > 1:
        limit = [] if report.spend_limit_usd is None else [(x, float(report.spend_limit_usd)) for x, _ in money]
        series = [Series("spent", _MONEY, money), *([Series("limit", _MUTED, limit)] if limit else [])]
        made.append(Chart("Dollars", "hours since the launch", "dollars", series, lambda value: f"${value:.4g}"))
    return made


def _phase_charts(phase: Phase) -> Iterable[Chart]:
    is_loss = phase.curve_of == "loss"
    if len(phase.curve) > 1:
        series = [Series("training" if is_loss else phase.curve_of, _TRAINING, phase.curve)]
        # In an rl phase the held-out metric is the missing reward, which does not belong in a plot of rewards.
        if is_loss and phase.validations:
            held_out = [(each.step, each.loss) for each in phase.validations]
            series.append(Series("validation", _VALIDATION, held_out, is_dots=True))
        unit = "nats per token" if is_loss else phase.curve_of
        yield Chart(f"{phase.curve_of.capitalize()}, {phase.kind}", "step", unit, series)
    if len(phase.lr_curve) > 1:
        rate = Series("learning rate", _RATE, phase.lr_curve)
        yield Chart(f"Learning rate, {phase.kind}", "step", "learning rate", [rate], _show_small)
    if len(phase.speed_curve) > 1:
        speed = Series("tokens per second", _SPEED, phase.speed_curve)
        yield Chart(f"Speed, {phase.kind}", "step", "tokens per second", [speed], format_count)


def _show_small(value: float) -> str:
    """Return a value such as 3e-4."""
    base, _, exponent = f"{value:.1e}".partition("e")
    return f"{float(base):g}e{int(exponent)}" if value else "0"


def _spend(attempts: Sequence[Attempt], now: float) -> list[tuple[float, float]]:
    """Return the dollars over the hours since the first attempt began. An attempt's receipt is spread over its time."""
    points: list[tuple[float, float]] = []
    total = Decimal(0)
    for each in attempts:
        begun = (each.began_at - attempts[0].began_at) / 3600
        ended = ((each.ended_at if each.ended_at is not None else now) - attempts[0].began_at) / 3600
        points.append((begun, float(total)))
        total += Decimal(each.spend_usd)
        points.append((max(begun, ended), float(total)))
    return points


# --- SVG ---


def draw(chart: Chart, clean: Callable[[str], str] = lambda text: text) -> str:
    """Return one chart as SVG. `clean` removes characters that must not be in the page; XML is escaped here."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-size="13">',
        f"<title>{escape(clean(chart.title))}</title>",
        f"<desc>{escape(clean(chart.description))}</desc>",
        *_panel(chart, clean),
        "</svg>",
    ])  # fmt: skip


def draw_all(charts: Sequence[Chart]) -> str:
    """Return all charts as one SVG file, one below the other, or "" if there are none."""
    if not charts:
        return ""
    pitch = _HEIGHT + 34
    height = pitch * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH * 1.4:g}"'
        f' height="{height * 1.4:g}" font-family="sans-serif" font-size="13" role="img">',
        "<title>Curves of the run</title>",
        f"<desc>{escape(' '.join(chart.description for chart in charts))}</desc>",
        f'<rect width="{_WIDTH}" height="{height}" style="fill:{_SURFACE}"/>',
    ]
    for number, chart in enumerate(charts):
        heading = f'<text x="{_LEFT}" y="20" font-size="15" font-weight="bold" style="fill:{_TEXT}">'
        parts += [
            f'<g transform="translate(0 {number * pitch})">',
            f"{heading}{escape(chart.title)}</text>",
            '<g transform="translate(0 28)">',
            *_panel(chart, lambda text: text),
            "</g></g>",
        ]
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Maps values to positions in a panel."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        xs, values = [x for x, _ in points], [value for _, value in points]
        self.first, self.last = min(xs), max(xs)
        self.tick = _round(max(max(values) - min(values), 1e-3 * (abs(values[0]) or 1.0)) / 4)
        self.low = self.tick * math.floor(min(values) / self.tick)
        self.high = self.tick * max(math.ceil(max(values) / self.tick), math.floor(min(values) / self.tick) + 1)

    def x(self, x: float) -> float:
        share = (x - self.first) / ((self.last - self.first) or 1)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _panel(chart: Chart, clean: Callable[[str], str]) -> list[str]:
    scale = _Scale([point for each in chart.series for point in each.points])
    parts = _axes(chart, scale, clean)
    for each in chart.series:
        if each.is_dots:
            parts += [
                f'<circle cx="{scale.x(x)}" cy="{scale.y(value)}" r="4.5"'
                f' style="fill:{each.color};stroke:{_SURFACE};stroke-width:1.5"/>'
                for x, value in each.points
            ]
        else:
            dashed = ";stroke-dasharray:5 4" if each.name == "limit" else ""
            way = "M" + "L".join(f"{scale.x(x)} {scale.y(value)}" for x, value in each.points)
            parts.append(
                f'<path class="line" d="{way}" fill="none" stroke-linejoin="round"'
                f' style="stroke:{each.color};stroke-width:2{dashed}"/>'
            )
    return parts + _legend(chart.series, clean)


def _legend(series: Sequence[Series], clean: Callable[[str], str]) -> list[str]:
    """Return the names of the series in one row above the chart; nothing if there is only one."""
    parts: list[str] = []
    left = float(_LEFT)
    for each in series if len(series) > 1 else ():
        if each.is_dots:
            mark = f'<circle cx="{left + 9:g}" cy="13" r="4.5" style="fill:{each.color}"/>'
        else:
            dashed = ";stroke-dasharray:5 4" if each.name == "limit" else ""
            mark = f'<path d="M{left:g} 13h18" style="stroke:{each.color};stroke-width:3{dashed}"/>'
        parts += [mark, f'<text x="{left + 24:g}" y="17" style="fill:{_TEXT}">{escape(clean(each.name))}</text>']
        left += 44 + 7.5 * len(each.name)
    return parts


def _axes(chart: Chart, scale: _Scale, clean: Callable[[str], str]) -> list[str]:
    parts = []
    every = _round((scale.last - scale.first) / 5 or 1)
    if all(float(x).is_integer() for x in (scale.first, scale.last)) and chart.x_label == "step":
        every = max(1.0, round(every))
    for number in itertools.count(math.ceil(scale.first / every)):
        at = number * every
        if at > scale.last:
            break
        x = scale.x(at)
        parts.append(f'<path d="M{x} {_TOP}V{_HEIGHT - _BOTTOM}" style="stroke:{_GRID}"/>')
        label = format_count(at) if at >= 10_000 else f"{at:,.4g}"
        parts.append(_label(x, _HEIGHT - _BOTTOM + 18, label, "middle"))
    for number in range(round((scale.high - scale.low) / scale.tick) + 1):
        value = scale.low + number * scale.tick
        parts.append(f'<path d="M{_LEFT} {scale.y(value)}H{_WIDTH - _RIGHT}" style="stroke:{_GRID}"/>')
        parts.append(_label(_LEFT - 8, scale.y(value) + 4.5, chart.show(round(value, 12)), "end"))
    parts.append(f'<path d="M{_LEFT} {_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" style="stroke:{_MUTED}"/>')
    parts.append(_label((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, clean(chart.x_label), "middle"))
    turned = f'transform="translate(13 {(_TOP + _HEIGHT - _BOTTOM) / 2:g}) rotate(-90)" text-anchor="middle"'
    return [*parts, f'<text {turned} style="fill:{_MUTED}">{escape(clean(chart.y_label))}</text>']


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" style="fill:{_MUTED}">{escape(text)}</text>'


def _round(about: float) -> float:
    """Return the round number (1, 2 or 5 times a power of ten) closest to `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return min((power * nice for nice in (1, 2, 5, 10)), key=lambda nice: abs(math.log(nice / about)))
