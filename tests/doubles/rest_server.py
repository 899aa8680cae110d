"""A double of a REST cloud on a loopback port: its state is asked under a lock, and time passes for it.

with SomeServer(folder) as server:   server.url, server.env, server.machine(id), server.violations
serve_as_process(SomeServer)         FOLDER/server.json is the environment of whoever rents; it ends at SIGTERM
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol, Self

from tests.doubles.machine import Machine
from tests.doubles.openapi import Unlike

from homing.world import HttpRequest, HttpResponse, NetworkError, World

SERVER = "server.json"
_TICK_S = 0.2
_STREAM_S = 20.0


class Double(Protocol):
    def handle(self, request: HttpRequest) -> HttpResponse: ...

    def tick(self) -> None: ...


class RestServer:
    """A subclass names its double, its machines by id, and the variables that lead to it."""

    root = "/v1"  # of all paths
    machines_by_id: dict[str, Machine]

    def __init__(self, double: Double, env: Callable[[str], Mapping[str, str]]) -> None:
        self._double, self._env = double, env
        self.violations: list[str] = []  # what the published document does not have
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
        return f"http://127.0.0.1:{self._http.server_address[1]}{self.root}"

    @property
    def env(self) -> Mapping[str, str]:
        """Of whoever rents there."""
        return self._env(self.url)

    def machine(self, instance_id: str) -> Machine:
        return self.machines_by_id[instance_id]

    def look_after(self) -> None:
        """What the cloud does for machines that live there, now and then."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join(20)
        for machine in self.machines_by_id.values():
            machine.close()
        self.machines_by_id.clear()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        request = HttpRequest(handler.command, f"http://double{handler.path}", headers, body)
        try:
            with self._lock:
                reply = self._double.handle(request)
        except NetworkError:
            handler.close_connection = True  # the line is cut: no answer, not even a bad one
            return
        except Unlike as exc:
            self.violations.append(str(exc))
            handler.close_connection = True
            handler.send_error(500)
            return
        with contextlib.suppress(OSError):  # who asked may have been killed meanwhile
            self._send(handler, reply)

    def _send(self, handler: BaseHTTPRequestHandler, reply: HttpResponse) -> None:
        is_stream = reply.headers.get("content-type") == "text/event-stream"
        end = {"connection": "close"} if is_stream else {"content-length": str(len(reply.body))}
        handler.send_response_only(reply.status)  # without the Date of this computer: a double may send its own
        for name, value in {**reply.headers, **end}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(reply.body)
        handler.wfile.flush()
        if is_stream:  # stays open until its reader goes
            self._is_over.wait(_STREAM_S)
            handler.close_connection = True

    def _tick(self) -> None:
        while not self._is_over.wait(_TICK_S):
            with self._lock:
                self._double.tick()
                self.look_after()


def serve_as_process(make: Callable[[Path], RestServer]) -> int:
    folder = Path(sys.argv[1])
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with make(folder / "machines") as server:
        World().write(folder / SERVER, json.dumps(dict(server.env)).encode())
        over.wait()
    return 0 if not server.violations else 1
