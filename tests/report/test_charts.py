"""The charts of a report."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from tests.report.kept_run import sample_report

from homing.report import Report
from homing.report.charts import draw, draw_all, make_charts
from homing.report.report_data import Phase, Validation

SVG = "{http://www.w3.org/2000/svg}"


def report(*phases: Phase) -> Report:
    return Report("moss-1", "moss", "done", "", True, True, 0.0, "0.1.0", phases=list(phases))


def places(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", text)]


def test_the_loss_is_a_line_and_each_validation_a_dot() -> None:
    pretrain = Phase("pretrain", curve=[(1, 6.0), (50, 4.0), (100, 3.0)], validations=[Validation(100, 3.5)])
    (chart,) = make_charts(report(pretrain))
    root = ElementTree.fromstring(draw(chart))
    (line,) = [path for path in root.findall(f"{SVG}path") if path.get("class") == "line"]
    points = places(str(line.get("d")))
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points), "a lower loss is lower on the page"
    dot, in_legend = root.findall(f"{SVG}circle")
    assert float(str(dot.get("cx"))) == points[-1][0]
    assert float(str(dot.get("cy"))) < points[-1][1], "a held-out loss above that of training"
    assert float(str(in_legend.get("cy"))) < 30


def test_a_launched_run_has_curves_of_loss_learning_rate_speed_and_dollars(tmp_path: Path) -> None:
    charts = make_charts(sample_report(tmp_path))
    assert [chart.title for chart in charts] == [
        *(f"{what}, {phase}" for phase in ("pretrain", "mid") for what in ("Loss", "Learning rate", "Speed")),
        "Dollars",
    ]
    spent, limit = charts[-1].series
    assert spent.points[-1][1] == 2.0
    assert {value for _, value in limit.points} == {12.0}
    root = ElementTree.fromstring(draw_all(charts))
    assert len(root.findall(f"{SVG}g")) == len(charts)


def test_a_chart_has_axes_with_units_and_a_description_in_words() -> None:
    (chart,) = make_charts(report(Phase("pretrain", curve=[(1, 6.0), (100, 3.0)])))
    root = ElementTree.fromstring(draw(chart))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"step", "nats per token", "3", "6"} <= set(texts)
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "Loss, pretrain"
    assert root.findtext(f"{SVG}desc") == "nats per token over step. training: 6 at 1, 3 at 100, lowest 3."


def test_colors_follow_the_theme_of_the_page() -> None:
    (chart,) = make_charts(report(Phase("pretrain", curve=[(1, 6.0), (100, 3.0)])))
    colors = re.findall(r"(?:fill|stroke):([^;\"]+)", draw(chart))
    assert all(color.startswith("var(--") for color in colors)


def test_without_two_points_there_is_no_chart() -> None:
    assert make_charts(report()) == make_charts(report(Phase("pretrain", curve=[(1, 2.0)]))) == []
    assert draw_all([]) == ""


@pytest.mark.parametrize("values", [(2.0, 2.0), (0.0, 0.0), (-1.0, 1.0), (1e-9, 2e-9), (1e12, 3e12)])
def test_any_finite_values_can_be_drawn(values: tuple[float, float]) -> None:
    (chart,) = make_charts(report(Phase("rl", curve_of="reward", curve=[(7, values[0]), (8, values[1])])))
    text = draw(chart)
    ElementTree.fromstring(text)
    (line,) = re.findall(r'class="line" d="([^"]+)"', text)
    assert all(0 <= x <= 520 and 0 <= y <= 280 for x, y in places(line))


def test_the_name_of_a_phase_cannot_leave_its_place() -> None:
    charts = make_charts(report(Phase("<script>&", curve=[(1, 2.0), (2, 1.0)])))
    root = ElementTree.fromstring(draw_all(charts))
    assert any(text.text == "Loss, <script>&" for text in root.iter(f"{SVG}text"))
