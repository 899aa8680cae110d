"""One question to a child process over its pipes, and the one line that it answers: bounded in time and in size."""

from __future__ import annotations

import os
import selectors
import subprocess
import time

__all__ = ["exchange"]

_PIECE_BYTES = 1 << 16


def exchange(child: subprocess.Popen[bytes], line: bytes, *, timeout_s: float, most_bytes: int) -> bytes:
    """What it says to `line`; b"" where it says more than a line, or too much.

    One deadline for both ways: a child that does not read, or never stops writing, is late like one that does nothing.
    Raises TimeoutError, EOFError where it ended, or OSError. Its stdin must not block (`os.set_blocking`).
    """
    assert child.stdin is not None
    assert child.stdout is not None
    deadline, unsent, heard = time.monotonic() + timeout_s, memoryview(line), bytearray()
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
                heard += piece
            if len(heard) > most_bytes or (heard and unsent):
                return b""  # an answer to a question that it has not heard is none
            if heard.endswith(b"\n"):
                return bytes(heard[:-1]) if heard.count(b"\n") == 1 else b""
