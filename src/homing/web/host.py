"""An app on a loopback socket, in a thread of its own, until it is told to end. Loads neither torch nor a model.

    listen(host, port) -> socket -> Server(app, socket, give_up) -> wait() ... end()

The main thread only waits, so that Ctrl-C and SIGTERM reach the verb as they reach every other. The socket listens
before the thread begins: whoever is told the address can use it at once.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

__all__ = ["Server", "hosts_for", "listen"]

# After everything under way was given up: a client that does not read what was written to it.
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
    """`give_up` ends what is being answered: a stream that is being written would hold the server open."""

    def __init__(self, app: ASGIApp, sock: socket.socket, give_up: Callable[[], None], name: str) -> None:
        config = uvicorn.Config(
            app, http="h11", ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_graceful_shutdown=_GRACE_S,
        )  # fmt: skip
        self._server, self._give_up, self._sock = uvicorn.Server(config), give_up, sock
        self.failure: BaseException | None = None
        # Not the thread's join: a Ctrl-C in the middle of one lets Python take the thread for ended, and the next join
        # returns at once, with streams still open.
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self) -> None:
        """Until it ends by itself, which only a failure does."""
        self._is_over.wait()
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        self._server.should_exit = True
        self._give_up()
        self._is_over.wait()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._sock])
        except BaseException as exc:  # told to whoever waits, in its own thread
            self.failure = exc
        finally:
            self._is_over.set()
