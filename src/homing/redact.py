"""Hides API keys, tokens and passwords in text that is about to be printed or logged. Must run on Python 3.8.

    redact(text)       replaces every secret value of this process, and passwords in URLs, with ***
    register(value)    adds a secret that is in no environment variable, such as a key read from a file
    RedactedFormatter  does the same for a log: messages and tracebacks
    redact_crashes()   does the same for uncaught exceptions
    hide_secrets(text) replaces everything that looks like a secret, even if it is not one of ours

The environment is searched on every call, because loading a .env file or starting the agent may add new secrets.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from types import TracebackType
from typing import Dict, List, Mapping, Optional, Set, Type

__all__ = [
    "RedactedFormatter",
    "hide_secrets",
    "looks_like_secret_key",
    "looks_like_secret_value",
    "redact",
    "redact_crashes",
    "register",
]

HIDDEN = "***"
MIN_LETTERS = 8  # shorter values are often ordinary words, and replacing them would damage other text
_NAME = re.compile(
    r"(?i)((^|_)(api_?)?(key|token|secret|password|passwd|credentials?)|access_key(_id)?|token_(id|secret))$"
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_SECRET_KEY = re.compile(
    r"(api_?key|secret|passw(or)?d|credential|access_key|private_key|bearer|(hf|hub|api|auth|access|session|wandb)_?token"
    r"|^token$|^auth$)"
)
_SECRET_VALUE = re.compile(
    r"(\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bA[KS]IA[0-9A-Z]{12,}|\brpa_[A-Za-z0-9]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\ba[ks]-[A-Za-z0-9]{20,}"
    # Match up to the END line, even across lines, or to the end of the text if the key is truncated.
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?s:.*?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)))"
)
_registered: Set[str] = set()
_known: Dict[str, bool] = {}  # variable name -> whether it holds a secret


def register(value: str) -> str:
    """Register a secret and return it, so that a caller can register a value while passing it on."""
    if len(value) >= MIN_LETTERS:
        _registered.add(value)
    return value


def redact(text: str, environment: Optional[Mapping[str, str]] = None) -> str:
    for secret in _secrets(os.environ if environment is None else environment):
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return _IN_ADDRESS.sub(HIDDEN, text) if "://" in text else text


def redact_crashes() -> None:
    """Redact the tracebacks of uncaught exceptions from now on."""

    def show(kind: Type[BaseException], value: BaseException, trace: Optional[TracebackType]) -> None:
        sys.stderr.write(redact("".join(traceback.format_exception(kind, value, trace))))

    sys.excepthook = show


class RedactedFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def looks_like_secret_key(name: str) -> bool:
    return name.replace("-", "_") != "tokens" and bool(_SECRET_KEY.search(name.lower().replace("-", "_")))


def looks_like_secret_value(value: object) -> bool:
    return isinstance(value, str) and bool(_SECRET_VALUE.search(value))


def hide_secrets(text: str, hidden: str) -> str:
    """Replace everything that looks like a secret with `hidden`."""
    return _SECRET_VALUE.sub(hidden, text)


def _secrets(environment: Mapping[str, str]) -> List[str]:
    """Return all secret values, and each line of multi-line values; longest first, as one may contain another."""
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
    """Return True if the value is the path of a key file, because a path is not a secret."""
    return value.startswith(("/", "~/", "./")) and os.path.exists(os.path.expanduser(value))
