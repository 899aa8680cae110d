"""Reads tokenizer.json files, and checks whether two of them encode any text to the same ids.

The size is checked before parsing, because a parsed file takes five times as much memory as its text. Weights are
trained on one set of ids, so the comparison covers everything that affects encoding: vocabulary, merges, normalizer,
pre-tokenizer and special tokens. Whitespace, key order, padding, the post-processor and the decoder may differ, because
they do not change the ids of a text.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from homing.errors import DataError

__all__ = ["MAX_TOKENIZER_BYTES", "gives_same_ids", "read_tokenizer_bytes"]


MAX_TOKENIZER_BYTES = 128 << 20  # the largest tokenizer.json of a known open model is 35 MB


def read_tokenizer_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the file's bytes. Raise DataError if the file is too large, or OSError if it cannot be read."""
    with open(path, "rb") as file:
        data = file.read(MAX_TOKENIZER_BYTES + 1)
        if len(data) > MAX_TOKENIZER_BYTES:
            raise DataError(
                what=f"{os.fspath(path)} is too large for a tokenizer.",
                why=f"It has {os.fstat(file.fileno()).st_size:,} bytes; homing reads at most {MAX_TOKENIZER_BYTES:,}.",
                fix="Use the tokenizer.json that came with the model, or let homing train one.",
            )
    return data


_NO_IDS = ("version", "truncation", "padding", "post_processor", "decoder")


def gives_same_ids(one: Path, other: Path) -> bool:
    """Return True if both files encode text identically. Both must exist. An invalid file equals only an exact copy."""
    first, second = read_tokenizer_bytes(one), read_tokenizer_bytes(other)
    if first == second:
        return True
    try:
        return bool(_encoding_part(json.loads(first)) == _encoding_part(json.loads(second)))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return False


def _encoding_part(document: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in document.items() if name not in _NO_IDS}
    # Older files store a merge as one string: its two halves, separated by a space.
    merges = [
        tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in found["model"].get("merges") or []
    ]
    found["model"] = {**_without_defaults(found["model"]), "merges": merges}
    found["added_tokens"] = sorted(
        (_without_defaults(token) for token in found.get("added_tokens") or []), key=lambda token: int(token["id"])
    )
    return _without_defaults(found)


def _without_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Drop null and false values, which some programs write and others omit."""
    return {name: value for name, value in values.items() if value is not None and value is not False}
