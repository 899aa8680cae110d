"""RunPod on a loopback port, with pods that really run: each is a Machine, started by the args of its create call.

    with RunpodServer(folder) as runpod:  runpod.url, runpod.double, runpod.machine(pod_id)
    python -m tests.doubles.runpod_server FOLDER     as a process: FOLDER/server.json says where; it ends at SIGTERM

A container whose first process ended is started again, as RunPod does it, with an empty disk. The log stream stays open
until its reader goes.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
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
from tests.doubles.runpod import RunpodDouble

from homing.cloud.providers.fake_faults import Faults
from homing.cloud.providers.fake_things import Settings
from homing.cloud.providers.runpod import KEY_ENV, URL_ENV
from homing.world import HttpRequest, NetworkError, World

KEY = "rpa_canary-key-of-the-account"
SERVER = "server.json"
_TICK_S = 0.2
_STREAM_S = 20.0


class RealPods:
    """Pods as machines on this computer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines: dict[str, Machine] = {}
        self.restarts: dict[str, int] = {}
        self.restarts_ended = True

    def start(self, instance_id: str, files: dict[str, bytes], argv: list[str], env: dict[str, str]) -> None:
        machine = Machine(self.folder / instance_id, _script(argv), env=env, kind="container", name=instance_id)
        cards = "".join(f"echo '{env['RUNPOD_GPU_NAME']}, 580.65.06'\n" for _ in range(int(env["RUNPOD_GPU_COUNT"])))
        machine._program("nvidia-smi", cards)  # as the driver would show what was rented
        self.machines[instance_id] = machine
        machine.start()

    def end(self, instance_id: str) -> None:
        if instance_id in self.machines:
            self.machines.pop(instance_id).close()

    def is_running(self, instance_id: str) -> bool:
        return instance_id in self.machines and self.machines[instance_id].is_running

    def notice(self, instance_id: str, seconds: float) -> None:
        raise AssertionError("RunPod gives no notice")

    def freeze(self, instance_id: str) -> None:
        raise AssertionError("a hung pod is a matter for the simulator")

    def log(self, instance_id: str) -> str:
        return self.machines[instance_id].log() if instance_id in self.machines else ""

    def address(self, instance_id: str) -> tuple[str, str, int] | None:
        machine = self.machines.get(instance_id)
        return None if machine is None else (machine.user, "127.0.0.1", machine.port)

    def look_after(self) -> None:
        for instance_id, machine in list(self.machines.items()):
            if self.restarts_ended and not machine.is_running:
                self.restarts[instance_id] = self.restarts.get(instance_id, 0) + 1
                machine.restart(is_wiped=True)


class RunpodServer:
    def __init__(self, folder: Path, *, faults: Faults | None = None, seed: int = 0) -> None:
        self.pods = RealPods(folder)
        self.double = RunpodDouble(
            now=time.time,
            machines=self.pods,
            api_key=KEY,
            faults=faults,
            settings=Settings(has_guard=False, boot_s=0.5, retention_s=0.0),
            seed=seed,
        )
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                server.answer(self)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _answer

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
        return f"http://127.0.0.1:{self._http.server_address[1]}/v2"

    @property
    def env(self) -> Mapping[str, str]:
        """Of whoever rents there."""
        return {URL_ENV: self.url, KEY_ENV: KEY}

    def machine(self, pod_id: str) -> Machine:
        return self.pods.machines[pod_id]

    def lose(self, pod_id: str, how: str = "gone") -> None:
        """The host dies, without a word to anybody."""
        with self._lock:
            self.pods.end(pod_id)
            self.double.lose(pod_id, how)

    def __enter__(self) -> RunpodServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join(20)
        for pod_id in list(self.pods.machines):
            self.pods.end(pod_id)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        request = HttpRequest(handler.command, f"http://runpod{handler.path}", headers, body)
        try:
            with self._lock:
                reply = self.double.handle(request)
        except NetworkError:
            handler.close_connection = True
            return
        except Unlike:
            handler.send_error(500)  # it is in `violations`, and the test looks there
            return
        is_stream = reply.headers.get("content-type") == "text/event-stream"
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        if is_stream:
            handler.send_header("connection", "close")
        else:
            handler.send_header("content-length", str(len(reply.body)))
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(reply.body)
            handler.wfile.flush()
        if is_stream:
            self._is_over.wait(_STREAM_S)
            handler.close_connection = True

    def _tick(self) -> None:
        while not self._is_over.wait(_TICK_S):
            with self._lock:
                self.double.tick()
                self.pods.look_after()


def main() -> int:
    folder = Path(sys.argv[1])
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with RunpodServer(folder / "pods") as server:
        World().write(folder / SERVER, json.dumps(dict(server.env)).encode())
        over.wait()
    return 0 if not server.double.violations else 1


def _script(argv: list[str]) -> str:
    """What `bash -c '... echo PACKED | base64 -d | gzip -d ...'` would run."""
    packed = argv[2].split("echo ")[1].split(" |")[0]
    return gzip.decompress(base64.b64decode(packed)).decode()


if __name__ == "__main__":
    raise SystemExit(main())
