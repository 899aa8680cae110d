"""Sanitize terminal output: no control bytes that would move the cursor or change the title, and no secrets.

  filtered()     for one command: pass all of stdout and stderr through `safe`, whoever prints
  safe(text)     replace control characters; newline and tab stay
  draw(...)      the only way around it, for the few escape sequences of our own

Names, logs, samples and errors come from stores, models and providers, so printed text is never trusted. JSON documents
are written unchanged (JSON escapes control characters itself), and so is stdout to a file.
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

# C0 and C1 except newline and tab, delete, and bidirectional overrides; C1 also as lone bytes.
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
    """Write text with its escape sequences. External parts of it must have gone through `safe` before."""
    raw = stream.raw_stream if isinstance(stream, _Filtered) else stream
    raw.write(redact(text))
    raw.flush()


def show_bytes(data: bytes, stream: TextIO) -> None:
    """Write a program's output to a terminal: keep bytes that are not text, replace control characters."""
    # Bytes that are not UTF-8 become surrogates here; those in C1, which some terminals obey, count as control
    # characters.
    text = data.decode("utf-8", "surrogateescape")
    if not (isinstance(stream, _Filtered) and stream.is_exact):
        text = redact(safe(text))
    stream.buffer.write(text.encode("utf-8", "surrogateescape"))
    stream.buffer.flush()


class _Filtered:
    """A text stream that filters `write`; everything else is delegated to the wrapped stream."""

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
