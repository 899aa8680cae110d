"""Sends one line to a child process over its pipes and reads a one-line response, with limits on time and size."""

from __future__ import annotations

import os
import selectors
import subprocess
import time

__all__ = ["exchange"]

_PIECE_BYTES = 1 << 16


def exchange(child: subprocess.Popen[bytes], line: bytes, *, timeout_s: float, most_bytes: int) -> bytes:
    """Return the child's response to `line`, or b"" if the response is longer than one line or `most_bytes`.

    One deadline covers both directions, so a child that does not read, or never stops writing, times out like one that
    does nothing. Raises TimeoutError at the deadline, EOFError if the child exited, or OSError. The child's stdin must
    be non-blocking (`os.set_blocking`).
    """
    assert child.stdin is not None
    assert child.stdout is not None
    deadline, unsent, received = time.monotonic() + timeout_s, memoryview(line), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        if unsent:
            selector.register(child.stdin, selectors.EVENT_WRITE)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            for key, _ in selector.select(left_s):
                if key.fileobj is child.stdin:
                    unsent = unsent[os.write(child.stdin.fileno(), unsent[:_PIECE_BYTES]) :]
                    if not unsent:
                        selector.unregister(child.stdin)
                    continue
                piece = os.read(child.stdout.fileno(), _PIECE_BYTES)
                if not piece:
                    raise EOFError
                received += piece
            if len(received) > most_bytes or (received and unsent):
                return b""  # the response is too long, or arrived before the child had read the whole request
            if received.endswith(b"\n"):
                return bytes(received[:-1]) if received.count(b"\n") == 1 else b""
