"""`python3 -I agent.zip [--dead-man | --bootstrap] boot.json`: our first program on an instance. Stdlib, Python 3.8.

The dead-man is started before anything that can fail. Each of the two holds a lock, by which the other knows it lives.
"""

import logging
import os
import runpy
import signal
import sys
from typing import List, Optional, Sequence

from homing.agent import dead_man
from homing.agent.supervise import Agent
from homing.wire import names
from homing.wire.boot import Boot
from homing.wire.codec import WireError, loads
from homing.world import World

FORMAT = "%(asctime)s %(message)s"


def main(argv: Optional[Sequence[str]] = None, simulated: Optional[World] = None) -> int:
    argv, world = argv or sys.argv, simulated or World()
    path, is_dead_man = argv[-1], "--dead-man" in argv
    try:
        boot = loads(Boot, world.read(path))
        if is_dead_man:
            return watch_over(boot, world)
        if "--bootstrap" in argv:
            return int(runpy.run_path(os.path.join(boot.work_dir, names.BOOTSTRAP))["run"](boot, world))
        agent = prepare(boot, world)
    except (OSError, WireError) as exc:
        print(f"The agent cannot start: {path}: {exc}\nusage: python3 -I agent.zip boot.json", file=sys.stderr)
        return 2
    if agent is None:
        print("Another agent is at work here; this one leaves everything to it.", file=sys.stderr)
        return 0
    if simulated is None:
        # Failures also to where the provider looks: before anything can reach the store they are seen only there.
        handlers: List[logging.Handler] = [logging.FileHandler(agent.log_path("agent")), logging.StreamHandler()]
        handlers[1].setLevel(logging.ERROR)
        logging.basicConfig(handlers=handlers, level=logging.INFO, format=FORMAT)
    for number in (signal.SIGTERM, signal.SIGINT):
        world.on_signal(number, lambda got: agent.preempt(f"The machine sent {signal.Signals(got).name}."))
    world.on_signal(signal.SIGHUP, None)  # the SSH session that started us may close
    return agent.run()


def watch_over(boot: Boot, world: World) -> int:
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    world.on_signal(signal.SIGHUP, None)
    if take(world, os.path.join(boot.work_dir, names.DEAD_MAN_LOCK)):
        dead_man.DeadMan(boot, world).run()
    return 0


def prepare(boot: Boot, world: World) -> Optional[Agent]:
    """The second guard first; then the agent, unless another one is at work: two would end each other's children."""
    try:
        dead_man.start(boot, world)
    except OSError as exc:  # the agent tries again, and its heartbeat says that it is alone
        print(f"The dead-man could not be started: {exc}", file=sys.stderr)
    return Agent(boot, world) if take(world, os.path.join(boot.work_dir, names.AGENT_LOCK)) else None


def take(world: World, lock: str) -> bool:
    """Asked for more than once: the other one looks at it now and then, and looking takes it for a moment."""
    for _ in range(5):
        if world.lock(lock):
            return True
        world.sleep(0.2)
    return False


if __name__ == "__main__":
    sys.exit(main())
