"""Home: what the control plane keeps on the person's machine, and the doors it opens from there.

    $HOMING_HOME/owner  ledger.sqlite  speed.json  runs/<run id>/  local/<instance id>/  store/

Nothing is created until something is written.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from homing.cloud.ledger import Ledger, RunRow
from homing.cloud.mark import owner_of
from homing.cloud.providers.base import Provider
from homing.cloud.providers.registry import open_provider
from homing.store import Store, open_store
from homing.world import World

__all__ = ["LAUNCH_NOTE", "Home"]

LAUNCH_NOTE = "launch.json"  # in runs/<run id>/: the offer that was taken, and whether it was a smoke run


class Home:
    def __init__(self, path: Path, world: World) -> None:
        self.path = path
        self.world = world
        self.ledger = Ledger(path / "ledger.sqlite", world)
        self._providers: dict[str, Provider] = {}

    @cached_property
    def owner(self) -> str:
        return owner_of(self.path, self.world)

    def provider(self, name: str) -> Provider:
        if name not in self._providers:
            self._providers[name] = open_provider(name, home=self.path, owner=self.owner, world=self.world)
        return self._providers[name]

    def store_of(self, run: RunRow) -> Store:
        # Launch has made it: one that is gone now (a disk not mounted) must not come back empty.
        return open_store(run.store, self.world, create=False)

    def run_dir(self, run_id: str) -> Path:
        return self.path / "runs" / run_id
