"""A loaded model for the server: prompt -> ids -> chunks of text, each safe to send.

    size -> messages -> the model's own template -> ids ┐
    size -> text     -> <|endoftext|> + ids             ┴-> generate -> chunks -> up to a stop string -> Spoken

A text ends where the model ends it, at a stop string, after the maximum number of tokens, or when the context is full.
The server never continues from a truncated conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, cast

from homing.lm.data.chat.messages import Message
from homing.lm.data.chat.prompt_ids import Prompter, learned_to_answer
from homing.lm.generate import decode_stream, generate, read_card

if TYPE_CHECKING:
    from homing.lm.model import Decoder
    from homing.lm.tokenizer import Tokenizer

__all__ = ["GenerationSession", "GivenUp", "Settings", "Spoken", "TooLong", "up_to_stop"]

_FIRST_PART = 1 << 14  # characters


@dataclass(frozen=True)
class Settings:
    """Sampling settings for one text."""

    num_tokens: int
    temperature: float
    top_k: int
    seed: int
    stop: tuple[str, ...] = ()


@dataclass
class Spoken:
    """Token counts and state of a text, updated while it is generated."""

    num_prompt_tokens: int
    num_tokens: int = 0
    is_ended: bool = False  # ended by the model or a stop string; otherwise the text reached the maximum length


class TooLong(Exception):
    """A prompt that is too long to leave room in the context."""

    def __init__(self, num_tokens: int, *, is_at_least: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens, self.is_at_least = num_tokens, is_at_least


class GivenUp(Exception):
    """The client is no longer waiting for the text."""


class GenerationSession:
    def __init__(self, model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
        card = read_card(folder)
        self.name = card.run_name or folder.resolve().name
        self.context = model.shape.context
        self._model, self._tokenizer = model, tokenizer
        self._prompter = Prompter(folder, tokenizer) if learned_to_answer(card) else None
        self._rendering = Lock()  # rendering needs a lock, because a template keeps its own state meanwhile
        # A text with more bytes than this cannot fit, because no token has more bytes than the longest one.
        self.max_prompt_bytes = self.context * max(1, *tokenizer.token_bytes())

    @property
    def is_chat(self) -> bool:
        return self._prompter is not None

    def check_bytes(self, texts: Iterable[str]) -> None:
        """Raise TooLong for texts that no tokenization could make fit, without encoding them."""
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if num_bytes > self.max_prompt_bytes:
            longest = self.max_prompt_bytes // self.context
            raise TooLong(-(-num_bytes // longest), is_at_least=True)

    def ask(self, messages: list[Message], is_wanted: Callable[[], bool] = lambda: True) -> list[int]:
        """Return a conversation as ids, with the assistant's turn opened; raises Fault if the template rejects it."""
        assert self._prompter is not None, "a base model has no chat template"
        for message in messages:
            if len(message["content"]) > _FIRST_PART:  # checked before the template makes copies of the text
                self._encode(message["content"], is_wanted)
        with self._rendering:
            return self._checked(self._prompter.prompt(messages))

    def begin(self, text: str, is_wanted: Callable[[], bool] = lambda: True) -> list[int]:
        """Return the beginning of a document as ids."""
        return self._checked([self._tokenizer.end_of_text_id, *self._encode(text, is_wanted)])

    def _encode(self, text: str, is_wanted: Callable[[], bool]) -> list[int]:
        """Encode a text from its beginning in parts that double in size.

        If a text is far too long, only enough of it is encoded to detect that, and a disconnect is noticed between two
        parts.
        """
        part = _FIRST_PART
        while True:
            if not is_wanted():
                raise GivenUp
            # Unlike `encode`, this call releases the GIL, so that the server stays responsive.
            (ids,) = self._tokenizer.encode_many([text[:part]])
            if part >= len(text):
                return ids
            # The text that follows may change the last tokens of a part, so the limit is twice the context.
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
        """Yield chunks of text and keep `spoken` up to date. `is_wanted` is checked before each token."""
        room = min(settings.num_tokens, self.context - len(ids))
        stop_ids = self._prompter.stop_ids if in_turns and self._prompter else self._tokenizer.stop_ids
        made = generate(
            self._model, ids, num_tokens=room, temperature=settings.temperature, top_k=settings.top_k,
            seed=settings.seed, stop_ids=stop_ids,
        )  # fmt: skip
        # Close the generator even if the rest is not wanted, because its captured buffers hold GPU memory until then.
        with closing(cast("Generator[int]", made)):
            is_stopped = yield from up_to_stop(
                decode_stream(self._tokenizer, _counted(made, spoken, is_wanted)), settings.stop
            )
        spoken.is_ended = is_stopped or spoken.num_tokens < room


def _counted(ids: Iterator[int], spoken: Spoken, is_wanted: Callable[[], bool]) -> Iterator[int]:
    while is_wanted() and (i := next(ids, None)) is not None:
        spoken.num_tokens += 1
        yield i


def up_to_stop(chunks: Iterable[str], stops: Sequence[str]) -> Generator[str, None, bool]:
    """Yield the text before the first stop string, which may span several chunks; return whether there was one.

    Text that may be the beginning of a stop string is held back until that is certain.
    """
    held = ""
    for piece in chunks:
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
    """Return how many characters at the end of the text are the beginning of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
