"""Which code a command line starts in the simulation: always the real one, except for the trainer.

agent.zip boot.json            homing.instance.agent.__main__
-m homing.store.sync ...       homing.store.sync
-m homing.instance.alerts boot.json    homing.instance.alerts
end_billing.py FOLDER MARK     what local_end does, against the simulated processes of its host
bash -c ... RUNPOD_POD_ID ...  what a pod's own end command asks of RunPod's API
sh -c ... over ...             the end of a sandbox of Modal: a word to its first command
shutdown -h now                the end of an instance of AWS, by its own operating system
-m homing.lm.train RUN_DIR     tests.sim.trainer
"""

from __future__ import annotations

import json
import signal as signals
import sys
from collections.abc import Callable

from tests.sim import aws, modal, runpod
from tests.sim.host import Host
from tests.sim.kernel import Broken
from tests.sim.trainer import Trainer
from tests.sim.world import Proc, SimWorld

from homing.instance.agent.__main__ import main as agent_main
from homing.instance.alerts import main as lookout_main
from homing.store.sync import main as sync_main

__all__ = ["Programs"]

Program = Callable[[SimWorld], "int | None"]


class Programs:
    """Starts processes. `on_start` lets a schedule look at each one, to give it its fate."""

    def __init__(self) -> None:
        self.on_start: list[Callable[[Proc], None]] = []
        self.trainer: dict[str, float] = {}  # how trainers behave unless their command line says otherwise

    def start(self, host: Host, argv: list[str], env: dict[str, str]) -> Proc:
        if "homing.lm.train" in argv:
            argv = ["trainer", argv[-1], *(f"{name}={value}" for name, value in self.trainer.items())]
        role, program = _find(argv)
        return self.begin(host, role, program, env, argv)

    def begin(
        self, host: Host, role: str, program: Program, env: dict[str, str], argv: list[str] | None = None
    ) -> Proc:
        proc = Proc(host, argv or [role], env, program)
        proc.role = role
        for look in self.on_start:
            look(proc)
        return proc


def _find(argv: list[str]) -> tuple[str, Program]:
    words = [word.rsplit("/", 1)[-1] for word in argv]
    if "trainer" in words[:2]:
        return "trainer", lambda world: Trainer(world, argv[argv.index("trainer") + 1 :]).run()
    if "agent.zip" in words:
        role = "dead-man" if "--dead-man" in argv else "agent"
        return role, lambda world: agent_main(argv[words.index("agent.zip") + 1 :], world)
    if "homing.store.sync" in words:
        at = words.index("homing.store.sync")
        return f"sync{argv[-1]}", lambda world: _ending_at_sigterm(world, lambda: sync_main(argv[at + 1 :], world))
    if "homing.instance.alerts" in words:
        return "lookout", lambda world: _ending_at_sigterm(world, lambda: lookout_main(argv, world))
    if "end_billing.py" in words:
        return "end_billing", lambda world: _end_local(world, argv[-2], argv[-1])
    if words[0] == "bash" and "RUNPOD_POD_ID" in argv[-1]:
        return "end_billing", runpod.end_billing
    if words[0] == "sh" and modal.OVER in argv[-1]:
        return "end_billing", modal.leave
    if words[0] == "shutdown":
        return "end_billing", aws.shut_down
    if words[0] == "echo":  # a machine that cannot end its own billing, and says so
        return "end_billing", lambda world: 0
    raise Broken(f"no program for {argv}")


def _ending_at_sigterm(world: SimWorld, program: Callable[[], int]) -> int:
    world.on_signal(signals.SIGTERM, lambda got: sys.exit(128 + got))  # as the module does when it is started
    return program()


def _end_local(world: SimWorld, folder: str, mark: str) -> int:
    body = {"schema": "homing.local-ended/1", "ended_at": world.now(), "by": "agent"}
    world.create(f"{folder}/ended.json", json.dumps(body).encode())
    began, num_quiet = world.monotonic(), 0
    while num_quiet < 2:
        others = [p.pid for p, value in world.marked("HOMING_MARK", mark) if value == mark and p.pid != world.proc.pid]
        num_quiet = 0 if others else num_quiet + 1
        waited_s = world.monotonic() - began
        if waited_s > 20:
            return 1
        for pid in others:
            world.signal(pid, signals.SIGTERM if waited_s < 1.0 else signals.SIGKILL)
        world.sleep(0.2)
    return 0
