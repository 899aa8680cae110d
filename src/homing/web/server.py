"""The app on a socket, in a thread of its own, until it is told to end.

    listen(host, port) -> socket -> with serving(...) as server: server.wait()

The main thread only waits, so that Ctrl-C and SIGTERM reach the verb as they reach every other. The socket listens
before the thread begins: whoever is told the address can use it at once.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from homing.web.app import make_app
from homing.web.openai import Defaults
from homing.web.voice import Voice
from homing.web.worker import Worker

__all__ = ["Server", "hosts_for", "listen", "serving"]

NUM_WAITING = 8
# After every text was given up: a client that does not read what was written to it.
_GRACE_S = 5


def listen(host: str, port: int) -> socket.socket:
    """Another port where this one is taken. `host` is an address, or a name of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(address)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
            made.bind((address[0], 0))
        made.listen()
    except BaseException:
        made.close()
        raise
    return made


def hosts_for(host: str) -> list[str]:
    """The names a request may call us by. An address that means all of them has no name to hold it to."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            return ["*"]
    own = f"[{host}]" if ":" in host else host
    return ["127.0.0.1", "localhost", "[::1]", own]


class Server:
    def __init__(self, app: ASGIApp, sock: socket.socket, worker: Worker) -> None:
        config = uvicorn.Config(
            app, http="h11", ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_graceful_shutdown=_GRACE_S,
        )  # fmt: skip
        self._server, self._worker, self._sock = uvicorn.Server(config), worker, sock
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="homing-serve", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it ends by itself, which only a failure does."""
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Texts first: a stream that is being written would hold the server open."""
        self._server.should_exit = True
        self._worker.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._sock])
        except BaseException as exc:  # told to whoever waits, in its own thread
            self.failure = exc


@contextlib.contextmanager
def serving(voice: Voice, sock: socket.socket, *, token: str, hosts: list[str], defaults: Defaults) -> Iterator[Server]:
    worker = Worker(num_waiting=NUM_WAITING)
    server = Server(make_app(voice, worker, token=token, hosts=hosts, defaults=defaults), sock, worker)
    try:
        yield server
    finally:
        server.end()
