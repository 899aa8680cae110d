"""Bad days with RunPod: its real adapter, its double behind a line that loses things, pods that start again."""

from __future__ import annotations

from decimal import Decimal

from tests.sim.runpod import SimRunpod
from tests.sim.stage import pace
from tests.sim.stories import LONG, Rig

from homing.cloud.reconcile.reconcile import refresh


def test_a_pod_restarts_empty_after_its_first_process_died_and_ends_itself_inside_the_limit() -> None:
    with pace():
        rig = Rig(provider="runpod")
        rig.limit = Decimal("1.5")  # fifteen hundred seconds
        assert rig.launch(trainer=LONG).error is None
        cloud, stage = rig.cloud, rig.stage
        assert isinstance(cloud, SimRunpod)
        (host,) = cloud.machines.values()
        stage.advance(20.0)
        for proc in host.living():
            proc.kill()
        stage.advance(10.0)
        assert cloud.num_restarts == 1
        assert "/opt/homing/work/go" not in host.disk.files  # its disk was emptied, and there is no second hand-over
        assert len(cloud.cloud.live()) == 1
        stage.advance(1480.0)
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert line.usd < rig.limit
        rig.do("runs", refresh)
        stage.close()
