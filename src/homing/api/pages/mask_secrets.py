"""Mask secrets in text from other programs, such as logs, before a page shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from homing.redact import hide_secrets, looks_like_secret_key

__all__ = ["MOST_KEY_LINES", "Mask", "MaskLines"]

MOST_KEY_LINES = 200  # number of lines to mask if the end of a private key is missing; most keys are shorter
_HIDDEN = "***"
_MIN_LETTERS = 8  # shorter values are ordinary words, and masking them would damage normal text
_BEGIN, _END, _KEY = "-----BEGIN ", "-----END ", "PRIVATE KEY"


class Mask:
    def __init__(self, environment: Mapping[str, str]) -> None:
        values = [value for name, value in environment.items() if _is_secret(name)]
        # Each line of a multi-line secret is secret too, because a log is shown line by line.
        known = {part.strip() for value in values for part in (value, *value.splitlines())}
        # Longest first: one secret may be part of another.
        self._known = sorted((value for value in known if len(value) >= _MIN_LETTERS), key=len, reverse=True)

    def __call__(self, value: Any) -> Any:
        """Return the value with secrets masked: those of this computer, and everything that looks like a secret."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {key: self(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(each) for each in value]
        return value

    def _text(self, text: str) -> str:
        for secret in self._known:
            text = text.replace(secret, _HIDDEN)
        return hide_secrets(text, _HIDDEN)


class MaskLines:
    """Masks secrets in the lines of one log as they are read. A private key may span several reads."""

    def __init__(self, mask: Mask) -> None:
        self._mask, self._num_left = mask, 0  # number of lines of a private key still to mask

    def __call__(self, lines: Sequence[str]) -> list[str]:
        return [self._line(line) for line in lines]

    def _line(self, line: str) -> str:
        if self._num_left:
            self._num_left = 0 if _marks(line, _END) else self._num_left - 1
            return _HIDDEN
        if _marks(line, _BEGIN) and not _marks(line, _END):
            self._num_left = MOST_KEY_LINES
        return str(self._mask(line))


def _is_secret(name: str) -> bool:
    # In a run file, `pad_token` and similar keys are not secrets; an environment variable named *_token is one.
    return looks_like_secret_key(name) or name.lower().endswith("_token")


def _marks(line: str, which: str) -> bool:
    return _KEY in line.partition(which)[2]
