"""Refuse placeholders that the user forgot to replace, such as YOUR_BUCKET or <volume id>."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from homing.config.schema.value_types import Text, Texts

__all__ = ["Filled", "FilledList", "is_placeholder"]

# Upper case only, as documentation writes them: a real bucket may be called your-models.
_PLACEHOLDER = re.compile(r"\bYOUR[_-][A-Z0-9_-]*|<[^<>]*>|\bREPLACE_ME\b|\bCHANGE_?ME\b|\bTODO\b|\byourusername\b")


def is_placeholder(text: str) -> bool:
    return _PLACEHOLDER.search(text) is not None


def _filled(text: str) -> str:
    if is_placeholder(text):
        raise ValueError(f"{text!r} is a placeholder: replace it with your own value, or delete the line")
    return text


Filled = Annotated[Text, AfterValidator(_filled)]
FilledList = Annotated[Texts, AfterValidator(lambda texts: [_filled(text) for text in texts])]
