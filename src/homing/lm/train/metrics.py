"""Writes metrics.jsonl, events.jsonl and the progress line on the terminal.

Each line is flushed to the operating system as soon as it is written, so a killed trainer leaves at most one incomplete
line, and the agent can detect a stall from the time of the last line. When a run resumes from a checkpoint, metrics of
later steps are removed, because these steps will be trained again; events are kept as a record of what happened.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from homing.units import format_count, format_duration
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import MISSING_REWARD, figure_of
from homing.wire.event_lines import Event, Metric

__all__ = ["Journal", "Notify", "SilentJournal", "finite", "progress_line"]

# While a long task (such as compiling) makes no visible progress, a message reports at this interval that the task is
# still running. After the maximum duration the messages stop, so that stall detection can take effect.
_STILL_EVERY_S = 30.0
_STILL_FOR_S = 1800.0
_MOST_OWN = 4  # maximum number of a phase's extra metrics to show on the progress line


class Notify(Protocol):
    """A function that emits an event for the phase, at `step` (by default the current step).

    With `notice`, it also prints the text on the terminal.
    """

    def __call__(
        self, kind: str, text: str, *, notice: bool = False, step: int | None = None, **data: object
    ) -> None: ...


class Journal:
    """Writes the trainer's log files, and prints lines for the user with `say`. A write error never stops a run."""

    def __init__(self, run_dir: Path, *, say: Callable[[str], None], writes_csv: bool = False) -> None:
        self.run_dir = run_dir
        self.say = say
        self.writes_csv = writes_csv
        self.phases: Sequence[str] = ()  # the run's phases, in order
        self._lock = threading.Lock()  # held while writing, because `still` writes from a separate thread
        self._files: dict[str, IO[str]] = {}
        self._is_torn: set[str] = set()

    def event(self, kind: str, text: str, *, phase: str = "", step: int | None = None, **data: Any) -> None:
        event = Event(t=time.time(), source="trainer", kind=kind, text=text, phase=phase, step=step, data=data)
        self._append(file_names.EVENTS, codec.dumps(event))

    def notice(self, kind: str, text: str, *, phase: str = "", step: int | None = None, **data: Any) -> None:
        """Write an event and also print it on the terminal."""
        self.say(text)
        self.event(kind, text, phase=phase, step=step, **data)

    def metric(self, metric: Metric) -> None:
        self._append(file_names.METRICS, codec.dumps(metric))
        if self.writes_csv:
            self._append(file_names.METRICS_CSV, _csv_row(dataclasses.astuple(metric)))
        self.say(progress_line(metric, self.phases))

    @contextlib.contextmanager
    def still(self, kind: str, doing: str, *, phase: str) -> Iterator[None]:
        """While the context is active, report periodically that a task is still in progress.

        The reports stop if the task takes suspiciously long.
        """
        done, begun = threading.Event(), time.monotonic()

        def notify() -> None:
            while not done.wait(_STILL_EVERY_S) and (passed := time.monotonic() - begun) < _STILL_FOR_S:
                self.notice(kind, f"Still {doing}, {format_duration(passed)} so far.", phase=phase)

        thread = threading.Thread(target=notify, name="still", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def cut_metrics(self, is_kept: Callable[[Metric], bool]) -> int:
        """Atomically remove incomplete lines and metrics for which `is_kept` is false; return how many were removed."""
        path = self.run_dir / file_names.METRICS
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        kept = [(line, metric) for line in lines if (metric := _parse(line)) is not None and is_kept(metric)]
        self._close(file_names.METRICS)
        if len(kept) != len(lines):
            self._replace(path, "".join(f"{line}\n" for line, _ in kept))
        if self.writes_csv:
            self._close(file_names.METRICS_CSV)
            header = _csv_row([field.name for field in dataclasses.fields(Metric)])
            rows = [header, *(_csv_row(dataclasses.astuple(metric)) for _, metric in kept)]
            self._replace(self.run_dir / file_names.METRICS_CSV, "".join(f"{row}\n" for row in rows))
        return len(lines) - len(kept)

    def sync(self) -> None:
        """Flush the logs to disk. Call this before a checkpoint that includes the logged steps becomes visible."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())

    def close(self) -> None:
        for name in list(self._files):
            self._close(name)

    def _append(self, name: str, line: str) -> None:
        with self._lock:
            try:
                file = self._open(name)
                file.write(f"\n{line}\n" if name in self._is_torn else f"{line}\n")
                file.flush()
                self._is_torn.discard(name)
            except OSError as exc:
                # If the disk is full, training continues. The next line that can be written starts with a line break,
                # to terminate the incomplete line.
                self._close(name)
                if name not in self._is_torn:
                    self.say(
                        f"warning: {name} cannot be written ({exc}); its new lines are lost, but training continues."
                    )
                self._is_torn.add(name)

    def _open(self, name: str) -> IO[str]:
        if name not in self._files:
            path = self.run_dir / name
            if path.exists() and not _ends_with_newline(path):
                self._is_torn.add(name)
            self._files[name] = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        return self._files[name]

    def _close(self, name: str) -> None:
        if name in self._files:
            with contextlib.suppress(OSError):
                self._files.pop(name).close()

    def _replace(self, path: Path, text: str) -> None:
        temporary = path.with_name(f".{path.name}.partial")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


class SilentJournal(Journal):
    """The journal used by every rank except the first. It writes no log files."""

    def _append(self, name: str, line: str) -> None:
        pass

    def cut_metrics(self, is_kept: Callable[[Metric], bool]) -> int:
        return 0


def progress_line(metric: Metric, phases: Sequence[str] = ()) -> str:
    """Format a metric as `sft 2/3 | step 1,200/20,000 | loss 3.214 | lr 3.0e-04 | 412k tok/s | mfu 41% | eta 2h10m`.

    The phase is shown only if the run has several.
    """
    parts = [f"{metric.phase} {phases.index(metric.phase) + 1}/{len(phases)}"] if len(phases) > 1 else []
    parts.append(f"step {metric.step:,}/{metric.num_steps:,}")
    parts.append("loss not finite" if metric.loss is None else f"loss {metric.loss:.3f}")
    if metric.lr is not None:
        parts.append(f"lr {metric.lr:.1e}")
    parts.append("- tok/s" if metric.tokens_per_s is None else f"{format_count(metric.tokens_per_s)} tok/s")
    parts.append("mfu -" if metric.mfu is None else f"mfu {metric.mfu:.0%}")
    if metric.val_loss is not None:
        bits = "" if metric.val_bits_per_byte is None else f" ({metric.val_bits_per_byte:.3f} bits/byte)"
        called = figure_of(metric.phase)
        parts.append(f"{called if called == MISSING_REWARD else 'val'} {metric.val_loss:.3f}{bits}")
    # Show only the first extra metrics, which are the most informative. All of them are in metrics.jsonl.
    own = [name for name in metric.more if not name.startswith("val_")][:_MOST_OWN]
    parts += [f"{name} {metric.more[name]:.3g}" for name in [*own, *(n for n in metric.more if n.startswith("val_"))]]
    if metric.eta_s is not None:
        parts.append(f"eta {format_duration(metric.eta_s)}")
    return " | ".join(parts)


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is NaN or infinite, because such values must not be logged."""
    return value if value is not None and math.isfinite(value) else None


def _parse(line: str) -> Metric | None:
    try:
        return codec.load(Metric, json.loads(line))
    except ValueError:
        return None


def _csv_row(values: Any) -> str:
    class Row:
        text = ""

        def write(self, text: str) -> None:
            self.text = text

    row = Row()
    csv.writer(row, lineterminator="").writerow(_csv_cell(value) for value in values)
    return row.text


def _csv_cell(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{name}={inner}" for name, inner in value.items())
    return "" if value is None else value


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
