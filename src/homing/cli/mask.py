"""Secrets out of what others wrote, before a page shows it: a log may hold what a program should not have printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homing.config.names import hide_secrets, looks_like_secret_key

__all__ = ["Mask"]

_HIDDEN = "***"
_MIN_LETTERS = 8  # shorter values are words, and would take ordinary text with them


class Mask:
    def __init__(self, environment: Mapping[str, str]) -> None:
        known = {value for name, value in environment.items() if looks_like_secret_key(name)}
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
