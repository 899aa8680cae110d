"""The fake cloud of a rehearsal: a server in a separate process, its controls, and a clean shutdown."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from homing.cloud.providers.base import wait_until
from homing.cloud.providers.fake.cloud import KEY_HEADER
from homing.cloud.providers.fake.machines import machine_prefix
from homing.cloud.providers.fake.provider import SERVER
from homing.cloud.providers.process_tree import MACHINE_ENV
from homing.errors import HomingError
from homing.units import format_duration
from homing.world import HttpRequest, World

__all__ = ["ServedCloud"]

_START_S = 60.0  # for the server to answer
_LEAVE_S = 60.0


class ServedCloud:
    def __init__(self, folder: Path, world: World, *, seed: int, has_guard: bool) -> None:
        self._folder, self._world = folder, world
        self._pid = 0
        self._argv = [world.python(), "-m", "homing.cloud.providers.fake.server", "--home", str(folder)]
        self._argv += ["--seed", str(seed), *([] if has_guard else ["--no-guard"])]

    def serve(self) -> None:
        """Start the server, or restart it with its old state."""
        log = self._folder / "fake-server.log"
        self._pid = self._world.spawn(self._argv, self._world.environment(), self._folder, log)
        failed = HomingError(
            what="The fake cloud did not start.",
            why=f"It exited or did not answer within {format_duration(_START_S)}; see {log}",
            fix="Try again: homing rehearse RUN",
        )

        def answers() -> bool:
            if self._world.poll(self._pid) is not None:
                raise failed
            # The file of an earlier server does not count.
            return self._world.exists(self._folder / SERVER) and self._address()["pid"] == self._pid

        wait_until(answers, timeout_s=_START_S, every_s=0.05, world=self._world, on_timeout=failed)

    def kill(self) -> None:
        self._world.signal(self._pid, signal.SIGKILL)
        wait_until(lambda: self._world.poll(self._pid) is not None, timeout_s=10, every_s=0.05, world=self._world)

    def set_faults(self, body: dict[str, Any]) -> None:
        self._ask("PUT", "/double/faults", body)

    def post(self, what: str, body: dict[str, Any]) -> None:
        self._ask("POST", f"/double/{what}", body)

    def living(self) -> list[str]:
        bill = self._ask("GET", "/double/bill")["bill"]
        return [each["id"] for each in bill if each["until"] is None and each["kind"] == "instance"]

    def close(self) -> tuple[list[dict[str, Any]], float, list[int]]:
        """Return the bill, then end everything that is still alive, without faults, and stop the server."""
        if self._world.poll(self._pid) is not None:
            self.serve()
        said = self._ask("GET", "/double/bill")
        self.set_faults({})
        for each in said["bill"]:
            if each["until"] is None:
                self._ask("DELETE", f"/{each['kind']}s/{each['id']}")
        self.post("leave", {})
        if not wait_until(
            lambda: self._world.poll(self._pid) is not None, timeout_s=_LEAVE_S, every_s=0.05, world=self._world
        ):
            self.kill()
        prefix = machine_prefix(self._folder / "fake" / "machines")
        left = [process.pid for process, _ in self._world.marked(MACHINE_ENV, prefix)]
        return said["bill"], float(said["now"]), left

    def _address(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self._world.read(self._folder / SERVER))
        return body

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        address = self._address()
        data = b"" if body is None else json.dumps(body).encode()
        headers = {KEY_HEADER: address["api_key"]}
        reply = self._world.http(HttpRequest(method, address["url"] + path, headers, data))
        assert reply.status < 300, (method, path, reply)
        said: dict[str, Any] = json.loads(reply.body) if reply.body else {}
        return said
