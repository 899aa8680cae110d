"""Generates one text at a time, in a compute thread with a short queue. Each text can be cancelled.

    submit(work) -> Text -> [ async for chunk in text ] ...        cancel() at any time, from any thread

If two texts were generated at once, each would take twice as long, and both would need memory. If the queue is full,
submit raises QueueFull immediately.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

__all__ = ["QueueFull", "Text", "Worker"]

# A function that yields the chunks of a text. Its argument is a function that returns whether the text is still wanted.
# The first chunk is empty, and signals that the prompt has been encoded and fits into the context.
Work = Callable[[Callable[[], bool]], Iterator[str]]


class QueueFull(Exception):
    pass


class Text:
    """A text in the queue. Passes its chunks from the worker's thread to the event loop that requested the text."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self._given_up = threading.Event()

    @property
    def is_wanted(self) -> bool:
        return not self._given_up.is_set()

    def cancel(self) -> None:
        """Stop generating at the next token, or never start. The reader sees the end of the text at once."""
        self._given_up.set()
        self._send(None)

    async def accepted(self) -> None:
        """Return when the request has been accepted or cancelled. If the work failed, raise its exception.

        Consume the first chunk, which is empty.
        """
        chunk = await self._chunks.get()
        if isinstance(chunk, Exception):
            raise chunk
        if chunk is None:
            self._chunks.put_nowait(None)  # put the end marker back, so that the next read sees it too

    async def __aiter__(self) -> AsyncIterator[str]:
        while (chunk := await self._chunks.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def compute(self) -> None:
        """Generate the text; runs in the worker's thread."""
        try:
            for chunk in self._work(lambda: self.is_wanted):
                self._send(chunk)
        # Pass the exception to whoever requested this text, so that the worker can go on to generate other texts.
        except Exception as exc:
            self._send(exc)
        self._send(None)

    def _send(self, chunk: str | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)
        except RuntimeError:  # the event loop is closed, so no one is listening
            self._given_up.set()


class Worker:
    def __init__(self, *, num_waiting: int) -> None:
        """Start the worker. `num_waiting` texts may wait in addition to the one that is being generated."""
        self._num_waiting = num_waiting
        self._waiting: deque[Text] = deque()
        self._current: Text | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="homing-serve-worker", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Text:
        with self._changed:
            # Remove texts from the queue if their clients have disconnected.
            self._waiting = deque(text for text in self._waiting if text.is_wanted)
            num_before = len(self._waiting) + (self._current is not None)
            if self._is_closed or num_before > self._num_waiting:
                raise QueueFull
            text = Text(work)
            self._waiting.append(text)
            self._changed.notify()
            return text

    def close(self) -> None:
        """Cancel every text, and return when the thread has ended."""
        with self._changed:
            self._is_closed = True
            given_up = [*self._waiting, *([self._current] if self._current else [])]
            self._changed.notify()
        for text in given_up:
            text.cancel()
        self._thread.join()

    def _run(self) -> None:
        while (text := self._next()) is not None:
            text.compute()

    def _next(self) -> Text | None:
        with self._changed:
            self._current = None
            while not self._is_closed:
                if self._waiting:
                    text = self._waiting.popleft()
                    if text.is_wanted:
                        self._current = text
                        return text
                else:
                    self._changed.wait()
            return None
