"""What may reach a terminal: text, and no bytes that would move its cursor, change its title or hide a key.

    filtered()     for one command: stdout and stderr pass everything through `safe`, whoever prints
    safe(text)     control characters become a replacement character; newline and tab stay
    draw(...)      the one way past it, for the few escape sequences that are our own

Names, logs, samples and errors come from stores, models and providers, so nothing that is printed is trusted. JSON
documents are written as they are (JSON escapes control characters itself), and so is stdout that goes to a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from homing.redact import redact

__all__ = ["draw", "filtered", "safe", "show_bytes"]

# C0 and C1 but for newline and tab, delete, and the marks that let text run backwards; C1 also as lone bytes.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\udc80-\udc9f]")
_SHOWN = "\N{REPLACEMENT CHARACTER}"


def safe(text: str) -> str:
    return _CONTROL.sub(_SHOWN, text.replace("\r\n", "\n"))


@contextlib.contextmanager
def filtered() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Filtered(sys.stdout, is_exact=_is_file(sys.stdout)))
    sys.stderr = cast(TextIO, _Filtered(sys.stderr, is_exact=False))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def draw(text: str, stream: TextIO) -> None:
    """Writes it with its escape sequences. Whatever in it came from elsewhere went through `safe` before."""
    raw = stream.raw_stream if isinstance(stream, _Filtered) else stream
    raw.write(redact(text))
    raw.flush()


def show_bytes(data: bytes, stream: TextIO) -> None:
    """What a program printed, to a terminal as it comes: bytes that are no text stay, control characters do not."""
    # Bytes that are no UTF-8 become surrogates on the way; those of C1, which some terminals obey, are controls too.
    text = data.decode("utf-8", "surrogateescape")
    if not (isinstance(stream, _Filtered) and stream.is_exact):
        text = redact(safe(text))
    stream.buffer.write(text.encode("utf-8", "surrogateescape"))
    stream.buffer.flush()


class _Filtered:
    """A text stream as programs use one; what is not written here is the stream's own."""

    def __init__(self, stream: Any, *, is_exact: bool) -> None:
        self.raw_stream, self.is_exact = stream, is_exact

    def write(self, text: str) -> int:
        self.raw_stream.write(text if self.is_exact else redact(safe(text)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False
