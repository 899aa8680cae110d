"""tokenizer.json split for chats into plain text on one side and markers on the other.

    encode(texts)   ids of text, and the character at which each begins; never a marker, whatever the text spells
    markers_in      positions of markers in a rendered text

The text side is the tokenizer without its added tokens, so nothing in a message can become one. Needs only a BPE
tokenizer, so it works for third-party models too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.tokenizer.panics import panics_as_errors
from homing.lm.tokenizer.tokenizer import read_tokenizer_json
from homing.wire.file_names import TOKENIZER

__all__ = ["ChatTokens", "Encoded"]

Encoded = tuple[list[int], list[int]]  # ids, and the character of the text at which each begins


class ChatTokens:
    def __init__(self, path: Path) -> None:
        """Load the tokenizer. `path` is tokenizer.json, or the folder that holds it."""
        from tokenizers import Tokenizer as Backend

        self.path = path / TOKENIZER if path.is_dir() else path
        data = read_tokenizer_json(self.path)
        added = [entry for entry in data.get("added_tokens") or [] if entry.get("content")]
        _refuse_odd(self.path, added)
        self.markers: dict[str, int] = {entry["content"]: int(entry["id"]) for entry in added}
        self._names = {number: name for name, number in self.markers.items()}
        # A model may write other markers itself, such as <think>; these end turns and texts, and never come from a
        # message.
        self.specials = frozenset(entry["content"] for entry in added if entry.get("special"))
        bare = {**data, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        with panics_as_errors(self.path):
            self._backend: Any = Backend.from_str(json.dumps(bare))
        longest_first = sorted(self.markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        ids = [*data["model"]["vocab"].values(), *self.markers.values()]
        self.vocab_size = int(max(ids)) + 1

    def encode(self, texts: list[str]) -> list[Encoded]:
        with panics_as_errors(self.path):
            rows = self._backend.encode_batch(texts, add_special_tokens=False)
        return [(row.ids, [start for start, _ in row.offsets]) for row in rows]

    def markers_in(self, text: str) -> list[tuple[int, int]]:
        """Return the (start, end) of each marker, not overlapping; the longest counts where two begin together."""
        return [found.span() for found in self._pattern.finditer(text)]

    def show(self, number: int) -> str:
        """Format one token for display: a marker by its name, invalid bytes as U+FFFD."""
        return self._names.get(number) or str(self._backend.decode([number], skip_special_tokens=False))


def _refuse_odd(path: Path, added: list[dict[str, Any]]) -> None:
    flags = ("lstrip", "rstrip", "single_word")
    odd = [entry["content"] for entry in added if any(entry.get(flag) for flag in flags)]
    if odd:
        raise DataError(
            what=f"{path} has special tokens that strip the spaces around them: {', '.join(odd[:4])}.",
            why="homing could not find exactly where the text of a turn ends.",
            fix="Use a byte-level tokenizer, such as the one of Llama 3, Qwen or homing.",
        )
