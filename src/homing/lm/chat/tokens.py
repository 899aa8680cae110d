"""tokenizer.json taken apart for chats: text on one side, the markers that end turns on the other.

    encode(texts)   ids of text, and the character at which each begins; no marker comes out, whatever the text spells
    markers_in      where markers stand in a text that a template gave

The text side is the tokenizer without its added tokens, so nothing that a person wrote can become one. Needs only
that the tokenizer is BPE, so it serves other people's models too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.tokenizer.load import read_tokenizer_json
from homing.lm.tokenizer.panics import panics_as_errors
from homing.wire.names import TOKENIZER

__all__ = ["ChatTokens", "Encoded"]

Encoded = tuple[list[int], list[int]]  # ids, and the character of the text at which each begins


class ChatTokens:
    def __init__(self, path: Path) -> None:
        """`path` is tokenizer.json, or the folder that holds it."""
        from tokenizers import Tokenizer as Backend

        self.path = path / TOKENIZER if path.is_dir() else path
        data = read_tokenizer_json(self.path)
        added = [entry for entry in data.get("added_tokens") or [] if entry.get("content")]
        _refuse_odd(self.path, added)
        self.markers: dict[str, int] = {entry["content"]: int(entry["id"]) for entry in added}
        self._names = {number: name for name, number in self.markers.items()}
        # A model may write the others itself, such as <think>; these end turns and texts, and are never anyone's words.
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
        """From, to: none overlaps another, the longest counts where two begin together."""
        return [found.span() for found in self._pattern.finditer(text)]

    def show(self, number: int) -> str:
        """One token for people: a marker by its name, bytes that are no text as U+FFFD."""
        return self._names.get(number) or str(self._backend.decode([number], skip_special_tokens=False))


def _refuse_odd(path: Path, added: list[dict[str, Any]]) -> None:
    flags = ("lstrip", "rstrip", "single_word")
    odd = [entry["content"] for entry in added if any(entry.get(flag) for flag in flags)]
    if odd:
        raise DataError(
            what=f"{path} has markers that swallow the spaces around them: {', '.join(odd[:4])}.",
            why="Where a conversation's words end could then not be told to the letter.",
            fix="Use a byte-level tokenizer, such as that of Llama 3, Qwen or homing's own.",
        )
