"""Progress of long work in the library, such as an upload, a hash or a wait, for whoever shows it.

    report(what, done, total, unit)    say how far the work is; total 0 means that the end is unknown
    finished()                         say that the work is over, so that a bar disappears
    listening(listener)                let `listener` receive the reports inside a `with` block

Without a listener the reports are dropped. The command line listens, and draws bars (`homing.cli.run_verb`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["BYTES", "SECONDS", "Listener", "Progress", "finished", "listener", "listening", "report", "working"]

BYTES, SECONDS = "bytes", "seconds"


@dataclass(frozen=True)
class Progress:
    what: str  # such as `Pushing model.safetensors`; "" once the work is over
    done: float = 0.0
    total: float = 0.0  # 0 if unknown; for a wait, the seconds until its deadline
    unit: str = BYTES
    detail: str = ""  # shown in place of the amounts, if the work has more to say than bytes


Listener = Callable[[Progress], None]
_listener: ContextVar[Listener | None] = ContextVar("homing_progress", default=None)


def report(what: str, done: float = 0.0, total: float = 0.0, unit: str = BYTES, detail: str = "") -> None:
    listener()(Progress(what, done, total, unit, detail))


def listener() -> Listener:
    """Return the current listener, to call it from another thread, which does not inherit it."""
    return _listener.get() or _drop


def _drop(progress: Progress) -> None:
    """Drop a report, because nobody listens."""


def finished() -> None:
    report("")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Report work whose end is unknown for as long as the block runs."""
    report(what)
    try:
        yield
    finally:
        finished()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send the progress of this thread to `listener`. For another thread, see the function `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
