"""Serves a model on a socket until stopped: listen(host, port) -> with serving(...) as server: server.wait()."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from homing.web.app import make_app
from homing.web.loopback_server import Server, hosts_for, listen
from homing.web.model_session import GenerationSession
from homing.web.openai_format import Defaults
from homing.web.worker import Worker

__all__ = ["Server", "hosts_for", "listen", "serving"]

NUM_WAITING = 8


@contextlib.contextmanager
def serving(
    session: GenerationSession, sock: socket.socket, *, token: str, hosts: list[str], defaults: Defaults
) -> Iterator[Server]:
    worker = Worker(num_waiting=NUM_WAITING)
    app = make_app(session, worker, token=token, hosts=hosts, defaults=defaults)
    server = Server(app, sock, worker.close, "homing-serve")
    try:
        yield server
    finally:
        server.end()
