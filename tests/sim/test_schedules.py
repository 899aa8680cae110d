"""Some bad days, and the proofs in their quick forms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.sim.day import Day
from tests.sim.races import KINDS, race
from tests.sim.schedule import play
from tests.sim.stage import CLOUDS, pace
from tests.sim.stories import STORIES, points, strike

ROOT = Path(__file__).parents[2]


@pytest.mark.acceptance("X26")
@pytest.mark.parametrize("first", [0, 20])
def test_nothing_breaks_on_some_bad_days(first: int) -> None:
    with pace():
        verdicts = [play(seed) for seed in range(first, first + 20)]
    assert [(v.seed, v.broken) for v in verdicts if v.broken] == []
    # A day on which nothing could be launched shows nothing.
    assert sum("launch: exit 0" in v.counts for v in verdicts) >= 10


def test_races_have_one_winner() -> None:
    with pace():
        raced = [race(seed) for seed in range(20)]
    assert [(r.seed, r.broken) for r in raced if r.broken] == []
    assert len({r.kind for r in raced}) == len(KINDS)


@pytest.mark.acceptance("X26")
@pytest.mark.parametrize("story", sorted(STORIES))
def test_a_point_here_and_there_of_each_story_is_recovered_from(story: str) -> None:
    with pace():
        found = points(story)
        assert len(found) >= 40
        struck = [strike(point, kind) for kind in ("kill", "fail") for point in found[:: len(found) // 3]]
    assert [(s.point, s.kind, s.broken) for s in struck if s.broken] == []
    assert all(s.was_hit for s in struck)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["simulate", "kill_points", "races"])
def test_the_quick_form_of_the_proof_passes(script: str) -> None:
    argv = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--quick"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("PASS")


@pytest.mark.parametrize("provider", CLOUDS)
def test_nothing_breaks_on_days_with_absurd_figures(provider: str) -> None:
    seeds = [seed for seed in range(60) if Day(seed).absurd_rate][:4]
    with pace():
        verdicts = [play(seed, provider=provider) for seed in seeds]
    assert [(v.seed, v.broken) for v in verdicts if v.broken] == []
    assert all("absurd figures" in v.kinds for v in verdicts)
