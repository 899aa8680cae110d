"""Hides API keys, tokens and passwords in text that is about to be printed or logged. Standard library, Python 3.8.

    redact(text)       with *** in the place of every secret value of this process, and of passwords in addresses
    register(value)    a secret that is in no variable, such as a key that was read from a file
    RedactedFormatter  the same for a log: messages and tracebacks
    redact_crashes()   the same for an exception that nobody caught

Values are looked up each time: a .env file, or the agent's start, may bring new ones.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from types import TracebackType
from typing import Dict, List, Mapping, Optional, Set, Type

__all__ = ["RedactedFormatter", "redact", "redact_crashes", "register"]

HIDDEN = "***"
MIN_LETTERS = 8  # shorter values are words, and would take ordinary text with them
_NAME = re.compile(
    r"(?i)((^|_)(api_?)?(key|token|secret|password|passwd|credentials?)|access_key(_id)?|token_(id|secret))$"
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_registered: Set[str] = set()
_known: Dict[str, bool] = {}  # name of a variable -> whether it holds a secret


def register(value: str) -> str:
    """Returns it, so that a caller can register what it hands on."""
    if len(value) >= MIN_LETTERS:
        _registered.add(value)
    return value


def redact(text: str, environment: Optional[Mapping[str, str]] = None) -> str:
    for secret in _secrets(os.environ if environment is None else environment):
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return _IN_ADDRESS.sub(HIDDEN, text) if "://" in text else text


def redact_crashes() -> None:
    """From here on the traceback of an exception that nobody caught is redacted too."""

    def show(kind: Type[BaseException], value: BaseException, trace: Optional[TracebackType]) -> None:
        sys.stderr.write(redact("".join(traceback.format_exception(kind, value, trace))))

    sys.excepthook = show


class RedactedFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def _secrets(environment: Mapping[str, str]) -> List[str]:
    """The longest first: one may be a part of another. One of several lines is a secret line by line too."""
    found = set(_registered)
    for name, value in environment.items():
        if len(value) >= MIN_LETTERS and _is_secret(name) and not _is_path(value):
            found.update(part for part in (value, *value.splitlines()) if len(part.strip()) >= MIN_LETTERS)
    return sorted(found, key=len, reverse=True)


def _is_secret(name: str) -> bool:
    if name not in _known:
        _known[name] = bool(_NAME.search(name))
    return _known[name]


def _is_path(value: str) -> bool:
    """Some programs want the file that holds a key: its place is no secret."""
    return value.startswith(("/", "~/", "./")) and os.path.exists(os.path.expanduser(value))
