"""An app on a loopback socket, in a thread of its own, until it is told to end. Loads neither torch nor a model.

    listen(host, port) -> socket -> Server(app, socket, give_up) -> wait() ... end()

The main thread only waits, so that Ctrl-C and SIGTERM reach the verb as they reach every other. The socket listens
before the thread begins: whoever is told the address can use it at once.
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

HEADERS_S = 10.0  # from its first byte, or from the connection, until a request's headers are complete
# Open connections. A browser needs a handful; without a bound, a thousand that never finish their headers take all the
# files that a process may have open, and nobody is answered any more.
MOST_PER_CLIENT = 128
MOST_OPEN = 256
_BACKLOG = 64  # that are taken at once, before the oldest can be closed for them

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
            app, http=_Connection, ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_graceful_shutdown=_GRACE_S, backlog=_BACKLOG,
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


class _Connection(H11Protocol):
    """One client's connection, which has a deadline for the headers of each request. Where too many are open, the one
    that has waited longest without a request is closed for the next; where all are being answered, that one is."""

    _deadline: asyncio.TimerHandle | None = None
    _opened_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened_at = self.loop.time()
        self._arm()
        others = [cast(_Connection, each) for each in self.connections]
        same = [each for each in others if each._host == self._host]
        for group, most in ((same, MOST_PER_CLIENT), (others, MOST_OPEN)):
            # Those that were closed in this turn of the loop are still in the set.
            open_ = [each for each in group if not each.transport.is_closing()]
            if len(open_) > most:
                waiting = [each for each in open_ if each._is_waiting and each is not self]
                (min(waiting, key=lambda each: each._opened_at) if waiting else self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_waiting:
            self._disarm()
        elif self._deadline is None:  # the first bytes of the next request on this connection
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    @property
    def _host(self) -> str | None:
        return self.client[0] if self.client else None

    @property
    def _is_waiting(self) -> bool:
        """No request of its is being read or answered: its headers are not complete, or it has sent nothing."""
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
