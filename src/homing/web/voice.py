"""A loaded model as a server needs it: a prompt to ids, ids to pieces of text, each piece safe to send.

    size -> messages -> the model's own template -> ids ┐
    size -> text     -> <|endoftext|> + ids             ┴-> generate -> pieces -> up to a stop string -> Spoken

A text ends where the model ends it, at a stop string, after so many tokens, or where the context is full: a server's
answer never goes on from a conversation of which half was forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, cast

from homing.lm.chat.messages import Message
from homing.lm.chat.turns import Prompter, learned_to_answer
from homing.lm.generate import generate, read_card, text_pieces

if TYPE_CHECKING:
    from homing.lm.model import Decoder
    from homing.lm.tokenizer import Tokenizer

__all__ = ["GivenUp", "Settings", "Spoken", "TooLong", "Voice", "up_to_stop"]

_FIRST_PART = 1 << 14  # characters


@dataclass(frozen=True)
class Settings:
    """How one text is made."""

    num_tokens: int
    temperature: float
    top_k: int
    seed: int
    stop: tuple[str, ...] = ()


@dataclass
class Spoken:
    """What is known of a text while it is made, and in the end."""

    num_prompt_tokens: int
    num_tokens: int = 0
    is_ended: bool = False  # by the model or a stop string; else there was no more room for it


class TooLong(Exception):
    """A prompt that leaves no room in the context."""

    def __init__(self, num_tokens: int, *, is_at_least: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens, self.is_at_least = num_tokens, is_at_least


class GivenUp(Exception):
    """Nobody waits for it any more."""


class Voice:
    def __init__(self, model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
        card = read_card(folder)
        self.name = card.run_name or folder.resolve().name
        self.context = model.shape.context
        self._model, self._tokenizer = model, tokenizer
        self._prompter = Prompter(folder, tokenizer) if learned_to_answer(card) else None
        self._rendering = Lock()  # a template keeps marks of its own while it renders
        # No text with more bytes can fit: every token stands for at most so many.
        self.max_prompt_bytes = self.context * max(1, *tokenizer.token_bytes())

    @property
    def is_chat(self) -> bool:
        return self._prompter is not None

    def check_bytes(self, texts: Iterable[str]) -> None:
        """Raises TooLong for what cannot fit, whatever its tokens are, without making any."""
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if num_bytes > self.max_prompt_bytes:
            longest = self.max_prompt_bytes // self.context
            raise TooLong(-(-num_bytes // longest), is_at_least=True)

    def ask(self, messages: list[Message], is_wanted: Callable[[], bool] = lambda: True) -> list[int]:
        """A conversation as ids, the model's turn opened. What the template refuses is a Fault."""
        assert self._prompter is not None, "a base model is not asked in turns"
        for message in messages:
            if len(message["content"]) > _FIRST_PART:  # before the template makes copies of it
                self._encode(message["content"], is_wanted)
        with self._rendering:
            return self._checked(self._prompter.prompt(messages))

    def begin(self, text: str, is_wanted: Callable[[], bool] = lambda: True) -> list[int]:
        """The beginning of a document as ids."""
        return self._checked([self._tokenizer.end_of_text_id, *self._encode(text, is_wanted)])

    def _encode(self, text: str, is_wanted: Callable[[], bool]) -> list[int]:
        """From its beginning, each time twice as much of it: of a text that is far too long only as much is encoded as
        shows that, and between two parts a client that hung up is noticed."""
        part = _FIRST_PART
        while True:
            if not is_wanted():
                raise GivenUp
            # Not `encode`: this call lets other threads run meanwhile, so that the server still answers.
            (ids,) = self._tokenizer.encode_many([text[:part]])
            if part >= len(text):
                return ids
            # The last tokens of a part may be others with what follows them, so twice the context is the bound.
            if len(ids) > 2 * self.context:
                raise TooLong(len(ids), is_at_least=True)
            part *= 2

    def _checked(self, ids: list[int]) -> list[int]:
        if len(ids) >= self.context:
            raise TooLong(len(ids), is_at_least=False)
        return ids

    def speak(
        self, ids: Sequence[int], settings: Settings, spoken: Spoken, *, in_turns: bool, is_wanted: Callable[[], bool]
    ) -> Iterator[str]:
        """Pieces of text; `spoken` is kept true on the way. `is_wanted` is asked before each token."""
        room = min(settings.num_tokens, self.context - len(ids))
        stop_ids = self._prompter.stop_ids if in_turns and self._prompter else self._tokenizer.stop_ids
        made = generate(
            self._model, ids, num_tokens=room, temperature=settings.temperature, top_k=settings.top_k,
            seed=settings.seed, stop_ids=stop_ids,
        )  # fmt: skip
        # What was captured for it holds the card's memory until it is closed, also where nobody wants the rest.
        with closing(cast("Generator[int]", made)):
            is_stopped = yield from up_to_stop(
                text_pieces(self._tokenizer, _counted(made, spoken, is_wanted)), settings.stop
            )
        spoken.is_ended = is_stopped or spoken.num_tokens < room


def _counted(ids: Iterator[int], spoken: Spoken, is_wanted: Callable[[], bool]) -> Iterator[int]:
    while is_wanted() and (i := next(ids, None)) is not None:
        spoken.num_tokens += 1
        yield i


def up_to_stop(pieces: Iterable[str], stops: Sequence[str]) -> Generator[str, None, bool]:
    """The text before the first stop string, which may come in several pieces; returns whether there was one.

    What may be the beginning of one is held back until it is known."""
    held = ""
    for piece in pieces:
        held += piece
        if found := [at for stop in stops if (at := held.find(stop)) >= 0]:
            if text := held[: min(found)]:
                yield text
            return True
        safe = len(held) - max((_begun(held, stop) for stop in stops), default=0)
        if safe:
            yield held[:safe]
        held = held[safe:]
    if held:
        yield held
    return False


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
