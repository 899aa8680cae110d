"""The simulation itself: one seed is one schedule, the dead do nothing, and no call reaches the real world."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sim.kernel import Broken, Killed
from tests.sim.schedule import play
from tests.sim.stage import Stage, pace
from tests.sim.world import SimWorld

from homing.world import HttpRequest, World

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stage() -> Iterator[Stage]:
    with pace():
        made = Stage(1)
        yield made
        made.close()


def test_one_seed_replays_one_schedule_exactly() -> None:
    with pace():
        first, second, other = play(3), play(3), play(4)
    assert first.num_calls > 1000
    assert (first.digest, first.seconds, first.outcome) == (second.digest, second.seconds, second.outcome)
    assert first.digest != other.digest


@pytest.mark.slow
def test_a_seed_means_the_same_in_another_process_with_another_hash_seed() -> None:
    program = (
        "from tests.sim.schedule import play\nfrom tests.sim.stage import pace\n"
        "with pace():\n    print([play(seed).digest for seed in (3, 11)])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert said[0] == said[1]


def test_every_method_of_the_world_has_a_counterpart_and_none_is_inherited() -> None:
    public = [name for name in dir(World) if not name.startswith("_")]
    assert [name for name in public if getattr(SimWorld, name) is getattr(World, name)] == []
    unknown = [name for name in public if getattr(SimWorld, name).__name__ == "call"]
    assert unknown == [], "the simulation does not know these yet"


def test_a_killed_process_changes_nothing_on_its_way_out(stage: Stage) -> None:
    def program(world: SimWorld) -> None:
        try:
            world.write("/home/me/before", b"1")
            world.sleep(100)
        finally:
            with pytest.raises(Killed):
                world.write("/home/me/after", b"1")

    proc = stage.programs.begin(stage.home, "victim", program, {})
    stage.advance(10)
    proc.kill()
    stage.advance(1)
    assert proc.task.is_over
    assert proc.task.code == -9
    assert "/home/me/before" in stage.home.disk.files
    assert "/home/me/after" not in stage.home.disk.files


def test_a_process_killed_during_a_write_leaves_the_old_file_and_an_unfinished_one(stage: Stage) -> None:
    def program(world: SimWorld) -> None:
        world.write("/home/me/file", b"old")
        world.write("/home/me/file", b"new!")

    proc = stage.programs.begin(stage.home, "victim", program, {})
    proc.kill_at = 4  # write, half, write, half
    stage.advance(1)
    assert stage.home.disk.files["/home/me/file"] == b"old"
    assert [name for name in stage.home.disk.names("/home/me") if ".tmp-" in name]


def test_time_passes_only_in_sleeps_and_calls_and_differs_between_machines(stage: Stage) -> None:
    seen: dict[str, tuple[float, float]] = {}

    def program(world: SimWorld) -> None:
        began = world.monotonic()
        world.sleep(60)
        seen[world.host()] = (world.now(), world.monotonic() - began)

    other = stage.add_host("other", skew_s=-500.0)
    for host in (stage.home, other):
        stage.programs.begin(host, "clock", program, {})
    stage.advance(61)
    assert 60 <= seen["home"][1] < 60.1
    assert -500.1 < seen["other"][0] - seen["home"][0] < -499.9


def test_a_sleeping_laptop_wakes_up_where_it_was_and_its_monotonic_clock_stood_still(stage: Stage) -> None:
    seen: list[float] = []

    def program(world: SimWorld) -> None:
        began = world.monotonic()
        world.sleep(10)
        world.read("/home/me/data/manifest.json")
        seen.append(world.monotonic() - began)

    stage.programs.begin(stage.home, "sleeper", program, {})
    stage.advance(5)
    stage.home.freeze()
    stage.advance(1000)
    assert seen == []
    stage.home.thaw()
    stage.advance(10)
    assert len(seen) == 1
    assert seen[0] < 20


def test_a_request_arrives_even_if_its_sender_dies_on_the_way(stage: Stage) -> None:
    from tests.doubles.cloud_state import Settings
    from tests.doubles.faults import Faults

    cloud = stage.rent(Settings(), Faults(), "1")
    arrived: list[HttpRequest] = []
    cloud._arrive = lambda request: arrived.append(request)  # type: ignore[method-assign, assignment, return-value]
    proc = stage.programs.begin(
        stage.home, "sender", lambda world: world.http(HttpRequest("GET", "http://cloud.sim/x")), {}
    )
    stage.advance(0.001)
    proc.kill()
    stage.advance(1)
    assert len(arrived) == 1


def test_a_program_that_sleeps_without_end_is_a_finding(stage: Stage) -> None:
    stage.programs.begin(stage.home, "sleeper", lambda world: world.sleep(1e9), {})
    with pytest.raises(Broken, match="sleeps"):
        stage.advance(1)
