"""`python3 -I agent.zip boot.json`: the first program of ours on an instance. Standard library only, Python 3.8."""

import logging
import os
import signal
import sys

from homing.agent.supervise import Agent
from homing.wire.boot import Boot
from homing.wire.codec import WireError, loads
from homing.world import World


def main() -> int:
    world, path = World(), sys.argv[-1]
    try:
        boot = loads(Boot, world.read(path))
        if not world.lock(os.path.join(boot.work_dir, "agent.lock")):  # two would end each other's children
            print("Another agent is at work here; this one leaves everything to it.", file=sys.stderr)
            return 0
        agent = Agent(boot, world)
    except (OSError, WireError) as exc:
        print(f"The agent cannot start: {path}: {exc}\nusage: python3 -I agent.zip boot.json", file=sys.stderr)
        return 2
    logging.basicConfig(filename=agent.log_path("agent"), level=logging.INFO, format="%(asctime)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: agent.preempt(f"The machine sent {signal.Signals(got).name}."))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the SSH session that started us may close
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
