"""The learning rate against its closed forms."""

from __future__ import annotations

import math

import pytest

from homing.lm.train.optim.schedule import lr_scale
from homing.wire.run_json import Schedule


def scales(schedule: Schedule, num_steps: int) -> list[float]:
    return [lr_scale(schedule, step, num_steps) for step in range(num_steps)]


def test_wsd_warms_up_stays_and_falls_in_straight_lines() -> None:
    found = scales(Schedule("wsd", warmup_steps=4, decay_steps=5, floor=0.1), 20)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4:16] == [1.0] * 12
    assert found[15:] == pytest.approx([0.1 + 0.9 * left / 5 for left in (5, 4, 3, 2, 1)])


def test_wsd_reaches_its_floor_just_after_the_last_step() -> None:
    schedule = Schedule("wsd", warmup_steps=0, decay_steps=10, floor=0.2)
    assert lr_scale(schedule, 99, 100) == pytest.approx(0.2 + 0.8 / 10)
    assert lr_scale(schedule, 100, 100) == pytest.approx(0.2)
    assert lr_scale(schedule, 500, 100) == pytest.approx(0.2)


def test_wsd_with_an_earlier_end_only_decays_earlier() -> None:
    schedule = Schedule("wsd", warmup_steps=3, decay_steps=5, floor=0.0)
    long, landed = scales(schedule, 100), scales(schedule, 40)
    assert landed[:36] == long[:36]
    assert landed[35:] == pytest.approx(long[95:])


def test_cosine_is_half_a_cosine_after_warmup_and_the_floor_after_that() -> None:
    schedule = Schedule("cosine", warmup_steps=10, decay_steps=90, floor=0.1)
    assert lr_scale(schedule, 9, 200) == 1.0
    assert lr_scale(schedule, 10, 200) == 1.0
    assert lr_scale(schedule, 55, 200) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_scale(schedule, 40, 200) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 3)))
    assert lr_scale(schedule, 150, 200) == pytest.approx(0.1)


def test_constant_warms_up_and_stays() -> None:
    assert scales(Schedule("constant", 2, 0, 0.0), 5) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant"])
@pytest.mark.parametrize(("warmup", "decay", "num_steps"), [(0, 0, 1), (5, 10, 3), (50, 60, 100), (3, 200, 50)])
def test_every_schedule_stays_between_zero_and_one_and_is_never_zero(
    kind: str, warmup: int, decay: int, num_steps: int
) -> None:
    assert all(0.0 < s <= 1.0 for s in scales(Schedule(kind, warmup, decay, 0.0), num_steps) if kind != "cosine")
    assert all(0.0 <= s <= 1.0 for s in scales(Schedule(kind, warmup, decay, 0.05), num_steps))


def test_where_warmup_and_tail_overlap_the_lower_one_counts() -> None:
    schedule = Schedule("wsd", warmup_steps=10, decay_steps=10, floor=0.0)
    assert scales(schedule, 6) == pytest.approx([min((s + 1) / 10, (6 - s) / 10) for s in range(6)])
