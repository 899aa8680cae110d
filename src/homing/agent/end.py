"""How billing ends, the same for the agent and the dead-man: one command or one request, as boot.json says."""

from __future__ import annotations

import math
import os
import signal
from typing import Callable

from homing.wire import names
from homing.wire.boot import Boot
from homing.world import HttpRequest, NetworkError, World

END_TRY_S = 60.0
UNKILLABLE_S = 15.0


def wait(world: World, pid: int, is_over: Callable[[], bool], tick: Callable[[], None]) -> int:
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


def try_to_end(boot: Boot, world: World, log_path: str, tick: Callable[[], None]) -> str:
    """Why it failed, or "". Only 2xx is a yes: while this runs, "not found" cannot be true of its machine."""
    end, env = boot.end_billing, world.environment()
    if end.kind == "command":
        until = world.monotonic() + END_TRY_S
        pid = world.spawn(end.argv, env, boot.work_dir, log_path)
        code = wait(world, pid, lambda: world.monotonic() > until, tick)
        return f"the command ended with exit code {code} (logs/agent.log)" if code else ""
    missing = [variable for variable in end.header_env.values() if variable not in env]
    if end.kind != "request" or missing:
        return f"cannot end by {end.kind!r}; not set in the environment: {', '.join(missing) or 'nothing'}"
    headers = {name: env[variable] for name, variable in end.header_env.items()}
    try:
        reply = world.http(HttpRequest(end.method, end.url, headers, end.body.encode()))
    except NetworkError as exc:
        return str(exc)
    return "" if 200 <= reply.status < 300 else f"the provider answered {reply.status}"


def note_end(boot: Boot, world: World) -> None:
    """For the other of the two: what ends billing was accepted, so nothing is to be started here any more."""
    world.write(os.path.join(boot.work_dir, names.BILLING_ENDED), str(world.now()).encode())
