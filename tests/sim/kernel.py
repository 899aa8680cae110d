"""Virtual time and the baton: one of many threads runs, and which one follows from the seed alone.

    Task      a thread of its own that holds still until it is given the baton
    Sim       a heap of (due, number, task or event); whoever gives way pops the next and hands over
    Killed    raised inside a task that was killed, at each of its later calls; no `except Exception` sees it

Nothing here knows of hosts or of homing. Threads and not generators, because the code under test is plain synchronous
code; locks and not conditions, because a hand-over happens a thousand times in a schedule.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Broken", "Killed", "Sim", "Task"]

_MASK = (1 << 64) - 1
MAX_CALLS = 3_000_000  # of the World, in one schedule: more means that a process loops without sleeping


class Killed(BaseException):
    """The process is dead: what it still executes has no effect on its world."""


class Broken(AssertionError):
    """An invariant does not hold."""


class Task:
    """A thread that runs only while it holds the baton."""

    def __init__(self, sim: Sim, name: str, program: Callable[[], int | None]) -> None:
        self.sim, self.name, self._program = sim, name, program
        self.baton = threading.Lock()
        self.baton.acquire()
        self.entry: list[Any] | None = None  # its place in the heap while it waits
        self.is_killed = False
        self.is_over = False  # its thread has ended
        self.code: int | None = None  # exit code, from the moment it is dead
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        self.baton.acquire()
        code: int | None = None
        try:
            if not self.is_killed:
                code = self._program() or 0
        except Killed:
            code = -9
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
        except BaseException as exc:
            code = 1
            self.sim.crashed(self, exc)
        self.is_over = True
        if self.code is None:
            self.code = code
        self.sim.ended(self)

    def join(self) -> None:
        self._thread.join(timeout=10.0)
        assert not self._thread.is_alive(), f"{self.name} does not end"


class Sim:
    def __init__(self, seed: int, *, trace: Callable[[str], None] | None = None) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.t = 0.0  # seconds of true time since the beginning
        self.trace = trace
        self.num_calls = 0
        self.digest = seed & _MASK  # of all that happened: equal digests, equal schedules
        self.failure: BaseException | None = None
        self.next_due = math.inf
        self._heap: list[list[Any]] = []
        self._number = 0
        self._tasks: list[Task] = []
        self._director = threading.Lock()  # the baton of the thread that made this
        self._director.acquire()
        self._director_entry: list[Any] | None = None
        self.running: Task | None = None  # None: the director

    # --- called by whoever holds the baton ---

    def at(self, due: float, what: Any) -> list[Any]:
        """`what` is a Task to run or a function to call, not before `due`."""
        self._number += 1
        entry = [due, self._number, what]
        heapq.heappush(self._heap, entry)
        self.next_due = self._heap[0][0]
        return entry

    def start(self, name: str, program: Callable[[], int | None], delay_s: float = 0.0) -> Task:
        task = Task(self, name, program)
        self._tasks.append(task)
        task.entry = self.at(self.t + delay_s, task)
        return task

    def give_way(self, task: Task, until: float) -> None:
        """The running task stops until then; others run meanwhile."""
        if until < self.next_due:  # no other task is due before: this one continues
            self.t = max(self.t, until)
            return
        task.entry = self.at(until, task)
        following = self._next()
        if following is task:
            return
        self._hand_over(following)
        task.baton.acquire()

    def wake(self, task: Task) -> None:
        """It waits no longer: a signal came."""
        if task.entry is not None and task is not self.running:
            task.entry[2] = None
            task.entry = self.at(self.t, task)

    def kill(self, task: Task, code: int = -9) -> None:
        """Dead from now on. Its thread unwinds at once, and without effect."""
        if task.code is None:
            task.code, task.is_killed = code, True
            self.wake(task)

    def ended(self, task: Task) -> None:
        """The last act of a task's thread: it hands the baton on and is gone."""
        task.entry = None
        self._hand_over(self._next())

    def crashed(self, task: Task, exc: BaseException) -> None:
        """A program of ours ended in a traceback, which is a finding of its own."""
        self.fail(exc)

    def fail(self, exc: BaseException) -> None:
        """The schedule is over: the director hears of it before anybody else runs."""
        if self.failure is None:
            self.failure = exc
            if self._director_entry is not None:
                self._director_entry[2] = None
                self._director_entry = self.at(-math.inf, self)

    def note(self, number: int) -> None:
        self.digest = (self.digest * 1000003 ^ number ^ int(self.t * 1e4)) & _MASK

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.t:9.3f} {text}")

    # --- called by the director only ---

    def advance(self, seconds: float) -> None:
        """Lets everything happen that is due in the next `seconds`."""
        self._director_entry = self.at(self.t + seconds, self)
        following = self._next()
        if following is not self:
            self._hand_over(following)
            self._director.acquire()
        self.running, self._director_entry = None, None
        if self.failure is not None:
            raise self.failure

    def wait(self, is_done: Callable[[], bool], timeout_s: float, every_s: float = 1.0) -> bool:
        deadline = self.t + timeout_s
        while not is_done():
            if self.t >= deadline:
                return False
            self.advance(min(every_s, deadline - self.t))
        return True

    def close(self) -> None:
        """Ends every thread. Nothing they do on their way out has an effect."""
        self.failure = self.failure or Killed()
        for task in self._tasks:
            if not task.is_over:
                task.is_killed = True
                task.code = -9 if task.code is None else task.code
        self._heap = [[self.t, number, task] for number, task in enumerate(self._tasks) if not task.is_over]
        heapq.heapify(self._heap)
        if self._heap:
            self._director_entry = self.at(math.inf, self)
            self._hand_over(self._next())
            self._director.acquire()
        for task in self._tasks:
            task.join()

    # --- the heap ---

    def _next(self) -> Any:
        """Run the events that are due and return the task that runs next, or self for the director."""
        heap = self._heap
        while True:
            due, _, what = heapq.heappop(heap)
            if what is None:
                continue
            if due > self.t and due != math.inf:
                self.t = due
            self.next_due = heap[0][0] if heap else math.inf
            if isinstance(what, Task):
                if what.is_over or not self.may_run(what):
                    continue
                what.entry = None
                self.running = what
                return what
            if what is self:
                return what
            try:
                what()
            except BaseException as exc:
                self.fail(exc)

    def may_run(self, task: Task) -> bool:
        """A host may hold its tasks back; then it keeps them and puts them on the heap again itself."""
        return True

    def _hand_over(self, following: Any) -> None:
        (self._director if following is self else following.baton).release()
