"""Compares two tokenizer.json files: do they give the same ids to the same text?

Weights only know the ids they learned. Compares what affects encoding: vocabulary, merges, normalizer and
pre-tokenizer, special tokens. Whitespace, key order, padding, the post-processor and the decoder may differ, because
they do not change the ids of a text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from homing.tokenizer_file import read_tokenizer_bytes

__all__ = ["gives_same_ids"]

_NO_IDS = ("version", "truncation", "padding", "post_processor", "decoder")


def gives_same_ids(one: Path, other: Path) -> bool:
    """Return True if both files encode text alike. Both must exist; an unparsable file only equals an exact copy."""
    first, second = read_tokenizer_bytes(one), read_tokenizer_bytes(other)
    if first == second:
        return True
    try:
        return bool(_what_tokenises(json.loads(first)) == _what_tokenises(json.loads(second)))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return False


def _what_tokenises(document: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in document.items() if name not in _NO_IDS}
    # Older writers join the two halves of a merge with a space.
    merges = [
        tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in found["model"].get("merges") or []
    ]
    found["model"] = {**_said(found["model"]), "merges": merges}
    found["added_tokens"] = sorted(
        (_said(token) for token in found.get("added_tokens") or []), key=lambda token: int(token["id"])
    )
    return _said(found)


def _said(values: dict[str, Any]) -> dict[str, Any]:
    """Drop null and false values: some writers write them, others omit them."""
    return {name: value for name, value in values.items() if value is not None and value is not False}
