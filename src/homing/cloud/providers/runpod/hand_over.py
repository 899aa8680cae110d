"""Starts a new pod: waits until SSH works, sends its files, and checks that the pod can terminate itself.

    PROVISIONING -> STARTING -> RUNNING -> an address for port 22 -> our sshd -> files and secrets -> final check

On a bad host, a pod may get stuck at any of these stages. Every wait has a deadline. If a deadline passes, the error
says which stage the pod was in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from homing.cloud.machine_setup import startup_script
from homing.cloud.providers.base import Connection, Instance, Request, wait_until
from homing.cloud.providers.runpod.create_request import MAY_END
from homing.cloud.providers.ssh.connection import ssh_argv
from homing.errors import CreateFailed, StartTimeout
from homing.units import format_duration
from homing.world import World

__all__ = ["EVERY_S", "Start"]

log = logging.getLogger(__name__)
EVERY_S = 3.0
_RIGHT_S = 60.0  # how long the pod may take to check whether its own key can terminate it
_ASK_S = 30.0

Pod = dict[str, Any]


class Start:
    def __init__(self, request: Request, instance_id: str, limit_s: float, world: World, page: str) -> None:
        self.request, self.id, self.limit_s, self.page = request, instance_id, limit_s, page
        self._world = world
        self._until = world.monotonic() + limit_s
        self._money_until = world.monotonic() + request.order.start_within_s
        self._run = request.order.run_name

    def reach(self, find: Callable[[], Pod | None], read: Callable[[Pod], Instance]) -> Pod:
        """Wait until the pod has an address, and return it. Immediately raise errors that waiting cannot fix."""
        found: list[Pod | None] = [None]

        def is_reached() -> bool:
            found[0] = find()
            self._check(None if found[0] is None else read(found[0]))
            return found[0] is not None and found[0]["ssh"]["direct"] is not None

        by = self.request.order.start_by
        if not wait_until(is_reached, timeout_s=self.limit_s, every_s=EVERY_S, world=self._world, by=by):
            raise self._unreached(found[0])
        assert found[0] is not None
        return found[0]

    def hand_over(self, connection: Connection) -> None:
        left_s = max(1.0, self._until - self._world.monotonic())
        startup_script.hand_over(connection, self.request, world=self._world, timeout_s=left_s)

    def check_right(self, connection: Connection, *, must_end_itself: bool) -> None:
        """Check that the pod can terminate itself; raise CreateFailed if it cannot and `must_end_itself` is set.

        A pod that cannot query itself through any API cannot terminate itself either, and RunPod has no guard.
        """
        known_hosts = Path(self.request.order.files[0].source).with_name("known_hosts")  # hand_over wrote this file
        to = f"{connection.user}@{connection.host}"
        argv = [*ssh_argv(connection, known_hosts), "-T", "-oBatchMode=yes", to, f"cat {MAY_END}"]
        said = [""]
        right_s = min(_RIGHT_S, max(1.0, self._money_until - self._world.monotonic()))

        def has_said() -> bool:
            said[0] = (self._world.run(argv, min(_ASK_S, right_s)).out.strip().splitlines() or [""])[-1]
            return bool(said[0])

        by = self.request.order.start_by
        wait_until(has_said, timeout_s=right_s, every_s=EVERY_S, world=self._world, by=by)
        answer, _, way = said[0].partition(": ")
        if answer == "yes":
            log.info("%s can terminate itself via %s.", self.request.mark, way)
            if way != "REST v2":
                log.warning(
                    "%s can terminate itself only via %s: its key may not use REST v2. "
                    "RunPod retires GraphQL in early 2027.",
                    self.request.mark, way,
                )  # fmt: skip
            return
        mark, silence = self.request.mark, f"no answer within {format_duration(right_s)}"
        why = f"With the pod's own key, RunPod answered: {said[0] or silence}"
        if must_end_itself:
            raise CreateFailed(
                what=f"{mark} cannot terminate itself, so its agent and dead-man timer cannot enforce the limit.",
                why=why,
                fix="Use another provider, or keep `homing guard` running and set cloud.runpod.must_end_itself: false",
                instance_id=self.id,
            )
        log.warning("%s cannot terminate itself; only the local guard can terminate it. %s", mark, why)

    # --- helpers, in the order they are called ---

    def _check(self, instance: Instance | None) -> None:
        offered = self.request.offer.rate_usd_per_hour
        if instance is None:
            raise StartTimeout(
                what=f"{self.id} disappeared before SSH came up.",
                why="RunPod no longer lists the pod: someone deleted it, or its host failed.",
                fix=f"Try again: {self.request.order.words.to('launch')}",
            )
        if not instance.is_running:
            raise StartTimeout(
                what=f"{self.id} stopped before SSH came up.",
                why=f"RunPod reports: {instance.detail}.",
                fix=f"Find the reason: homing logs {self._run}   or look at {self.page}",
            )
        if instance.rate_usd_per_hour > offered:
            raise CreateFailed(
                what=f"runpod started {self.id} at ${instance.rate_usd_per_hour}/h, but the offer was ${offered}/h.",
                fix=f"See current offers: {self.request.order.words.to('plan')}",
                instance_id=self.id,
            )

    def _unreached(self, pod: Pod | None) -> StartTimeout:
        status = str(pod["status"]) if pod is not None else "gone"
        why = f"Its state is {status}: the host is faulty, or the image is too large or cannot be pulled."
        if status == "RUNNING":
            why = "Its state is RUNNING, but it has no public address for port 22. Some community hosts have none."
        longer = "or wait longer: cloud.runpod.start_limit: 30m"
        if self.limit_s == self.request.order.start_within_s:
            longer = "or raise --spend-limit, which left no more time to start and train"
        return StartTimeout(
            what=f"{self.id} was not reachable within {format_duration(self.limit_s)}.",
            why=why,
            fix=f"Try again, or set cloud.runpod.cloud: secure   {longer}   The pod's page: {self.page}",
        )
