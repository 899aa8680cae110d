"""Draws the progress that the library reports: a bar on a terminal, otherwise a line every 30 seconds.

    homing.progress.report --> Bars.show --> rich.progress on stderr, erased when the work is over or a message comes

Nothing is drawn under --json or -q. Work that takes less than a moment draws nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, cast

from homing.cli import output
from homing.progress import SECONDS, Progress
from homing.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.progress import Progress as Drawn

__all__ = ["Bars"]

_LINE_S = 30.0
_QUICK_S = 0.3  # work that is over within this time draws no bar


class Bars:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._what = ""
        self._began_at = self._shown_at = 0.0
        self._drawn: Drawn | None = None
        self._is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")

    def show(self, progress: Progress) -> None:
        if output.is_json() or output.is_quiet():
            return
        with self._lock:
            now = time.monotonic()
            if progress.what != self._what:
                self.erase()
                self._what, self._began_at, self._shown_at = progress.what, now, now
            if not progress.what:
                return
            if self._is_terminal:
                self._draw(progress, now)
            elif now - self._shown_at >= _LINE_S:
                self._shown_at = now
                with contextlib.suppress(OSError):
                    output.say(describe(progress, now - self._began_at))

    def erase(self) -> None:
        """Remove the bar, so that a message or the next bar can take its place. The next report draws it again."""
        with self._lock:
            drawn, self._drawn = self._drawn, None
            if drawn is not None:
                drawn.stop()

    def _draw(self, progress: Progress, now: float) -> None:
        # Without a known end there may be no further report until the work is over, so draw at once.
        if self._drawn is None and progress.total and now - self._began_at < _QUICK_S:
            return
        drawn = self._drawn or _new()
        (task,) = drawn.task_ids
        drawn.update(
            task, completed=progress.done, total=progress.total or None, description=output.safe(progress.what),
            said=_amount(progress, now - self._began_at),
        )  # fmt: skip
        if self._drawn is None:
            self._drawn = drawn
            drawn.start()


def _new() -> Drawn:
    # Imported here because rich takes longer to load than most verbs run.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    console = Console(file=cast(IO[str], _Stderr()), highlight=False, markup=False, emoji=False)
    made = Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[said]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    made.add_task("", total=None, said="")
    return made


def describe(progress: Progress, took_s: float) -> str:
    """Return one line: what is done, how much of it, how fast, and how long it will still take or may take."""
    return f"{progress.what}: {_amount(progress, took_s)}"


def _amount(progress: Progress, took_s: float) -> str:
    if progress.detail:
        return progress.detail
    if progress.unit == SECONDS:
        return f"{format_duration(progress.done)} so far, at most {format_duration(progress.total)}"
    if not progress.total:
        return f"{format_duration(took_s)} so far"
    share = min(1.0, progress.done / progress.total)
    text = f"{format_bytes(progress.done)} of {format_bytes(progress.total)}, {share:.0%}"
    if progress.done and took_s >= 1 and share < 1:
        speed = progress.done / took_s
        text += f", {format_bytes(speed)}/s, eta {format_duration((progress.total - progress.done) / speed)}"
    return text


class _Stderr:
    """The terminal behind stderr, for our own escape sequences."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self.encoding = getattr(sys.stderr, "encoding", "utf-8") or "utf-8"

    def write(self, text: str) -> int:
        # The terminal may be gone. That must not end the work, which may be about to destroy an instance.
        with contextlib.suppress(OSError):
            output.draw(text, self._stream)
        return len(text)

    def flush(self) -> None:
        """Do nothing, because `write` flushes."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()
