"""A machine simulated by processes on this computer, which are identified by a variable in their environment.

`local` and the machines of the fake cloud are such process trees. They outlive the process that started them. No pid
needs to be recorded, because every process with the variable belongs to the tree, even if its parent is gone.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from homing.cloud.providers.base import wait_until
from homing.errors import ProviderRefused
from homing.world import Process, World

__all__ = ["MACHINE_ENV", "ProcessTree", "inherited"]

# Environment variable that marks other providers' machines on this computer, so that `local` ignores them.
MACHINE_ENV = "HOMING_MACHINE"

_TERM_GRACE_S = 0.5  # short, because a rented machine gets no more warning than this when it is destroyed
_DEADLINE_S = 20.0
# Environment variables that a machine inherits: an allowlist, so that keys for other services are not passed on.
_ENV_NAMES = re.compile(
    r"(PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|PYTHONPATH|PYTHONHASHSEED|LD_LIBRARY_PATH|DYLD_\w+"
    r"|OMP_\w+|MKL_\w+|OPENBLAS_\w+|CUDA_\w+|NVIDIA_\w+|TORCH\w*_CACHE_DIR|TRITON_CACHE_DIR|SSL_CERT_\w+)"
)


def inherited(world: World) -> dict[str, str]:
    return {name: value for name, value in world.environment().items() if _ENV_NAMES.fullmatch(name)}


@dataclass(frozen=True)
class ProcessTree:
    variable: str
    value: str
    world: World

    def processes(self) -> list[Process]:
        # Compare the whole value, because `marked` matches by prefix, and ...-1 is also a prefix of ...-10.
        found = self.world.marked(self.variable, self.value)
        return [process for process, value in found if value == self.value and process.pid != self.world.pid()]

    def send(self, number: int) -> None:
        for process in self.processes():
            self.world.signal(process.pid, number)

    def end(self) -> None:
        """Kill all processes, scanning again after every signal, because the tree may still be growing."""
        started = self.world.monotonic()
        num_quiet = 0

        def is_quiet() -> bool:
            nonlocal num_quiet
            left = self.processes()
            # Require two empty scans in a row, because the environment of a process is not visible during exec.
            num_quiet = 0 if left else num_quiet + 1
            is_patient = self.world.monotonic() - started < _TERM_GRACE_S
            for process in left:
                self.world.signal(process.pid, signal.SIGTERM if is_patient else signal.SIGKILL)
            return num_quiet == 2

        stubborn = ProviderRefused(
            what=f"Some processes of {self.value} did not exit.",
            why=f"They are still running after {_DEADLINE_S:g} s, despite SIGTERM and SIGKILL.",
            fix="List the processes: ps axe | grep " + self.value,
        )
        wait_until(is_quiet, timeout_s=_DEADLINE_S, every_s=0.1, world=self.world, on_timeout=stubborn)
