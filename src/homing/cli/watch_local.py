"""`watch`, `status`, `logs` and `stop` for a run trained on this computer: the same output, without money.

  run directory --EventFeed--> events, validations, samples, the progress line ... how it ended
  stop --control.json--> trainer, between two steps

Nothing is guarded here, because there is no instance to bill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from homing.cli.local_runs import Trained, look_again, store_here
from homing.cloud.contact.heartbeats import Tail
from homing.cloud.home import Home
from homing.cloud.reconcile.run_status import check_interval, how_far, newest_in
from homing.cloud.watch.event_feed import EventFeed, Report
from homing.cloud.watch.log_files import check_program, follow_tail
from homing.errors import HomingError, UsageError
from homing.store import run_key
from homing.units import format_bytes, format_duration
from homing.wire import codec, file_names
from homing.wire.control_files import Control

__all__ = ["ask_to_stop", "log_of", "newest_saved", "progress_of", "wait_for_stop", "watch_here"]

_POLL_S = 2.0
_STOP_POLL_S = 0.5
_NO_WORD = "no trainer is running, and the last one left no error message."


def watch_here(home: Home, run: Trained, *, every_s: float) -> Iterator[Report]:
    """Yield reports of the run; the last is `end`, when no trainer is running any more."""
    check_interval(every_s)
    feed, last, due = EventFeed(store_here(home), run.run), "", home.world.monotonic()
    is_first = True
    while True:
        # Check the state before reading the files, so that everything written up to the end is read.
        run = look_again(home, run)
        yield from feed.reports()
        if is_first and run.is_live:
            saved = f"saved: {newest_saved(home, run) or 'no checkpoint yet'}"
            parts = ["training on this computer, not billing", saved, feed.learned()]
            yield Report("head", " | ".join(filter(None, parts)), run.to_dict())
        is_first = False
        line = progress_of(run, feed)
        if line != last and (home.world.monotonic() >= due or not run.is_live):
            last, due = line, home.world.monotonic() + every_s
            yield Report("line", line, _data(run, feed))
        if not run.is_live:
            if learned := feed.learned():
                yield Report("event", learned)
            yield Report("end", f"{run.state}: {run.reason or _NO_WORD}", run.to_dict())
            return
        home.world.sleep(min(every_s, _POLL_S))


def progress_of(run: Trained, feed: EventFeed) -> str:
    """Return the progress line in the same order as for a rented run; during training also GPU memory and ETA."""
    metric = feed.metric
    if metric is None or metric.phase != run.phase:  # nothing reported for this phase yet
        return run.where
    parts = how_far(
        dataclasses.replace(metric, step=max(metric.step, run.step or 0)), run.phases, feed.figures[metric.phase]
    )
    if run.is_live and metric.memory_bytes:
        parts.append(f"GPU memory {format_bytes(metric.memory_bytes)}")
    if run.is_live and metric.eta_s is not None:
        is_last = metric.phase == run.phases[-1] if run.phases else True
        parts.append(f"eta {format_duration(metric.eta_s)}" + ("" if is_last else " of this phase"))
    return " | ".join(parts)


def _data(run: Trained, feed: EventFeed) -> dict[str, Any]:
    metric = codec.dump(feed.metric) if feed.metric is not None else None
    return {**run.to_dict(), "metric": metric, "figures": feed.figures.get(run.phase, {})}


def newest_saved(home: Home, run: Trained) -> str:
    """Return the newest complete checkpoint, such as `pretrain step 1,200`; "" if there is none."""
    return newest_in(store_here(home), run.run, lambda: list(run.phases))


def log_of(
    home: Home, run: Trained, program: str, *, is_following: bool, notify: Callable[[str], None]
) -> Iterator[str]:
    """Yield the lines of the trainer's log; a local run has no other program."""
    check_program(program, run.run)
    if program != "trainer":
        raise UsageError(
            what=f"{run.run} has no log of {program}.",
            why=f"It was trained locally: {program} runs only on rented instances.",
            fix=f"homing logs {run.run}",
        )
    tail = Tail(store_here(home), run_key(run.run, file_names.LOGS, f"{program}.log"))
    if not is_following:
        return iter(tail.lines())
    return follow_tail(tail, lambda: not look_again(home, run).is_live, home.world, notify)


def ask_to_stop(home: Home, run: Trained) -> None:
    if not run.is_live:
        raise UsageError(
            what=f"{run.run} is not training: it is {run.state}.", why=run.reason or _NO_WORD, fix=run.next_words
        )
    control = Control(stop=True, reason="Stopped from another terminal.")
    home.world.write(home.run_dir(run.run) / file_names.CONTROL, codec.dumps(control).encode())


def wait_for_stop(home: Home, run: Trained, *, timeout_s: float) -> Trained:
    deadline = home.world.monotonic() + timeout_s
    while (run := look_again(home, run)).is_live:
        if home.world.monotonic() >= deadline:
            raise HomingError(
                what=f"{run.run} did not stop within {format_duration(timeout_s)}.",
                why=f"The trainer checks for a stop after each step; it is at {run.where}. The request stays.",
                fix=f"homing watch {run.run}   or end it without a checkpoint: Ctrl-C twice where it was started",
            )
        home.world.sleep(_STOP_POLL_S)
    return run
