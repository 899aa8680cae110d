"""Do two files of the name tokenizer.json give the same ids to the same text? Weights know only the ids they learned.

Compared is what tokenises: vocabulary, merges, the cutting before them, the special tokens. White space, the order of
keys, padding, the template around a text and how ids are read back may differ: no id changes by them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from homing.tokenizer_file import read_tokenizer_bytes

__all__ = ["gives_same_ids"]

_NO_IDS = ("version", "truncation", "padding", "post_processor", "decoder")


def gives_same_ids(one: Path, other: Path) -> bool:
    """Both must be there; of a file that cannot be understood only an exact copy is the same."""
    mine, theirs = read_tokenizer_bytes(one), read_tokenizer_bytes(other)
    if mine == theirs:
        return True
    try:
        return bool(_what_tokenises(json.loads(mine)) == _what_tokenises(json.loads(theirs)))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return False


def _what_tokenises(document: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in document.items() if name not in _NO_IDS}
    # Older writers join the two halves of a merge by a space.
    merges = [
        tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in found["model"].get("merges") or []
    ]
    found["model"] = {**_said(found["model"]), "merges": merges}
    found["added_tokens"] = sorted(
        (_said(token) for token in found.get("added_tokens") or []), key=lambda token: int(token["id"])
    )
    return _said(found)


def _said(values: dict[str, Any]) -> dict[str, Any]:
    """Without what is off: one writer says so, another leaves it out."""
    return {name: value for name, value in values.items() if value is not None and value is not False}
