"""Shadeform on a loopback port, with machines that really run: each boots by the startup script of its create call.

    with ShadeformServer(folder) as shadeform:  shadeform.url, shadeform.cloud, shadeform.machine(instance_id)

`ahead_s` sets its clock forward, so that a date comes without being waited for.

    python -m tests.doubles.shadeform_server FOLDER    as a process of its own; FOLDER/server.json is its environment
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.doubles.machine import Machine
from tests.doubles.openapi import Unlike
from tests.doubles.shadeform import KEY, Settings, ShadeformCloud

from homing.cloud.providers.fake_faults import Faults
from homing.cloud.providers.shadeform import KEY_ENV, URL_ENV
from homing.world import HttpRequest, NetworkError, World

SERVER = "server.json"
_TICK_S = 0.2


class RealMachines:
    """Virtual machines as process trees on this computer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines: dict[str, Machine] = {}
        self.card = "A6000"  # what the driver of each shows

    def boot(self, instance_id: str, script: str) -> None:
        machine = Machine(self.folder / instance_id, script, kind="vm", name=instance_id)
        machine._program("nvidia-smi", f"echo 'NVIDIA {self.card}, 580.65.06'\n")
        self.machines[instance_id] = machine
        machine.start()

    def end(self, instance_id: str) -> None:
        if instance_id in self.machines:
            self.machines.pop(instance_id).close()

    def freeze(self, instance_id: str) -> None:
        raise AssertionError("a machine that hangs is a matter for the simulator")

    def address(self, instance_id: str) -> tuple[str, int, str]:
        machine = self.machines[instance_id]
        return "127.0.0.1", machine.port, machine.user


class ShadeformServer:
    def __init__(self, folder: Path, *, settings: Settings | None = None, faults: Faults | None = None) -> None:
        self.ahead_s = 0.0
        self.unlike: list[str] = []  # what the published document does not have
        self.machines = RealMachines(folder)
        self.cloud = ShadeformCloud(
            now=lambda: time.time() + self.ahead_s,
            machines=self.machines,
            settings=settings or Settings(boot_s=0.5, delete_s=0.5),
            faults=faults,
        )
        self._turn = threading.Lock()
        self._is_over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                server.answer(self)

            do_GET = do_POST = _answer

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._threads = [
            threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True),
            threading.Thread(target=self._tick, daemon=True),
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @property
    def env(self) -> Mapping[str, str]:
        """Of whoever rents there."""
        return {URL_ENV: self.url, KEY_ENV: KEY}

    def machine(self, instance_id: str) -> Machine:
        return self.machines.machines[instance_id]

    def take(self, instance_id: str) -> None:
        """A spot machine is wanted back: gone at once, without a word to it."""
        with self._turn:
            self.cloud.preempt(instance_id)

    def __enter__(self) -> ShadeformServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join(20)
        for instance_id in list(self.machines.machines):
            self.machines.end(instance_id)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        request = HttpRequest(handler.command, f"http://shadeform{handler.path}", dict(handler.headers.items()), body)
        try:
            with self._turn:
                reply = self.cloud.handle(request)
        except NetworkError:
            return  # the line is cut: no answer, not even a bad one
        except Unlike as exc:
            self.unlike.append(str(exc))
            handler.send_error(500)
            return
        handler.send_response_only(reply.status)  # without a Date of this computer: the double tells its own
        for name, value in {**reply.headers, "content-length": str(len(reply.body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        with contextlib.suppress(OSError):  # who asked may have been killed meanwhile
            handler.wfile.write(reply.body)

    def _tick(self) -> None:
        while not self._is_over.wait(_TICK_S):
            with self._turn:
                self.cloud.tick()


def main() -> int:
    folder = Path(sys.argv[1])
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with ShadeformServer(folder / "machines") as server:
        World().write(folder / SERVER, json.dumps(dict(server.env)).encode())
        over.wait()
    return 0 if not server.unlike else 1


if __name__ == "__main__":
    raise SystemExit(main())
