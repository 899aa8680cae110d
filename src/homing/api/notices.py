"""Notices: messages from the library while it works, such as warnings or the name of the checkpoint it opens.

  say(text)                send one notice to the current listener
  listening(listener)      let `listener` receive them inside a `with` block

Without a listener they go to `logging.getLogger("homing")` at level INFO, so a library user sees them only on request.
The command line listens and prints them to stderr.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from homing.errors import NotChecked

__all__ = ["Listener", "listener", "listening", "say", "say_problems"]

Listener = Callable[[str], None]

_log = logging.getLogger("homing")
_listener: ContextVar[Listener | None] = ContextVar("homing_notices", default=None)


def say(text: str = "") -> None:
    listener()(text)


def listener() -> Listener:
    """Return the current listener, to pass it to a callback that runs in another thread."""
    return _listener.get() or _log_notice


def _log_notice(text: str) -> None:
    if text:
        _log.info("%s", text)


def say_problems(problems: Iterable[str]) -> None:
    """Say each problem, except providers without a key where nothing is known to be billing (`homing doctor`)."""
    for problem in problems:
        if not isinstance(problem, NotChecked):
            say(f"warning: {problem}")


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send the notices of this thread to `listener`. To another thread, pass `notices.listener()`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
