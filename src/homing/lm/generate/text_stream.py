"""Turns the ids of a text into pieces that can be shown: whole characters, and nothing after a stop string.

    ids -> characters (one may span several tokens) -> text before the first stop string (one may span several pieces)

`TextStream` takes one id at a time, for a server that generates many texts at once. `decode_stream` goes through an
iterator of ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from homing.lm.tokenizer import Tokenizer

__all__ = ["TextStream", "decode_stream"]

_HALF = "\ufffd"  # U+FFFD, to which incomplete characters and invalid bytes decode
# Maximum number of tokens to hold back: a UTF-8 character has at most four bytes, and at least one is still missing.
_MOST_BEFORE = 3


class TextStream:
    """The text of a growing list of ids. `add` returns the new text that is final, which may be empty."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, hides_specials: bool = False) -> None:
        """`hides_specials`: leave out special tokens, except those that are named in a stop string."""
        self._tokenizer, self._stops = tokenizer, stops
        specials = tokenizer.specials if hides_specials else {}
        self._hidden = {i for name, i in specials.items() if not any(name in stop for stop in stops)}
        self._ids: list[int] = []  # ids of a character that is not complete
        self._num_shown = 0  # number of characters of `_ids` that were already returned
        self._held = ""  # text that may be the beginning of a stop string
        self.num_characters = 0  # number of characters decoded so far, whether returned or held back
        self.is_stopped = False  # True once a stop string was found; what follows it is not returned

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        return self._up_to_stop(self._characters(token_id))

    def end(self) -> str:
        """Return the text that was held back, when no more ids will come."""
        rest = self._tokenizer.decode(self._ids)[self._num_shown :] if self._ids else ""
        self._ids = []
        text = self._up_to_stop(rest)
        held, self._held = self._held, ""
        return text + held

    def _characters(self, token_id: int) -> str:
        """Return the characters that this id completes.

        A token may end one character and begin the next, so only the ids of the incomplete character are held back.
        """
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        is_whole = not text.endswith(_HALF)
        end = len(text) if is_whole else len(text) - 1
        found = text[self._num_shown : end] if end > self._num_shown else ""
        self.num_characters += len(found)
        self._ids = [] if is_whole else self._ids[-_MOST_BEFORE:]
        self._num_shown = 0 if is_whole else len(self._tokenizer.decode(self._ids)) - 1
        return found

    def _up_to_stop(self, piece: str) -> str:
        """Return the text that no stop string can change any more; hold back what may begin one."""
        if self.is_stopped or not (self._stops and piece):
            return "" if self.is_stopped else piece
        held = self._held + piece
        if found := [at for stop in self._stops if (at := held.find(stop)) >= 0]:
            self.is_stopped, self._held = True, ""
            return held[: min(found)]
        safe = len(held) - max(_begun(held, stop) for stop in self._stops)
        self._held = held[safe:]
        return held[:safe]


def _begun(text: str, stop: str) -> int:
    """Return the number of characters at the end of the text that could be the beginning of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def decode_stream(tokenizer: Tokenizer, ids: Iterable[int], stops: Sequence[str] = ()) -> Iterator[str]:
    """Yield text as soon as its characters are complete; end before the first stop string."""
    stream = TextStream(tokenizer, stops)
    for i in ids:
        if text := stream.add(i):
            yield text
        if stream.is_stopped:
            return
    if text := stream.end():
        yield text
