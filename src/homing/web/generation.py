"""One request's texts on their way from the generating thread to the event loop that waits for them.

Generation   a request: its choices, and a queue of events; can be cancelled at any time
Choice       one text of it: ids -> characters -> text before a stop string -> events with text and tokens
Event        a piece of a text, its tokens if they were requested, and at the end why it ended
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from homing.lm.generate.batching import TextRequest
from homing.lm.generate.pick_token import Picked
from homing.lm.generate.text_stream import TextStream
from homing.lm.tokenizer import Tokenizer

__all__ = ["Choice", "Event", "Generation", "TimedOut", "Token"]


class TimedOut(Exception):
    """Raised if the time of a request is over before its first token."""


@dataclass(frozen=True)
class Token:
    """A token with its log-probabilities. `start` is its first character's position in the text of the choice."""

    picked: Picked
    start: int


@dataclass(frozen=True)
class Event:
    choice: int
    text: str
    tokens: tuple[Token, ...] = ()
    ending: str = ""  # "stop" or "length" in the last event of a choice


class Generation:
    """A request in the queue. `prepare` sets its choices and returns what to generate for each.

    It runs in the thread that encodes prompts.
    """

    def __init__(
        self, prepare: Callable[[Generation], list[TextRequest]], *, num_texts: int, deadline: float = math.inf,
        on_expired: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`deadline`: when the request has to end, by the worker's clock. `on_expired` is called if it ends so."""
        self.prepare, self.num_texts, self._deadline, self._on_expired = prepare, num_texts, deadline, on_expired
        self.prompts: list[list[int]] = []  # set by `prepare`, as are the choices
        self.choices: list[Choice] = []
        self.num_tokens = 0  # generated so far, in all choices
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._is_accepted = asyncio.Event()
        self._refusal: Exception | None = None
        self._given_up = threading.Event()
        self._outbox: list[Event | Exception | None] = []
        self.first_at: float | None = None  # when the first text arrived
        self.num_open = num_texts  # texts that have not ended

    @property
    def is_wanted(self) -> bool:
        return not self._given_up.is_set()

    def is_late(self, now: float) -> bool:
        return now >= self._deadline

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def cancel(self) -> None:
        """Stop generating at the next token, or never start. The reader sees the end at once."""
        self._given_up.set()
        self._send([None])

    # -- called by the thread that encodes or generates ----------------------------------------------------------------

    def put(self, event: Event | Exception | None) -> None:
        """Queue an event. It reaches the reader at the next `flush`, together with the others of a step."""
        self._outbox.append(event)

    def flush(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._send(events)

    def accept(self) -> None:
        """Report that all prompts are encoded and fit into the context."""
        self._call(self._is_accepted.set)

    def refuse(self, error: Exception) -> None:
        """Report why the prompts cannot be used."""
        if isinstance(error, TimedOut):
            self._on_expired()
        self._refusal, self.num_open = error, 0
        self._call(self._is_accepted.set)

    def expire(self) -> None:
        """End all texts as they are, or report that the time is over if there is no token yet."""
        self._on_expired()
        if not self.num_tokens:
            self.fail(TimedOut())
            return
        for choice in self.choices:
            if not choice.is_over:
                choice.ended(is_stopped=False)
        self.flush()

    def fail(self, error: Exception) -> None:
        """Report the error, and stop generating all texts of the request."""
        self.put(error)
        self.flush()
        self._given_up.set()

    def _send(self, events: Sequence[Event | Exception | None]) -> None:
        def deliver() -> None:
            for event in events:
                self._events.put_nowait(event)
            self._is_accepted.set()

        self._call(deliver)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the event loop is closed, so no one is listening
            self._given_up.set()

    # -- called by the event loop --------------------------------------------------------------------------------------

    async def accepted(self) -> None:
        """Return when the request was accepted or cancelled; raise if its prompts could not be prepared."""
        await self._is_accepted.wait()
        if self._refusal is not None:
            raise self._refusal

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            if self.first_at is None:
                self.first_at = time.monotonic()
            yield event


@dataclass(eq=False)
class Choice:
    """Listens to one text. `wants_tokens`: events name the tokens of their text; `wants_stop`: also its stop token.

    `hides_specials`: special tokens are left out of the text.
    """

    generation: Generation
    number: int
    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    wants_tokens: bool = False
    wants_stop: bool = False
    hides_specials: bool = False
    stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = TextStream(self.tokenizer, self.stops, hides_specials=self.hides_specials)
        self.num_tokens = 0
        self.is_over = False
        self.prompt_scores: list[Picked] = []
        self._num_shown = 0  # characters that were sent
        self._held: list[Token] = []  # tokens whose text was not sent yet

    @property
    def is_wanted(self) -> bool:
        return self.generation.is_wanted and not self.is_over

    def scored(self, picked: Sequence[Picked]) -> None:
        self.prompt_scores += picked

    def picked(self, picked: Picked) -> bool:
        self.num_tokens += 1
        self.generation.num_tokens += 1
        if self.wants_tokens:
            self._held.append(Token(picked, self.stream.num_characters))
        if text := self.stream.add(picked.id):
            self._send(text)
        return not self.stream.is_stopped

    def ended(self, *, is_stopped: bool, stop: Picked | None = None) -> None:
        if stop is not None and self.wants_tokens and self.wants_stop:
            self._held.append(Token(stop, self.stream.num_characters))
        self.is_over = True
        self._send(self.stream.end(), "stop" if is_stopped or self.stream.is_stopped else "length")
        self.generation.num_open -= 1
        if not self.generation.num_open:
            self.generation.put(None)

    def failed(self, error: Exception) -> None:
        self.generation.fail(error)

    def _send(self, text: str, ending: str = "") -> None:
        self._num_shown += len(text)
        is_last = ending or self.stream.is_stopped
        # A token belongs to the text that shows its first character. At the end, this leaves out what a stop string
        # cut off, but keeps tokens that have no characters of their own.
        end = self._num_shown if self.stream.is_stopped else self._num_shown + bool(is_last)
        shown = tuple(token for token in self._held if token.start < end)
        self._held = self._held[len(shown) :]
        self.generation.put(Event(self.number, text, shown, ending))
