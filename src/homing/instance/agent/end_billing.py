"""Ends billing for the agent and the dead-man, with the command or HTTP request that boot.json specifies."""

from __future__ import annotations

import math
import signal
from typing import Callable

from homing.instance.agent.folder import Folder
from homing.wire import instance_file_names as names
from homing.world.machine import HttpRequest, Machine, NetworkError

END_TRY_S = 60.0
UNKILLABLE_S = 15.0
LONGEST_PAUSE_S = 60.0


def pause_s(tries: int, tick_s: float) -> float:
    """Return the pause before the next attempt, which doubles each time up to LONGEST_PAUSE_S."""
    return min(tick_s * 2.0 ** min(tries, 10), LONGEST_PAUSE_S)


def wait(world: Machine, pid: int, is_over: Callable[[], bool], tick: Callable[[], None]) -> int:
    """Wait for a child process and return its exit code, calling `tick` while it waits.

    Once `is_over` returns True, kill the child's process group, and wait at most UNKILLABLE_S more seconds."""
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
    """Try once to end billing and record the result as an event; return "" on success, else the reason for the failure.

    On success, also write a marker file that tells the other guard not to start anything else on this instance."""
    problem = _ask(folder, tick)
    if problem:
        problem = f"STILL BILLING: attempt {tries} to end billing failed: {problem}"
        folder.event("end_billing_failed", problem)
        return problem
    folder.event("billing_ended", "The request to end billing was accepted.")
    folder.world.write(folder.path(names.BILLING_ENDED), str(folder.world.boottime()).encode())
    return ""


def _ask(folder: Folder, tick: Callable[[], None]) -> str:
    """Run the command or send the request that ends billing; return "" on success, else the problem.

    Only a 2xx status counts as success. "Not found" is an error, because this code is running on the instance."""
    end, world = folder.boot.end_billing, folder.world
    if end.kind == "command":
        until = world.monotonic() + END_TRY_S
        code = wait(world, folder.start(end.argv, folder.source), lambda: world.monotonic() > until, tick)
        return f"the command exited with code {code} (logs/{folder.source}.log)" if code else ""
    env = world.environment()
    missing = [variable for variable in end.header_env.values() if variable not in env]
    if end.kind != "request" or missing:
        return f"cannot end by {end.kind!r}; missing environment variables: {', '.join(missing) or 'none'}"
    headers = {name: env[variable] for name, variable in end.header_env.items()}
    try:
        reply = world.http(HttpRequest(end.method, end.url, headers, end.body.encode()))
    except NetworkError as exc:
        return str(exc)
    return "" if 200 <= reply.status < 300 else f"the provider responded with status {reply.status}"
