"""A TCP proxy that cuts: it counts what goes up, and breaks the line at chosen bytes.

    with Proxy(port) as proxy:
        proxy.cut_up_after = [70_000, 5]   cut after this many bytes from the client, whichever connection carries them;
        proxy.cut_down_after = [1]         then after this many more
        proxy.answers = [b"HTTP/1.1 503 ..."]   said in place of the server to the next new connections
        proxy.waits_s = [2.0]              so long the next new connections wait before anything passes

One thread per direction; a cut is a reset, as a pulled cable would be seen.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from types import TracebackType

_PIECE = 65_536


class Proxy:
    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.cut_up_after: list[int] = []
        self.cut_down_after: list[int] = []
        self.answers: list[bytes] = []
        self.waits_s: list[float] = []
        self.bytes_up = 0
        self.cuts = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._is_over = False
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._is_over = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake who waits in accept
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for each in left:
            _reset(each)
        self._thread.join(5)

    def _accept(self) -> None:
        while not self._is_over:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            answer = self.answers.pop(0) if self.answers else None
            wait_s = self.waits_s.pop(0) if self.waits_s else 0.0
        time.sleep(wait_s)
        if answer is not None:
            self._say(client, answer)
            return
        try:
            server = socket.create_connection(("127.0.0.1", self.target_port))
        except OSError:
            _reset(client)
            return
        with self._lock:
            self._open |= {client, server}
        back = threading.Thread(target=self._pump, args=(server, client, False), daemon=True)
        back.start()
        self._pump(client, server, True)
        back.join(60)
        with self._lock:
            self._open -= {client, server}
        for each in (client, server):
            each.close()

    def _pump(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                allowed = self._allowed(len(piece), is_up)
                target.sendall(piece[:allowed])
                if allowed < len(piece):
                    _reset(source)
                    _reset(target)
                    return
            target.shutdown(socket.SHUT_WR)

    def _allowed(self, num_bytes: int, is_up: bool) -> int:
        """How many of these bytes may pass; fewer than all of them means that the line is cut there."""
        cuts = self.cut_up_after if is_up else self.cut_down_after
        with self._lock:
            allowed = num_bytes
            if cuts and cuts[0] < num_bytes:
                allowed = cuts.pop(0)
                self.cuts += 1
            elif cuts:
                cuts[0] -= num_bytes
            self.bytes_up += allowed if is_up else 0
        return allowed

    def _say(self, client: socket.socket, answer: bytes) -> None:
        """Takes what is asked, then answers: a server that closes at once would look like a cut."""
        with contextlib.suppress(OSError):
            client.settimeout(1.0)
            client.recv(_PIECE)
            client.sendall(answer)
            client.shutdown(socket.SHUT_WR)
            while client.recv(_PIECE):
                pass
        client.close()


def _reset(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        each.shutdown(socket.SHUT_RDWR)
    each.close()
