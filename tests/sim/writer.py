"""Another writer to the store: replaces and adds objects of the run while it is launched and trains.

    strike    one object of the run gets other bytes, or a key that the run will use is there before it
    check     what an instance starts from is what home sent, whatever is in the store

They write no valid request: who may write `request.json` may stop a run, and home's own guards hold its limit.
"""

from __future__ import annotations

import hashlib
import random

from tests.sim.host import Host
from tests.sim.kernel import Broken
from tests.sim.world import STORE, Proc

from homing.wire import codec, file_names
from homing.wire.boot_json import Boot

__all__ = ["HostileWriter"]

_ROOT = f"{STORE}/mine"
_BYTES = (
    b"",
    b"\x00\x1b]0;evil\x07\x1b[2J\r\n" * 30,
    b"{" * 50_000,
    b'{"schema": "homing.run/1", "name": "evil"}\n',
    b'{"schema": "homing.checkpoint/1", "files": [{"name": "../evil", "num_bytes": 1, "sha256": "0"}]}\n',
    b"PK\x03\x04 import os; os.system('evil')",
)
# Documents that report the state of the run: it writes only garbage there, never a valid document.
_STATE_FILES = (file_names.HEARTBEAT, file_names.OUTCOME, file_names.REQUEST, file_names.EVENTS, file_names.METRICS)


class HostileWriter:
    def __init__(self, store: Host, seed: int) -> None:
        self._disk, self._random = store.disk, random.Random(f"writer {seed}")
        self.num_strikes = 0

    def strike(self, now: float) -> None:
        """On one file of the store, the run's code and inputs first."""
        keys = sorted(self._disk.walk(_ROOT))
        code = [key for key in keys if key.startswith(f"{file_names.STORE_OBJECTS}/")]
        others = [
            key
            for key in keys
            if key.startswith((file_names.STORE_RUNS, file_names.STORE_MODELS)) and "lease" not in key
        ]
        chosen = self._random.choice(code if code and self._random.random() < 0.6 else others or code or [""])
        if not chosen:
            return
        data = self._random.choice(_BYTES)
        if chosen.rpartition("/")[2] in _STATE_FILES:
            data = _BYTES[1]
        self._disk.put(f"{_ROOT}/{chosen}", data, now)
        self.num_strikes += 1

    def check(self, proc: Proc) -> None:
        """A trainer starts: its run.json and its data are those that its boot.json names by hash."""
        if proc.role != "trainer":
            return
        disk = proc.host.disk
        work = proc.argv[1].rpartition("/")[0]
        boot = codec.loads(Boot, disk.get(f"{work}/{file_names.BOOT}"))
        fixed = [
            item for item in boot.inputs if item.path in (f"run/{file_names.RUN}",) or item.path.startswith("data/")
        ]
        for item in fixed:
            found = disk.files.get(f"{work}/{item.path}")
            if found is None or hashlib.sha256(found).hexdigest() != item.sha256:
                raise Broken(f"{proc} starts with {item.path} that home did not send")
