"""The processes of a simulated machine on this computer, found by a variable in their environment.

    Processes("machine/folder").pids() -> those that have HOMING_MACHINE=machine/folder and still run

Each child inherits the variable, so that no pid has to be written down. The provider `local` of the package leaves
processes with this variable alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = ["VARIABLE", "Processes"]

VARIABLE = "HOMING_MACHINE"
_TERM_S = 0.5  # from SIGTERM to SIGKILL
_DEADLINE_S = 20.0


class Processes:
    def __init__(self, value: str) -> None:
        self.value = value
        self.env = {VARIABLE: value}  # set this for the first process

    def pids(self) -> list[int]:
        wanted = f"{VARIABLE}={self.value}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
                if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                    found.append(int(folder.name))
        return found

    def signal(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def end(self) -> None:
        """Send SIGTERM, then SIGKILL, until two scans in a row find nothing.

        One scan is not enough: during its exec a process shows no environment.
        """
        began, num_empty = time.monotonic(), 0
        while num_empty < 2:
            age_s = time.monotonic() - began
            assert age_s < _DEADLINE_S, f"processes of {self.value} outlive SIGKILL: {self.pids()}"
            num_empty = 0 if self.pids() else num_empty + 1
            self.signal(signal.SIGTERM if age_s < _TERM_S else signal.SIGKILL)
            time.sleep(0.1)
