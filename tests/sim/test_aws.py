"""Bad days with AWS: its real adapter and boto3, moto behind a line that loses things, instances with a timer."""

from __future__ import annotations

from decimal import Decimal

from tests.sim.aws import SimAws
from tests.sim.stage import pace
from tests.sim.stories import LONG, Rig


def test_with_every_program_dead_and_home_gone_the_systems_own_timer_ends_it_inside_the_limit() -> None:
    with pace():
        rig = Rig(provider="aws")
        rig.limit = Decimal("1.5")  # fifteen hundred seconds
        assert rig.launch(trainer=LONG).error is None
        cloud, stage = rig.cloud, rig.stage
        assert isinstance(cloud, SimAws)
        (host,) = cloud.machines.values()
        stage.advance(20.0)
        for proc in host.living():
            proc.kill()
        stage.home.freeze()
        stage.advance(1500.0)
        assert cloud.num_timers_fired == 1
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert Decimal(1) < line.usd <= rig.limit
        stage.close()


def test_what_was_made_beside_an_instance_goes_with_it() -> None:
    with pace():
        rig = Rig(provider="aws")
        assert rig.launch().error is None
        things = lambda home: home.provider("aws").list_resources()  # noqa: E731
        assert [each.kind for each in rig.do("look", things).answer] == ["group"]
        rig.destroy()
        assert rig.do("look", things).answer == []
        rig.stage.close()
