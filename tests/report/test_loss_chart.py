"""The picture of a report."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from homing.report.loss_chart import draw
from homing.report.report_data import Phase, Validation

SVG = "{http://www.w3.org/2000/svg}"


def places(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", text)]


def test_each_phase_has_a_panel_with_its_line_and_its_held_out_dots() -> None:
    mid = Phase("mid", curve=[(1, 2.0), (2, 1.0)])
    pretrain = Phase("pretrain", curve=[(1, 6.0), (50, 4.0), (100, 3.0)], validations=[Validation(100, 3.5)])
    root = ElementTree.fromstring(draw([pretrain, mid]))
    panels = root.findall(f"{SVG}g")
    assert len(panels) == 2
    (dot,) = panels[0].findall(f"{SVG}circle")
    line = next(path for path in panels[0].findall(f"{SVG}path") if path.get("stroke-width") == "2")
    points = places(str(line.get("d")))
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points), "a lower loss is lower on the page"
    assert float(str(dot.get("cx"))) == points[-1][0]
    assert float(str(dot.get("cy"))) < points[-1][1], "a held-out loss above that of training"


def test_without_two_points_there_is_no_picture() -> None:
    assert draw([]) == draw([Phase("pretrain")]) == draw([Phase("pretrain", curve=[(1, 2.0)])]) == ""


@pytest.mark.parametrize("values", [(2.0, 2.0), (0.0, 0.0), (-1.0, 1.0), (1e-9, 2e-9), (1e12, 3e12)])
def test_any_finite_values_can_be_drawn(values: tuple[float, float]) -> None:
    text = draw([Phase("rl", curve_of="reward", curve=[(7, values[0]), (8, values[1])])])
    ElementTree.fromstring(text)
    line = next(path for path in re.findall(r'd="([^"]+)" fill="none" stroke="#0077bb"', text))
    assert all(0 <= x <= 760 and 0 <= y <= 300 for x, y in places(line))


def test_the_name_of_a_phase_cannot_leave_its_place() -> None:
    root = ElementTree.fromstring(draw([Phase("<script>&", curve=[(1, 2.0), (2, 1.0)])]))
    assert any(text.text == "<script>&" for text in root.iter(f"{SVG}text"))
