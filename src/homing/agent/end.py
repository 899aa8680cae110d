"""How billing ends, the same for the agent and the dead-man: one command or one request, as boot.json says."""

from __future__ import annotations

import math
import signal
from typing import Callable

from homing.agent.folder import Folder
from homing.wire import instance as names
from homing.world.machine import HttpRequest, Machine, NetworkError

END_TRY_S = 60.0
UNKILLABLE_S = 15.0
LONGEST_PAUSE_S = 60.0


def pause_s(tries: int, tick_s: float) -> float:
    """Before the next try: longer each time."""
    return min(tick_s * 2.0 ** min(tries, 10), LONGEST_PAUSE_S)


def wait(world: Machine, pid: int, is_over: Callable[[], bool], tick: Callable[[], None]) -> int:
    """The exit code of a child, ticking meanwhile. It is killed when `is_over`; if even that fails, we go on."""
    killed_at = math.inf
    while world.monotonic() - killed_at < UNKILLABLE_S:
        code = world.poll(pid)
        if code is not None:
            return code
        if is_over():
            killed_at = min(killed_at, world.monotonic())
            world.signal(pid, signal.SIGKILL, is_group=True)
        tick()
    return -signal.SIGKILL


def end_billing(folder: Folder, tries: int, tick: Callable[[], None]) -> str:
    """One try, told either way: why it failed, or "". A note tells the other guard to start nothing here any more."""
    problem = _ask(folder, tick)
    if problem:
        problem = f"STILL BILLING: try {tries} to end it failed: {problem}"
        folder.event("end_billing_failed", problem)
        return problem
    folder.event("billing_ended", "What ends billing was done and accepted.")
    folder.world.write(folder.path(names.BILLING_ENDED), str(folder.world.boottime()).encode())
    return ""


def _ask(folder: Folder, tick: Callable[[], None]) -> str:
    """Only 2xx is a yes: while this runs, "not found" cannot be true of its machine."""
    end, world = folder.boot.end_billing, folder.world
    if end.kind == "command":
        until = world.monotonic() + END_TRY_S
        code = wait(world, folder.start(end.argv, folder.source), lambda: world.monotonic() > until, tick)
        return f"the command ended with exit code {code} (logs/{folder.source}.log)" if code else ""
    env = world.environment()
    missing = [variable for variable in end.header_env.values() if variable not in env]
    if end.kind != "request" or missing:
        return f"cannot end by {end.kind!r}; not set in the environment: {', '.join(missing) or 'nothing'}"
    headers = {name: env[variable] for name, variable in end.header_env.items()}
    try:
        reply = world.http(HttpRequest(end.method, end.url, headers, end.body.encode()))
    except NetworkError as exc:
        return str(exc)
    return "" if 200 <= reply.status < 300 else f"the provider answered {reply.status}"
