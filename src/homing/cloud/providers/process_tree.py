"""A machine that is processes on this computer: known by one variable in their environment, found and felled by it.

`local` and the machines of the fake cloud are such trees. They outlive whoever started them, and nobody needs to have
kept a pid: a process that carries the variable belongs to the tree, whatever became of its parent.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from homing.cloud.providers.base import wait_until
from homing.errors import ProviderRefused
from homing.world import Process, World

__all__ = ["MACHINE_ENV", "ProcessTree", "inherited"]

# Set where a machine of another provider lives on this very computer, so that `local` does not take it for its own.
MACHINE_ENV = "HOMING_MACHINE"

_TERM_GRACE_S = 0.5  # as short as a rented machine gives when it is destroyed
_DEADLINE_S = 20.0
# What a machine inherits. A list of what may pass, not of what may not: keys of other services stay at home.
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
        # `marked` goes by prefix, and ...-1 is also the beginning of ...-10.
        found = self.world.marked(self.variable, self.value)
        return [process for process, value in found if value == self.value and process.pid != self.world.pid()]

    def send(self, number: int) -> None:
        for process in self.processes():
            self.world.signal(process.pid, number)

    def end(self) -> None:
        """Looks again after every signal: a tree may grow while it is being felled."""
        started = self.world.monotonic()
        num_quiet = 0

        def is_quiet() -> bool:
            nonlocal num_quiet
            left = self.processes()
            # Two empty looks: in the midst of its exec a process has no environment that we could see.
            num_quiet = 0 if left else num_quiet + 1
            is_patient = self.world.monotonic() - started < _TERM_GRACE_S
            for process in left:
                self.world.signal(process.pid, signal.SIGTERM if is_patient else signal.SIGKILL)
            return num_quiet == 2

        stubborn = ProviderRefused(
            what=f"Processes of {self.value} do not end.",
            why=f"They were sent SIGKILL and are still there after {_DEADLINE_S:g} s.",
            fix="Look at them with: ps axe | grep " + self.value,
        )
        wait_until(is_quiet, timeout_s=_DEADLINE_S, every_s=0.1, world=self.world, on_timeout=stubborn)
