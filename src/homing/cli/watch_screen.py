"""The live view of `homing watch` on a terminal: reports in, a screen that fits the window out.

    Report --take--> WatchScreen --lines(width, height)--> rich.live on the alternate screen --> a summary at the end

The screen has the run and its state, problems and alerts, the phases, the figures, the loss, the money, the latest
sample, the last events, the guards, and how to stop. In a low window, events, sample and curve shrink first. Reports
contain text from stores and models, so every text passes `output.safe` and is never read as markup.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from homing.cli import output
from homing.cli.loss_sparkline import Curve
from homing.cloud.watch.follow import Report
from homing.units import format_bytes, format_count, format_duration, format_usd

__all__ = ["WatchScreen", "on_screen"]

_WIDE = 120  # from this width on, sample and events are to the right of the rest
_ROOMY = 18  # from this many free lines on, an empty line separates curve, sample and events
_MOST_EVENTS = 200
_SHOWN_ALERTS = 3  # the summary has all of them
_REFRESHES_PER_S = 4
_NEAR_LIMIT = 0.8  # share of the limit from which the money is drawn as a warning
_STATES = {
    "running": "green", "training": "green", "done": "green", "failed": "red", "unfinished": "red", "stopped": "yellow",
    "launching": "cyan",
}  # fmt: skip
_LABEL = "dim"
_ASCII = str.maketrans("─│●✓·▸━█▇▆▅▄▃▂▁◆…", "-|*+->=####:::.o.")  # for a terminal whose encoding lacks these characters
_WRAPPER = Console(file=io.StringIO())  # rich wraps text only for a console; its own width is not used


class WatchScreen:
    """What is known about the run so far, drawn to fit any window."""

    def __init__(self, name: str, typed: str, now: Callable[[], float] = time.time) -> None:
        self._name, self._typed, self._now = output.safe(name), output.safe(typed), now
        self._lock = threading.RLock()  # the refresh thread draws while the main thread takes reports
        self._line = self._end = self._problem = ""
        self._seen: dict[str, Any] = {}  # data of the newest head and line
        self._head_text = ""
        self._alerts: deque[str] = deque(maxlen=_MOST_EVENTS)
        self._events: deque[tuple[float | None, str]] = deque(maxlen=_MOST_EVENTS)
        self._sample_name, self._sample = "", ""
        self._curve = Curve()
        self._taken_at = now()

    def take(self, report: Report) -> None:
        with self._lock:
            self._taken_at = self._now()
            text, data = output.safe(report.text), report.data
            if report.kind == "curve":
                self._curve.add(data["points"])
            elif report.kind in ("head", "line"):
                self._seen |= data
                if report.kind == "line":
                    self._line = text
                    # The store has answered. A provider that does not answer is reported once, and then in each line.
                    self._problem = output.safe(" ".join(data.get("problems", ())))
                else:
                    self._head_text = text
            elif report.kind == "sample":
                self._sample_name, self._sample = output.safe(str(data.get("name", ""))), text
            elif report.kind == "alert":
                self._alerts.append(f"{_clock(self._event_time(data) or self._now())} {text}")
            elif report.kind == "problem":
                self._problem = text
            elif report.kind == "end":
                self._end = text
                self._seen |= {"state": data.get("state", "")}
            else:
                self._events.append((self._event_time(data), text))

    def note(self, text: str) -> None:
        """Show a notice of the library among the events."""
        if text:
            with self._lock:
                self._events.append((self._now(), output.safe(text)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or options.size.height
        with self._lock:
            yield from self.lines(options.max_width, height, is_ascii=options.ascii_only)

    # --- layout ---

    def lines(self, width: int, height: int, *, is_ascii: bool = False) -> list[Text]:
        """Return at most `height` lines that are at most `width` columns wide."""
        is_wide = width >= _WIDE
        main = (width - 3) // 2 if is_wide else width
        top = [*self._title(width), *self._warnings(width)]
        middle = [*self._phases(main), *self._figures(main), *self._money(main)]
        bottom = self._footer(width)
        free = height - len(top) - len(middle) - len(bottom)
        most = min(free, 13) if is_wide else _half_of(free)
        curve = self._curve.lines(self._phase(), main, most)
        gap = [Text("")] if free >= _ROOMY else []
        middle = [*middle, *gap, *curve] if curve else middle
        if is_wide:
            middle = _beside(middle, self._texts(width - main - 3, height - len(top) - len(bottom), []), main)
        else:
            middle += self._texts(width, free - len(curve) - len(gap), gap)
        shown = [*top, *middle][: max(0, height - len(bottom))]
        shown += [Text("")] * (height - len(bottom) - len(shown))
        shown = [*shown, *bottom][:height]
        for number, line in enumerate(shown):
            line = Text(line.plain.translate(_ASCII), spans=line.spans) if is_ascii else line.copy()
            line.no_wrap = True
            line.truncate(width, overflow="ellipsis")
            shown[number] = line
        return shown

    def _texts(self, width: int, room: int, gap: list[Text]) -> list[Text]:
        """Return the latest sample and the last events, which share the remaining lines, each after a `gap`."""
        sample = _wrapped(self._sample, width - 2)[: max(2, room // 3)] if self._sample else []
        made: list[Text] = []
        if sample and room >= 3:
            made += [*gap, _rule(f"Latest sample, {_sample_place(self._sample_name)}", width)]
            made += [Text(f"  {line}") for line in sample[: room - 1]]
        left = room - len(made) - len(gap) - 1
        if left >= 1:
            shown: list[Text] = []
            for event in reversed(self._events):
                lines = _event_lines(event, width)
                if shown and len(lines) + len(shown) > left:
                    break
                shown = [*lines, *shown][:left]
            made += [*gap, _rule("Last events", width), *(shown or [Text("  None so far.", style=_LABEL)])]
        return made

    # --- parts ---

    def _title(self, width: int) -> list[Text]:
        state = str(self._seen.get("state") or "reading the run")
        title = Text.assemble((self._name, "bold"), "  ", (f"● {state}", f"bold {_STATES.get(state, '')}".strip()))
        if machine := self._machine():
            title.append(f"  {machine}")
        since = self._seen.get("began_at")
        if since is not None:
            title.append(f"  {format_duration(max(0.0, self._now() - since))} since the start", style=_LABEL)
        return [title, Text("─" * width, style=_LABEL)]

    def _machine(self) -> str:
        if self._seen.get("is_trained_here"):
            return "on this computer"
        parts = [str(self._seen.get(key) or "") for key in ("provider", "offer")]
        machine = output.safe(" ".join(filter(None, parts)))
        attempt = self._seen.get("attempt") or 1
        return f"{machine}{f', attempt {attempt}' if attempt > 1 else ''}"

    def _warnings(self, width: int) -> list[Text]:
        made = []
        for text in list(self._alerts)[-_SHOWN_ALERTS:]:
            made += [Text(line, style="bold red") for line in _wrapped(f"! {text}", width)[:3]]
        if self._problem:
            made += [Text(line, style="yellow") for line in _wrapped(f"Warning: {self._problem}", width)[:3]]
        if self._end:
            color = _STATES.get(str(self._seen.get("state")), "")
            made += [Text(line, style=f"bold {color}".strip()) for line in _wrapped(self._end, width)[:3]]
        return made

    def _phases(self, width: int) -> list[Text]:
        """Return one line per phase: done, current with a bar, or next."""
        beat, current = self._beat(), self._phase()
        if not beat and not self._plan():
            return []
        planned = [(str(each["phase"]), each["num_steps"]) for each in self._plan()]
        if not planned and current:
            planned = [(current, beat.get("num_steps") or 0)]
        at = next((number for number, (phase, _) in enumerate(planned) if phase == current), -1)
        is_done = self._seen.get("state") == "done"
        widest = max((len(phase) for phase, _ in planned), default=0)
        made = []
        for number, (phase, num_steps) in enumerate(planned):
            step = beat.get("step") or 0
            if number < at or is_done:
                mark, style, text = "✓", "green", f"done, {num_steps:,} steps" if num_steps else "done"
            elif number > at:
                mark, style, text = "·", _LABEL, f"next, {num_steps:,} steps" if num_steps else "next"
            else:
                num_steps = beat.get("num_steps") or num_steps or 0
                share = min(1.0, step / num_steps) if num_steps else 0.0
                mark, style, text = "▸", "bold", f"step {step:,} of {num_steps:,}, {share:.0%}"
                if beat.get("end_step") is not None:
                    text += f", landing at {beat['end_step']:,}"
                room = width - widest - len(text) - 6
                if room >= 8:
                    line = Text.assemble((f"{mark} {phase:<{widest}}  ", style))
                    made.append(line.append_text(_bar(share, min(room, 40), "cyan")).append(f"  {text}"))
                    continue
            made.append(Text(f"{mark} {phase:<{widest}}  {text}", style=style))
        return made

    def _figures(self, width: int) -> list[Text]:
        beat = self._beat()
        cells: list[tuple[str, str]] = []
        figures: dict[str, float] = self._seen.get("figures") or {}
        if self._phase() == "rl" and "reward" in figures:
            cells.append(("reward", f"{figures['reward']:.3f}"))
        elif beat.get("loss") is not None:
            cells.append(("loss", f"{beat['loss']:.3f}"))
        if (held_out := self._curve.held_out(self._phase())) is not None:
            cells.append(("validation", f"{held_out.value:.3f}"))
            if held_out.bits_per_byte is not None:
                cells.append(("bits per byte", f"{held_out.bits_per_byte:.3f}"))
        if beat.get("tokens_per_s") is not None:
            cells.append(("tok/s", format_count(beat["tokens_per_s"])))
        if beat.get("mfu") is not None:
            cells.append(("MFU", f"{beat['mfu']:.0%}"))
        use = beat.get("use") or {}
        if "gpu" in use:
            cells.append(("GPU", f"{use['gpu']:.0%}"))
        if "gpu_memory" in use:
            cells.append(("GPU memory", f"{use['gpu_memory']:.0%}"))
        elif beat.get("memory_bytes"):
            cells.append(("GPU memory", format_bytes(beat["memory_bytes"])))
        return _flowed(cells, width) if cells else self._waiting(width)

    def _waiting(self, width: int) -> list[Text]:
        """Say what the run waits for before its first metrics, and for how long so far."""
        if self._end:
            return []
        beat = self._beat()
        doing = {"booting": "the instance to boot", "fetching": "the instance to fetch the inputs"}.get(
            str(beat.get("state") or ""), "the first metrics" if self._seen else "the first report"
        )
        since = beat.get("started_at", self._seen.get("began_at"))
        so_far = f", {format_duration(max(0.0, self._now() - since))} so far" if since is not None else ""
        return [Text(line, style="cyan") for line in _wrapped(f"Waiting for {doing}{so_far}.", width)]

    def _money(self, width: int) -> list[Text]:
        eta_s, is_whole, end_usd = self._ahead()
        time_left = []
        if eta_s is not None and not self._end:
            left_s = max(0.0, eta_s - (self._now() - self._taken_at))
            ends_at = _clock(self._now() + left_s, "%H:%M")
            of = "" if is_whole else " of this phase"
            time_left = [("ETA", f"{format_duration(left_s)}{of}, at {ends_at}")]
        if self._seen.get("is_trained_here"):
            return _flowed([*time_left, ("billed", "nothing")], width)
        if self._seen.get("spend_usd") is None:
            return []
        spend, limit = Decimal(self._seen["spend_usd"]), self._seen.get("spend_limit_usd")
        text = format_usd(spend) + (f" of {format_usd(Decimal(limit))}" if limit is not None else ", no limit")
        line = Text.assemble(("spent ", _LABEL), (text, "bold"))
        share = float(spend / Decimal(limit)) if limit is not None and Decimal(limit) else 0.0
        is_over = end_usd is not None and limit is not None and end_usd > Decimal(limit)
        if limit is not None and width - len(text) >= 24:
            color = "red" if share >= 1 else "yellow" if share >= _NEAR_LIMIT else "green"
            line.append("  ").append_text(_bar(min(1.0, share), min(30, width - len(text) - 16), color))
            line.append(f"  {share:.0%}")
        cells = list(time_left)
        if self._seen.get("rate_usd_per_hour"):
            cells.append(("rate", f"{format_usd(Decimal(self._seen['rate_usd_per_hour']))}/h"))
        if end_usd is not None and not self._end:
            cells.append(("at the end", f"about {format_usd(end_usd)}" + (", over the limit" if is_over else "")))
        return [line, *_flowed(cells, width, "bold yellow" if is_over else "bold")]

    def _footer(self, width: int) -> list[Text]:
        made = [Text("─" * width, style=_LABEL)]
        if guards := self._guards():
            wrapped = _wrapped(guards, width - 7)[:2]
            made += [Text.assemble(("       " if n else "guards ", _LABEL), line) for n, line in enumerate(wrapped)]
        if self._end:
            return made
        stop = f"Ctrl-C leaves, the run goes on.  Stop the run: homing stop {self._typed}"
        return [*made, *(Text(line, style=_LABEL) for line in _wrapped(stop, width)[:2])]

    def _guards(self) -> str:
        if self._seen.get("is_trained_here") or self._end:
            return ""
        beat = self._beat()
        has_dead_man = beat.get("has_dead_man", self._seen.get("has_dead_man"))
        if has_dead_man is None:
            return "this window, until the instance reports its own"
        on_instance = self._seen.get("guards") or f"agent{' and dead-man process' if has_dead_man else ' only'}"
        return f"here: this window; on the instance: {output.safe(on_instance)}"

    # --- data ---

    def _beat(self) -> dict[str, Any]:
        """Return the newest figures: of the heartbeat, or of the trainer if the run is on this computer."""
        return self._seen.get("heartbeat") or self._seen.get("metric") or {}

    def _phase(self) -> str:
        return str(self._beat().get("phase") or self._seen.get("phase") or self._curve.last_phase)

    def _plan(self) -> Sequence[dict[str, Any]]:
        phases = self._seen.get("phases") or ()
        return [each if isinstance(each, dict) else {"phase": each, "num_steps": 0} for each in phases]

    def _ahead(self) -> tuple[float | None, bool, Decimal | None]:
        """Return the seconds left, whether they include the later phases, and the predicted dollars."""
        found = self._seen.get("ahead")
        if found:
            return found["eta_s"], found["is_whole"], found["end_usd"]
        if self._seen.get("is_trained_here") and self._beat().get("eta_s") is not None:
            phases = [each["phase"] for each in self._plan()]
            return self._beat()["eta_s"], not phases or phases[-1] == self._phase(), None
        return None, True, None

    def _event_time(self, data: dict[str, Any]) -> float | None:
        return data.get("t") if isinstance(data.get("t"), (int, float)) else None

    # --- what stays in the scrollback ---

    def summary(self) -> list[str]:
        """Return the last state as plain lines, for the scrollback."""
        made = [f"{self._name}  {self._machine()}".rstrip(), self._line]
        made += [f"! {text}" for text in self._alerts]
        if self._problem:
            made.append(f"warning: {self._problem}")
        if self._curve.summary(self._phase()):
            made.append(self._curve.summary(self._phase()))
        return [*filter(None, made), *([self._end] if self._end else [])]


@contextlib.contextmanager
def on_screen(screen: WatchScreen) -> Iterator[None]:
    """Draw the screen until the block ends, however it ends, and restore the terminal. Ctrl-Z also restores it."""
    console = Console(file=cast(IO[str], _Terminal()), highlight=False, markup=False, emoji=False)
    live = Live(
        screen, console=console, screen=True, refresh_per_second=_REFRESHES_PER_S,
        redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
    # `with live` would not restore the terminal if Ctrl-C arrived during the first drawing.
    with _following_window(live):
        try:
            live.start(refresh=True)
            yield
        finally:
            live.stop()


@contextlib.contextmanager
def _following_window(live: Live) -> Iterator[None]:
    """Draw anew when the window changes its size, and leave the screen while the process is suspended (Ctrl-Z)."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return

    def redraw(number: int, frame: object) -> None:
        if not live.is_started:
            return
        live.console.clear()  # what was drawn for the old size may have been wrapped
        live.refresh()

    def suspend(number: int, frame: object) -> None:
        is_drawn = live.is_started
        live.stop()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns once the shell continues the process
        signal.signal(signal.SIGTSTP, suspend)
        if is_drawn:
            live.start(refresh=True)

    handlers = {signal.SIGTSTP: suspend, signal.SIGWINCH: redraw}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Terminal:
    """The terminal behind stdout, for our own escape sequences. Secrets are still masked."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.encoding = getattr(sys.stdout, "encoding", "utf-8") or "utf-8"
        self._stream = sys.stdout

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # the terminal was closed; the signal that says so ends the watch
            output.draw(text, self._stream)
        return len(text)

    def flush(self) -> None:
        """Do nothing, because `write` flushes."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()


# --- lines ---


def _clock(t: float, shape: str = "%H:%M:%S") -> str:
    try:
        return time.strftime(shape, time.localtime(t))
    except (OverflowError, ValueError, OSError):  # a time from the instance that is on no calendar
        return "?"


def _half_of(free: int) -> int:
    """Return how many of the free lines the curve gets: none if it would leave nothing for sample and events."""
    return 0 if free < 4 else min(9, max(4, free // 2))


def _rule(title: str, width: int) -> Text:
    return Text.assemble((f"{title} ", "bold"), ("─" * max(0, width - len(title) - 1), _LABEL))


def _wrapped(text: str, width: int) -> list[str]:
    """Return the text in lines of at most `width` columns. Wide characters count as two."""
    lines = Text(text).wrap(_WRAPPER, max(8, width), tab_size=4)
    return [line.plain.rstrip() for line in lines]


def _event_lines(event: tuple[float | None, str], width: int) -> list[Text]:
    at, text = event
    first, *rest = _wrapped(text, width - 11) or [""]
    clock = f"{_clock(at):<8}" if at is not None else " " * 8
    return [
        Text.assemble((f"  {clock} ", _LABEL), first),
        *(Text(" " * 11 + line) for line in rest[:2]),
    ]


def _bar(share: float, width: int, color: str) -> Text:
    filled = round(share * width)
    return Text.assemble(("━" * filled, color), ("─" * (width - filled), _LABEL))


def _flowed(cells: Sequence[tuple[str, str]], width: int, style: str = "bold") -> list[Text]:
    """Return the labeled values in as few lines as possible, never breaking a line inside a value."""
    rows: list[Text] = []
    for label, value in cells:
        cell = Text.assemble((f"{label} ", _LABEL), (value, style))
        if rows and rows[-1].cell_len + 3 + cell.cell_len <= width:
            rows[-1].append("   ").append_text(cell)
        else:
            rows.append(cell)
    return rows


def _beside(left: list[Text], right: list[Text], width: int) -> list[Text]:
    rows = []
    for number in range(max(len(left), len(right))):
        row = left[number].copy() if number < len(left) else Text("")
        row.truncate(width, overflow="ellipsis", pad=True)
        rows.append(row.append(" │ ", style=_LABEL).append_text(right[number] if number < len(right) else Text("")))
    return rows


def _sample_place(name: str) -> str:
    """Return `pretrain, step 1,200` for the file name `pretrain-00001200.txt`."""
    phase, _, step = name.removesuffix(".txt").rpartition("-")
    return f"{phase}, step {int(step):,}" if phase and step.isdecimal() else name
