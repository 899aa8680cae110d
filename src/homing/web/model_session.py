"""A loaded model for the server: prompt -> ids -> chunks of text, each safe to send.

    messages -> check their size -> the model's own template -> ids ┐
    text     -> check its size   -> <|endoftext|> + ids             ┴-> generate -> chunks -> stop string -> Spoken

A text ends where the model ends it, at a stop string, after the maximum number of tokens, or when the context is full.
The server never truncates a conversation to make it fit.
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

_FIRST_PART = 1 << 14  # length in characters of the first prefix that is encoded


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
    """The token counts and the state of a text, updated while the text is generated."""

    num_prompt_tokens: int
    num_tokens: int = 0
    is_ended: bool = False  # True if the model or a stop string ended the text, False if it reached its maximum length


class TooLong(Exception):
    """Raised if a prompt is so long that the context has no room for an answer."""

    def __init__(self, num_tokens: int, *, is_at_least: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens, self.is_at_least = num_tokens, is_at_least


class GivenUp(Exception):
    """Raised if the client is no longer waiting for the text."""


class GenerationSession:
    def __init__(self, model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
        card = read_card(folder)
        self.name = card.run_name or folder.resolve().name
        self.context = model.shape.context
        self._model, self._tokenizer = model, tokenizer
        self._prompter = Prompter(folder, tokenizer) if learned_to_answer(card) else None
        self._rendering = Lock()  # only one thread may render a template at a time, because templates have state
        # A prompt with more bytes than this cannot fit, even if each of its tokens is the longest one.
        self.max_prompt_bytes = self.context * max(1, *tokenizer.token_bytes())

    @property
    def is_chat(self) -> bool:
        return self._prompter is not None

    def check_bytes(self, texts: Iterable[str]) -> None:
        """Raise TooLong if the texts are too long for the context under any tokenization, without encoding them."""
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if num_bytes > self.max_prompt_bytes:
            longest = self.max_prompt_bytes // self.context
            raise TooLong(-(-num_bytes // longest), is_at_least=True)

    def ask(self, messages: list[Message], is_wanted: Callable[[], bool] = lambda: True) -> list[int]:
        """Return a conversation as ids, including the start of the assistant's turn.

        Raise Fault if the template rejects the conversation.
        """
        assert self._prompter is not None, "a base model has no chat template"
        for message in messages:
            if len(message["content"]) > _FIRST_PART:  # check long texts before the template makes copies of them
                self._encode(message["content"], is_wanted)
        with self._rendering:
            return self._checked(self._prompter.prompt(messages))

    def begin(self, text: str, is_wanted: Callable[[], bool] = lambda: True) -> list[int]:
        """Return the ids of a text that the model is to continue, starting with the end-of-text token."""
        return self._checked([self._tokenizer.end_of_text_id, *self._encode(text, is_wanted)])

    def _encode(self, text: str, is_wanted: Callable[[], bool]) -> list[int]:
        """Encode a prefix of the text, then a prefix twice as long, and so on, until the whole text is encoded.

        If the text is far too long, only as much of it is encoded as is needed to detect that. Before each prefix,
        GivenUp is raised if the client has disconnected.
        """
        part = _FIRST_PART
        while True:
            if not is_wanted():
                raise GivenUp
            # Unlike `encode`, this call releases the GIL, so that the server stays responsive.
            (ids,) = self._tokenizer.encode_many([text[:part]])
            if part >= len(text):
                return ids
            # The rest of the text may change the last tokens of this part, so allow twice the context.
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
        """Yield chunks of generated text and update `spoken`. Call `is_wanted` before each token."""
        room = min(settings.num_tokens, self.context - len(ids))
        stop_ids = self._prompter.stop_ids if in_turns and self._prompter else self._tokenizer.stop_ids
        made = generate(
            self._model, ids, num_tokens=room, temperature=settings.temperature, top_k=settings.top_k,
            seed=settings.seed, stop_ids=stop_ids,
        )  # fmt: skip
        # Close the generator even if it is not exhausted, because its buffers occupy GPU memory until it is closed.
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

    Hold back text that may be the beginning of a stop string until more text shows whether it is.
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
    """Return the number of characters at the end of the text that could be the beginning of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
