"""The two threads behind the server: one encodes prompts, one generates all texts, a batch per model.

    submit(Generation) -> queue -> encode, one request at a time -> the batch: one token of each text per step -> events
    compute(function)  -> runs between two steps, such as the hidden states of an embedding

Prompts are encoded one at a time, because encoding many long ones at once would need too much memory, and in a thread
of their own, so that a long prompt does not delay the texts that are being generated. If too many texts wait, `submit`
raises QueueFull immediately.

Several models take turns: each has its own queues and its own limits, and in each round every model with work encodes
one request, runs one function and generates one token of each of its texts. So no model waits for another one's queue.

A request that has run out of time ends: `Generation.expire` returns the text so far. A function whose time is over
before its turn does not run.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from homing.lm.generate.batching import BatchGenerator, TextRequest
from homing.web.generation import Generation, TimedOut

__all__ = ["QueueFull", "Worker"]

_log = logging.getLogger(__name__)

Made = TypeVar("Made")


class QueueFull(Exception):
    pass


@dataclass(eq=False)
class _Call:
    """A function that waits for its turn."""

    run: Callable[[], None]
    future: Future[Any]
    deadline: float


@dataclass(eq=False)
class _Lane:
    """The queues of one model."""

    batch: BatchGenerator
    to_encode: deque[Generation] = field(default_factory=deque)
    to_generate: deque[tuple[Generation, list[TextRequest]]] = field(default_factory=deque)
    calls: deque[_Call] = field(default_factory=deque)
    open: list[Generation] = field(default_factory=list)  # generations with texts in the batch, or being encoded
    generating: list[Generation] = field(default_factory=list)  # those with texts in the batch

    def count(self) -> int:
        """Return the number of texts that are waiting or being generated."""
        self.open = [each for each in self.open if each.is_wanted and each.num_open]
        return sum(each.num_texts for each in self.to_encode) + sum(each.num_open for each in self.open)

    @property
    def has_work(self) -> bool:
        return bool(self.to_generate or self.calls or not self.batch.is_idle)


class Worker:
    def __init__(
        self, batches: Sequence[BatchGenerator], *, num_waiting: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start both threads. `num_waiting` texts of each model may wait in addition to those being generated."""
        self._lanes, self._num_waiting, self._clock = [_Lane(batch) for batch in batches], num_waiting, clock
        self._next_to_encode = 0  # the lane whose turn it is
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

    def num_texts(self, lane: int = 0) -> int:
        """Return the number of texts of a model that are waiting or being generated."""
        with self._changed:
            return self._lanes[lane].count()

    def num_active(self, lane: int = 0) -> int:
        """Return the number of texts of a model that are being generated."""
        return self._lanes[lane].batch.num_active

    def num_reused(self, lane: int = 0) -> int:
        """Return the number of prompt tokens of a model that were not computed again."""
        return self._lanes[lane].batch.num_reused

    def submit(self, generation: Generation, lane: int = 0) -> None:
        """Queue a request for the model with this number."""
        own = self._lanes[lane]
        with self._changed:
            # Remove requests from the queue if their clients have disconnected.
            own.to_encode = deque(each for each in own.to_encode if each.is_wanted)
            if self._is_closed or own.count() + generation.num_texts > own.batch.max_rows + self._num_waiting:
                raise QueueFull
            own.to_encode.append(generation)
            self._changed.notify_all()

    def compute(self, function: Callable[[], Made], lane: int = 0, *, deadline: float = math.inf) -> Future[Made]:
        """Run a function on the generating thread, between two steps, and return a Future for its result.

        If its turn does not come before `deadline`, the Future raises TimedOut.
        """
        future: Future[Made] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as exc:  # passed to whoever waits for the result
                    future.set_exception(exc)

        own = self._lanes[lane]
        with self._changed:
            if self._is_closed or len(own.calls) >= self._num_waiting:
                raise QueueFull
            own.calls.append(_Call(call, future, deadline))
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Cancel every text, and return when both threads have ended."""
        with self._changed:
            self._is_closed = True
            given_up = [each for lane in self._lanes for each in (*lane.to_encode, *lane.open)]
            self._changed.notify_all()
        for generation in given_up:
            generation.cancel()
        for thread in self._threads:
            thread.join()

    # -- the encoder's thread ------------------------------------------------------------------------------------------

    def _encode(self) -> None:
        while (found := self._next()) is not None:
            generation, lane = found
            try:
                if generation.is_late(self._clock()):
                    raise TimedOut
                texts = generation.prepare(generation)
            # Passed to whoever waits for the text, so that later requests are answered. A panic in a Rust package is
            # a BaseException.
            except BaseException as exc:
                generation.refuse(exc if isinstance(exc, Exception) else RuntimeError(f"{type(exc).__name__}: {exc}"))
                continue
            generation.accept()
            with self._changed:
                lane.to_generate.append((generation, texts))
                self._changed.notify_all()

    def _next(self) -> tuple[Generation, _Lane] | None:
        """Wait for a request to encode. The models take turns."""
        with self._changed:
            while not self._is_closed:
                for _ in self._lanes:
                    lane = self._lanes[self._next_to_encode]
                    self._next_to_encode = (self._next_to_encode + 1) % len(self._lanes)
                    while lane.to_encode:
                        generation = lane.to_encode.popleft()
                        if generation.is_wanted:
                            lane.open.append(generation)
                            return generation, lane
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
                left = [each for lane in self._lanes for each in (*lane.to_encode, *lane.open)]
                self._changed.notify_all()
            for generation in left:
                generation.fail(RuntimeError(f"the server cannot generate any more: {type(exc).__name__}: {exc}"))
                generation.cancel()
        finally:
            with self._changed:
                calls = [call for lane in self._lanes for call in lane.calls]
                for lane in self._lanes:
                    lane.calls.clear()
            for each in calls:
                each.future.cancel()

    def _generate_until_closed(self) -> None:
        while True:
            with self._changed:
                while not (self._is_closed or any(lane.has_work for lane in self._lanes)):
                    self._changed.wait()
                if self._is_closed:
                    break
            for lane in self._lanes:
                if lane.has_work:
                    self._advance(lane)
        for lane in self._lanes:
            lane.batch.close()

    def _advance(self, lane: _Lane) -> None:
        """Run one function of a model, and generate one token of each of its texts."""
        with self._changed:
            added, lane.to_generate = list(lane.to_generate), deque()
            waiting, lane.calls = list(lane.calls), deque()
            now = self._clock() if waiting else 0.0
            late = [each for each in waiting if now >= each.deadline]
            lane.calls.extend(each for each in waiting if now < each.deadline)
            call = lane.calls.popleft() if lane.calls else None
        for each in late:
            if each.future.set_running_or_notify_cancel():
                each.future.set_exception(TimedOut())
        for generation, texts in added:
            lane.generating.append(generation)
            try:
                for request, choice in zip(texts, generation.choices, strict=True):
                    lane.batch.add(request, choice)
            except Exception as exc:
                generation.fail(exc)
        if call is not None:
            call.run()
        now = self._clock()
        for generation in lane.generating:
            if generation.is_late(now):
                generation.expire()
        lane.batch.step()
        for generation in lane.generating:
            generation.flush()
        lane.generating = [each for each in lane.generating if each.num_open and each.is_wanted]
