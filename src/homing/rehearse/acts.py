"""Acts of a rehearsal: events that hit a run during training, played once it has come that far.

    preempt vanish hang    take the machine; the next such act waits for the next machine
    store-down cloud-down  temporary; the machine continues

One is played before the run is watched, the others during it: the guard inside watch relaunches by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from homing.cloud.destroy import destroy_run
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.providers.base import wait_until
from homing.cloud.reconcile.run_status import look
from homing.rehearse.fake_cloud import ServedCloud
from homing.rehearse.scenes import Act
from homing.store import run_key
from homing.units import format_duration
from homing.wire import file_names

__all__ = ["Acts"]

_WAIT_S = 300.0  # for the run to reach the point where an act is played
_SILENCE_S = 10.0  # of a frozen machine, before the rehearsal does what a person would do
_DOWN_S = 5.0
_NOTICE_S = 30.0
_POLL_S = 0.3
_TAKES_MACHINE: tuple[Act, ...] = ("preempt", "vanish", "hang")


class Acts:
    def __init__(self, acts: list[Act], home: Home, cloud: ServedCloud, notify: Callable[[str, str], None]) -> None:
        self.left = list(acts)
        self._home, self._cloud, self._notify = home, cloud, notify
        self._taken: list[str] = []  # marks of machines taken by an act

    def await_first(self, run: RunRow) -> None:
        """Wait until the next act is due and play it; skip it if the run ends before that."""
        if self.left:
            world = self._home.world
            wait_until(lambda: self._due(run) != "later", timeout_s=_WAIT_S, every_s=_POLL_S, world=world)
            self.play_if_due(run)

    def play_if_due(self, run: RunRow) -> None:
        if not self.left or self._due(run) != "now":
            return
        instances = self._cloud.living()
        if len(instances) == 1:
            act = self.left.pop(0)
            self._notify("fault", f"{act}: now")
            self._play(act, run, instances[0])

    def _due(self, run: RunRow) -> Literal["later", "now", "over"]:
        """Decide by the newest heartbeat: due from the first step on, or for `vanish` from the first checkpoint on."""
        status = look(self._home, run)
        beat = status.reports.heartbeat if status.reports else None
        if beat is None or beat.mark in self._taken:
            return "later"
        if beat.state not in ("booting", "fetching", "training"):
            return "over"
        if beat.step < 1 or (self.left[0] == "vanish" and not self._has_checkpoint(run)):
            return "later"
        return "now"

    def _has_checkpoint(self, run: RunRow) -> bool:
        stored = self._home.store_of(run).list(run_key(run.id, file_names.CHECKPOINTS) + "/")
        return any(entry.key.endswith(file_names.MANIFEST) for entry in stored)

    def _play(self, act: Act, run: RunRow, instance_id: str) -> None:
        if act in _TAKES_MACHINE:
            self._taken.append(self._home.ledger.lines(run.id)[-1].mark)
        if act in ("preempt", "vanish"):
            notice_s = _NOTICE_S if act == "preempt" else None
            self._cloud.post("preempt", {"instance": instance_id, "notice_s": notice_s})
        elif act == "hang":
            self._cloud.post("hang", {"instance": instance_id})
            self._wait_for_silence(run)
        elif act == "store-down":
            self._take_store_away()
        else:
            self._cloud.kill()
            self._home.world.sleep(_DOWN_S)
            self._cloud.serve()
            self._notify("line", "the cloud is back")

    def _wait_for_silence(self, run: RunRow) -> None:
        """Wait until a frozen machine has been silent for a while, then destroy it as a person would."""

        def is_silent() -> bool:
            return (look(self._home, run).heartbeat_age_s or 0.0) > _SILENCE_S

        wait_until(is_silent, timeout_s=_WAIT_S, every_s=_POLL_S, world=self._home.world)
        self._notify("line", f"no heartbeat for {format_duration(_SILENCE_S)}: homing destroy {run.name}")
        destroy_run(self._home, run)

    def _take_store_away(self) -> None:
        store, world = self._home.path / "store", self._home.world
        world.rename(store, store.with_name("store-away"))
        world.sleep(_DOWN_S)
        world.rename(store.with_name("store-away"), store)
        self._notify("line", f"the store is back after {format_duration(_DOWN_S)}")
