"""Bad days with AWS: its real adapter and boto3, moto behind a line that loses things, instances with a timer."""

from __future__ import annotations

import dataclasses
from decimal import Decimal

import pytest
from tests.sim.aws import SimAws
from tests.sim.schedule import destroy_all, play
from tests.sim.stage import pace
from tests.sim.stories import LONG, Rig

from homing.cloud.home import Home
from homing.cloud.launch.armed_guards import guards
from homing.cloud.launch.launch import launch


@pytest.mark.acceptance(122)
@pytest.mark.slow
@pytest.mark.parametrize("skew_s", [0.0, 280.0, -280.0])
def test_with_every_program_dead_and_home_gone_the_systems_own_timer_ends_it_inside_the_limit(skew_s: float) -> None:
    """Whatever the clock at home says, and however long it booted: neither too late nor much too early."""
    with pace():
        rig = Rig(provider="aws")
        rig.limit = Decimal("1.5")  # fifteen hundred seconds
        cloud, stage = rig.cloud, rig.stage
        assert isinstance(cloud, SimAws)
        stage.home.skew_s = skew_s
        cloud.cloud.settings = dataclasses.replace(cloud.cloud.settings, boot_s=130.0)
        assert rig.launch(trainer=LONG).error is None
        (host,) = cloud.machines.values()
        stage.advance(20.0)
        for proc in host.living():
            proc.kill()
        stage.home.freeze()
        stage.advance(1500.0)
        assert cloud.num_timers_fired == 1
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert Decimal("1.4") < line.usd <= rig.limit
        stage.close()


@pytest.mark.acceptance(122)
@pytest.mark.slow
def test_a_machine_that_hangs_without_a_guard_at_home_keeps_billing_and_launch_has_warned_of_it() -> None:
    """Its timer is its own system's, and hangs with it. AWS has none."""
    with pace():
        rig = Rig(provider="aws")
        stage, said = rig.stage, list[str]()
        stage.programs.trainer = LONG

        def verb(home: Home) -> object:
            ready = stage.draft(home, provider="aws", limit=str(rig.limit))
            said.extend(guards(ready, home))
            assert rig.cloud.cloud.bill() == [], "before anything is rented"
            return launch(ready, home)

        assert rig.do("launch", verb).error is None
        (sentence,) = (each for each in said if "it keeps billing at" in each)
        assert "hangs or never comes up" in sentence
        assert "/h until you run: homing destroy moss" in sentence
        assert not any("the provider ends the instance" in each for each in said)
        (machine,) = rig.cloud.cloud._live
        rig.cloud.cloud.hang(machine)
        stage.home.freeze()
        stage.advance(2500.0)
        assert list(rig.cloud.cloud._live) == [machine]
        stage.home.thaw()
        assert rig.do("tidy", destroy_all).answer == []
        assert rig.cloud.cloud.live() == {}
        stage.close()


# Days on which nothing enforced the limit and no message said so: on one the machine hangs, on the other launch
# itself waited for a machine that never came up, for longer than its limit lasted.
@pytest.mark.parametrize(("seed", "is_unguarded"), [(2629, True), (792, False)])
def test_a_day_that_nothing_could_hold_was_announced_and_what_launch_can_hold_it_holds(
    seed: int, is_unguarded: bool
) -> None:
    with pace():
        day = play(seed, provider="aws")
    assert (day.broken, day.is_unguarded, day.is_announced) == ("", is_unguarded, True)


def test_the_other_resources_of_an_instance_are_deleted_with_it() -> None:
    with pace():
        rig = Rig(provider="aws")
        assert rig.launch().error is None
        things = lambda home: home.provider("aws").list_resources()  # noqa: E731
        assert [each.kind for each in rig.do("look", things).answer] == ["group"]
        rig.destroy()
        assert rig.do("look", things).answer == []
        rig.stage.close()
