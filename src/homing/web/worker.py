"""The two threads behind the server: one encodes prompts, one generates all texts in a batch.

    submit(Generation) -> queue -> encode, one request at a time -> the batch: one token of each text per step -> events
    compute(function)  -> runs between two steps, such as the hidden states of an embedding

Prompts are encoded one at a time, because encoding many long ones at once would need too much memory, and in a thread
of their own, so that a long prompt does not delay the texts that are being generated. If too many texts wait, `submit`
raises QueueFull immediately.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from homing.lm.generate.batching import BatchGenerator, TextRequest
from homing.web.generation import Generation

__all__ = ["QueueFull", "Worker"]

_log = logging.getLogger(__name__)

Made = TypeVar("Made")


class QueueFull(Exception):
    pass


class Worker:
    def __init__(self, batch: BatchGenerator, *, num_waiting: int) -> None:
        """Start both threads. `num_waiting` texts may wait in addition to those that are being generated."""
        self._batch, self._num_waiting = batch, num_waiting
        self._to_encode: deque[Generation] = deque()
        self._to_generate: deque[tuple[Generation, list[TextRequest]]] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._open: list[Generation] = []  # generations with texts in the batch, or being encoded
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=run, name=f"homing-serve-{name}", daemon=True)
            for name, run in (("encoder", self._encode), ("generator", self._generate))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_working(self) -> bool:
        """False if the server ends, or if its generating thread has failed."""
        return not self._is_closed

    @property
    def num_texts(self) -> int:
        """Number of texts that are waiting or being generated."""
        with self._changed:
            return self._count()

    @property
    def num_active(self) -> int:
        """Number of texts that are being generated."""
        return self._batch.num_active

    @property
    def num_reused(self) -> int:
        """Number of prompt tokens that were not computed again."""
        return self._batch.num_reused

    def submit(self, generation: Generation) -> None:
        with self._changed:
            # Remove requests from the queue if their clients have disconnected.
            self._to_encode = deque(each for each in self._to_encode if each.is_wanted)
            if self._is_closed or self._count() + generation.num_texts > self._batch.max_rows + self._num_waiting:
                raise QueueFull
            self._to_encode.append(generation)
            self._changed.notify_all()

    def compute(self, function: Callable[[], Made]) -> Future[Made]:
        """Run a function on the generating thread, between two steps, and return a Future for its result."""
        future: Future[Made] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as exc:  # passed to whoever waits for the result
                    future.set_exception(exc)

        with self._changed:
            if self._is_closed or len(self._calls) >= self._num_waiting:
                raise QueueFull
            self._calls.append((future, call))
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Cancel every text, and return when both threads have ended."""
        with self._changed:
            self._is_closed = True
            given_up = [*self._to_encode, *self._open]
            self._changed.notify_all()
        for generation in given_up:
            generation.cancel()
        for thread in self._threads:
            thread.join()

    def _count(self) -> int:
        self._open = [each for each in self._open if each.is_wanted and each.num_open]
        return sum(each.num_texts for each in self._to_encode) + sum(each.num_open for each in self._open)

    # -- the encoder's thread ------------------------------------------------------------------------------------------

    def _encode(self) -> None:
        while (generation := self._next()) is not None:
            try:
                texts = generation.prepare(generation)
            # Passed to whoever waits for the text, so that later requests are answered. A panic in a Rust package is
            # a BaseException.
            except BaseException as exc:
                generation.refuse(exc if isinstance(exc, Exception) else RuntimeError(f"{type(exc).__name__}: {exc}"))
                continue
            generation.accept()
            with self._changed:
                self._to_generate.append((generation, texts))
                self._changed.notify_all()

    def _next(self) -> Generation | None:
        with self._changed:
            while not self._is_closed:
                while self._to_encode:
                    generation = self._to_encode.popleft()
                    if generation.is_wanted:
                        self._open.append(generation)
                        return generation
                self._changed.wait()
            return None

    # -- the generator's thread ----------------------------------------------------------------------------------------

    def _generate(self) -> None:
        try:
            self._generate_until_closed()
        except BaseException as exc:  # such as a CUDA error that persists: answer all requests, and accept no more
            _log.exception("the generating thread failed")
            with self._changed:
                self._is_closed = True
                left = [*self._to_encode, *self._open]
                self._changed.notify_all()
            for generation in left:
                generation.fail(RuntimeError(f"the server cannot generate any more: {type(exc).__name__}: {exc}"))
                generation.cancel()
        finally:
            with self._changed:
                calls, self._calls = self._calls, deque()
            for future, _ in calls:
                future.cancel()

    def _generate_until_closed(self) -> None:
        generations: list[Generation] = []  # those with texts in the batch
        while True:
            with self._changed:
                while not (self._is_closed or self._to_generate or self._calls or not self._batch.is_idle):
                    self._changed.wait()
                if self._is_closed:
                    break
                added, self._to_generate = list(self._to_generate), deque()
                call = self._calls.popleft() if self._calls else None
            for generation, texts in added:
                generations.append(generation)
                try:
                    for request, choice in zip(texts, generation.choices, strict=True):
                        self._batch.add(request, choice)
                except Exception as exc:
                    generation.fail(exc)
            if call is not None:
                call[1]()
            self._batch.step()
            for generation in generations:
                generation.flush()
            generations = [each for each in generations if each.num_open and each.is_wanted]
        self._batch.close()
