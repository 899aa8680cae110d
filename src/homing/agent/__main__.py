"""`python3 -I agent.zip [--dead-man] boot.json`: our first program on an instance. Stdlib, Python 3.8.

The dead-man is started before anything that can fail. Each of the two holds a lock, by which the other knows it lives.
"""

import logging
import signal
import sys
from typing import List, Optional, Sequence

from homing.agent import dead_man
from homing.agent.folder import Folder
from homing.agent.supervise import Agent
from homing.wire import instance as names
from homing.wire.codec import WireError, loads
from homing.wire.orders import Orders
from homing.world.machine import Machine

FORMAT = "%(asctime)s %(message)s"


def main(argv: Optional[Sequence[str]] = None, simulated: Optional[Machine] = None) -> int:
    argv, world = argv or sys.argv, simulated or Machine()
    path = argv[-1]
    try:
        boot = loads(Orders, world.read(path))
        if "--dead-man" in argv:
            return watch_over(Folder(boot, world, dead_man.SOURCE))
        agent = prepare(Folder(boot, world))
    except (OSError, WireError) as exc:
        print(f"The agent cannot start: {path}: {exc}\nusage: python3 -I agent.zip boot.json", file=sys.stderr)
        return 2
    if agent is None:
        print("Another agent is at work here; this one leaves everything to it.", file=sys.stderr)
        return 0
    if simulated is None:
        # Failures also to where the provider looks: before anything can reach the store they are seen only there.
        handlers: List[logging.Handler] = [logging.FileHandler(agent.folder.log_path("agent")), logging.StreamHandler()]
        handlers[1].setLevel(logging.ERROR)
        logging.basicConfig(handlers=handlers, level=logging.INFO, format=FORMAT)
        logging.setLogRecordFactory(agent.folder.record)
    for number in (signal.SIGTERM, signal.SIGINT):
        world.on_signal(number, lambda got: agent.preempt(f"The machine sent {signal.Signals(got).name}."))
    world.on_signal(signal.SIGHUP, None)  # the SSH session that started us may close
    return agent.run()


def watch_over(folder: Folder) -> int:
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    folder.world.on_signal(signal.SIGHUP, None)
    if take(folder, names.DEAD_MAN_LOCK):
        dead_man.DeadMan(folder).run()
    return 0


def prepare(folder: Folder) -> Optional[Agent]:
    """The second guard first; then the agent, unless another one is at work: two would end each other's children."""
    try:
        dead_man.start(folder)
    except OSError as exc:  # the agent tries again, and its heartbeat says that it is alone
        print(f"The dead-man could not be started: {exc}", file=sys.stderr)
    return Agent(folder) if take(folder, names.AGENT_LOCK) else None


def take(folder: Folder, lock: str) -> bool:
    """Asked for more than once: the other one looks at it now and then, and looking takes it for a moment."""
    for _ in range(5):
        if folder.world.lock(folder.path(lock)):
            return True
        folder.world.sleep(0.2)
    return False


if __name__ == "__main__":
    sys.exit(main())
