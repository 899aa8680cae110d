"""Secrets out of what others wrote, before a page shows it: a log may hold what a program should not have printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from homing.config.names import hide_secrets, looks_like_secret_key

__all__ = ["MOST_KEY_LINES", "Mask", "MaskLines"]

MOST_KEY_LINES = 200  # of a private key, whose end may never come; the longest that people make has fewer
_HIDDEN = "***"
_MIN_LETTERS = 8  # shorter values are words, and would take ordinary text with them
_BEGIN, _END, _KEY = "-----BEGIN ", "-----END ", "PRIVATE KEY"


class Mask:
    def __init__(self, environment: Mapping[str, str]) -> None:
        values = [value for name, value in environment.items() if _is_secret(name)]
        # One of several lines is a secret line by line too, for so a log is shown.
        known = {part.strip() for value in values for part in (value, *value.splitlines())}
        # The longest first: one may be a part of another.
        self._known = sorted((value for value in known if len(value) >= _MIN_LETTERS), key=len, reverse=True)

    def __call__(self, value: Any) -> Any:
        """The same, with the values of this computer's secrets, and all that has the form of one, made unreadable."""
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
    """The lines of one log as they come: a private key has many, and its end may come with a later look."""

    def __init__(self, mask: Mask) -> None:
        self._mask, self._num_left = mask, 0  # lines of a key that may still come

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
    # In a run file `pad_token` and its like are words; in an environment they are not.
    return looks_like_secret_key(name) or name.lower().endswith("_token")


def _marks(line: str, which: str) -> bool:
    return _KEY in line.partition(which)[2]
