"""One text at a time: a thread that computes, a short queue before it, and texts that may be given up.

    submit(work) -> Text -> [ async for piece in text ] ...        cancel() at any time, from any thread

Two texts at once would each take twice as long and the memory of both. Whoever finds the queue full is told at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

__all__ = ["QueueFull", "Text", "Worker"]

# Is it still wanted? -> pieces. The first comes when the request is accepted: encoded, and found to fit.
Work = Callable[[Callable[[], bool]], Iterator[str]]


class QueueFull(Exception):
    pass


class Text:
    """Pieces on their way from the worker's thread to the event loop that asked for them."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self._given_up = threading.Event()

    @property
    def is_wanted(self) -> bool:
        return not self._given_up.is_set()

    def cancel(self) -> None:
        """Ends it at the next token, or before its first; whoever reads it reaches the end now."""
        self._given_up.set()
        self._tell(None)

    async def accepted(self) -> None:
        """Returns once its work has begun to answer, or at once when it is given up; raises what stood in the way. The
        first piece is consumed: it is empty."""
        piece = await self._pieces.get()
        if isinstance(piece, Exception):
            raise piece
        if piece is None:
            self._pieces.put_nowait(None)  # for whoever reads on: this is the end

    async def __aiter__(self) -> AsyncIterator[str]:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def compute(self) -> None:
        """In the worker's thread."""
        try:
            for piece in self._work(lambda: self.is_wanted):
                self._tell(piece)
        except Exception as exc:  # of one text; the others are still to come, and who asked is told
            self._tell(exc)
        self._tell(None)

    def _tell(self, piece: str | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._given_up.set()


class Worker:
    def __init__(self, *, num_waiting: int) -> None:
        """`num_waiting`: how many texts may wait beside the one that is being computed."""
        self._num_waiting = num_waiting
        self._waiting: deque[Text] = deque()
        self._current: Text | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="homing-serve-worker", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Text:
        with self._changed:
            # Whoever hung up has left the queue.
            self._waiting = deque(text for text in self._waiting if text.is_wanted)
            num_before = len(self._waiting) + (self._current is not None)
            if self._is_closed or num_before > self._num_waiting:
                raise QueueFull
            text = Text(work)
            self._waiting.append(text)
            self._changed.notify()
            return text

    def close(self) -> None:
        """Gives up every text, and returns when the thread has ended."""
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
