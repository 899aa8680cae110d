"""Runs a web app on a socket, in its own thread, until it is stopped. Loads neither torch nor a model.

    listen(host, port) -> socket -> Server(app, socket, give_up) -> wait() ... end()

The main thread only waits, so that Ctrl-C and SIGTERM work as in every other verb. The socket listens before the thread
starts, so the address can be used as soon as it is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import threading
from collections.abc import Callable
from typing import cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEADERS_S", "MOST_OPEN", "MOST_PER_CLIENT", "Server", "hosts_for", "listen"]

# Time limit for receiving a request's headers, in seconds. It starts at the request's first byte, or for the first
# request, when the client connects.
HEADERS_S = 10.0
# The maximum number of open connections. A browser needs a handful. Without a limit, a thousand connections that never
# finish their headers would use up all file descriptors, and the server could not respond to anyone.
MOST_PER_CLIENT = 128
MOST_OPEN = 256
_BACKLOG = 64  # number of connections that may arrive at once, before the server can close older ones to make room

# A shutdown cancels all responses, and then waits at most this many seconds for clients to read what was sent.
_GRACE_S = 5


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket on `port`, or on another port if `port` is taken.

    `host` is an address or a name of this machine.
    """
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
    """Return the host names to accept. For the unspecified address (0.0.0.0 or ::), it is `*`: any name."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            return ["*"]
    own = f"[{host}]" if ":" in host else host
    return ["127.0.0.1", "localhost", "[::1]", own]


class Server:
    """An app served by uvicorn in a thread.

    `give_up` cancels the responses in progress, because an open stream would block the shutdown.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, give_up: Callable[[], None], name: str) -> None:
        config = uvicorn.Config(
            app, http=_Connection, ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_graceful_shutdown=_GRACE_S, backlog=_BACKLOG,
        )  # fmt: skip
        self._server, self._give_up, self._sock = uvicorn.Server(config), give_up, sock
        self.failure: BaseException | None = None
        # Wait for an event instead of joining the thread. If Ctrl-C interrupts a join, Python considers the thread
        # ended, and the next join returns at once, while streams are still open.
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self) -> None:
        """Wait until the server stops, and raise its exception. Unless `end` is called, it stops only if it fails."""
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
        except BaseException as exc:  # store the exception, which wait() raises in the caller's thread
            self.failure = exc
        finally:
            self._is_over.set()


class _Connection(H11Protocol):
    """A client connection with a deadline for the headers of each request.

    If too many connections are open, the server closes the oldest one that has no request in progress. If all are busy,
    it closes the new one.
    """

    _deadline: asyncio.TimerHandle | None = None
    _opened_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened_at = self.loop.time()
        self._arm()
        others = [cast(_Connection, each) for each in self.connections]
        same = [each for each in others if each._host == self._host]
        for group, most in ((same, MOST_PER_CLIENT), (others, MOST_OPEN)):
            # Skip connections closed in this iteration of the event loop, because the set still contains them.
            open_ = [each for each in group if not each.transport.is_closing()]
            if len(open_) > most:
                waiting = [each for each in open_ if each._is_waiting and each is not self]
                (min(waiting, key=lambda each: each._opened_at) if waiting else self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_waiting:
            self._disarm()
        elif self._deadline is None:  # the data begins the next request on this connection
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    @property
    def _host(self) -> str | None:
        return self.client[0] if self.client else None

    @property
    def _is_waiting(self) -> bool:
        """True if no request is being handled, because the client sent none or its headers are incomplete."""
        return self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(HEADERS_S, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()
