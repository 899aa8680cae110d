"""Entry point of the agent: `python3 -I agent.zip [--dead-man] boot.json`. Needs only Python 3.8's standard library.

The agent starts the dead-man process before anything that can fail. The agent and the dead-man each hold a lock file,
and each checks the other's lock to see whether the other is alive."""

import logging
import signal
import sys
from typing import List, Optional, Sequence

from homing.instance.agent import dead_man
from homing.instance.agent.folder import Folder
from homing.instance.agent.supervise import Agent
from homing.wire import instance_file_names as names
from homing.wire.boot_json_agent import Orders
from homing.wire.codec import WireError, loads
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
        print("Another agent is already running; this one exits.", file=sys.stderr)
        return 0
    if simulated is None:
        # Also log errors to stderr, which the provider collects. Until the store is reachable, they appear only there.
        handlers: List[logging.Handler] = [logging.FileHandler(agent.folder.log_path("agent")), logging.StreamHandler()]
        handlers[1].setLevel(logging.ERROR)
        logging.basicConfig(handlers=handlers, level=logging.INFO, format=FORMAT)
        logging.setLogRecordFactory(agent.folder.record)
    for number in (signal.SIGTERM, signal.SIGINT):
        world.on_signal(number, lambda got: agent.preempt(f"The instance received {signal.Signals(got).name}."))
    world.on_signal(signal.SIGHUP, None)  # keep running when the SSH session that started the agent closes
    return agent.run()


def watch_over(folder: Folder) -> int:
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    folder.world.on_signal(signal.SIGHUP, None)
    if take(folder, names.DEAD_MAN_LOCK):
        dead_man.DeadMan(folder).run()
    return 0


def prepare(folder: Folder) -> Optional[Agent]:
    """Start the dead-man process, then return the agent, or None if an agent is already running on this machine.

    Two agents on one machine would kill each other's child processes."""
    try:
        dead_man.start(folder)
    except OSError as exc:  # the agent tries again later, and its heartbeat says that the dead-man is missing
        print(f"The dead-man process could not be started: {exc}", file=sys.stderr)
    return Agent(folder) if take(folder, names.AGENT_LOCK) else None


def take(folder: Folder, lock: str) -> bool:
    """Return True if the lock was acquired.

    Try several times, because the other process briefly acquires this lock each time it checks it."""
    for _ in range(5):
        if folder.world.lock(folder.path(lock)):
            return True
        folder.world.sleep(0.2)
    return False


if __name__ == "__main__":
    sys.exit(main())
