"""A run that is trained on this computer, as `watch`, `status`, `logs` and `stop` know it: the same words, no money.

    run directory --News--> events, validations, samples, the line of numbers ... how it ended
    stop --control.json--> trainer, between two steps

Nothing is guarded here: there is no machine that anybody could be charged for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from homing.cli.trained_here import Trained, look_again, store_here
from homing.cloud.home import Home
from homing.cloud.logs import check_program, follow_tail
from homing.cloud.news import News, Report
from homing.cloud.signs import Tail
from homing.cloud.status import check_interval, how_far, newest_in
from homing.errors import HomingError, UsageError
from homing.store import run_key
from homing.units import format_bytes, format_duration
from homing.wire import codec, names
from homing.wire.control import Control

__all__ = ["ask_to_stop", "log_of", "newest_saved", "progress_of", "wait_for_stop", "watch_here"]

_POLL_S = 2.0
_STOP_POLL_S = 0.5
_NO_WORD = "no trainer is at work on it, and the last one left no word."


def watch_here(home: Home, run: Trained, *, every_s: float) -> Iterator[Report]:
    """Ends with a Report `end`, once no trainer is at work on it."""
    check_interval(every_s)
    news, last, due = News(store_here(home), run.run), "", home.world.monotonic()
    is_first = True
    while True:
        # Looked at before its lines are read: what it writes until its end is then read after it.
        run = look_again(home, run)
        yield from news.reports()
        if is_first and run.is_live:
            saved = f"saved: {newest_saved(home, run) or 'no checkpoint yet'}"
            parts = ["trained on this computer, nothing bills", saved, news.learned()]
            yield Report("head", " | ".join(filter(None, parts)), run.to_dict())
        is_first = False
        line = progress_of(run, news)
        if line != last and (home.world.monotonic() >= due or not run.is_live):
            last, due = line, home.world.monotonic() + every_s
            yield Report("line", line, _data(run, news))
        if not run.is_live:
            if learned := news.learned():
                yield Report("event", learned)
            yield Report("end", f"{run.state}: {run.reason or _NO_WORD}", run.to_dict())
            return
        home.world.sleep(min(every_s, _POLL_S))


def progress_of(run: Trained, news: News) -> str:
    """Fixed order, as of a rented run; while it is at work also the card's memory and the eta."""
    told = news.metric
    if told is None or told.phase != run.phase:  # a phase of which nothing was told yet
        return run.where
    parts = how_far(dataclasses.replace(told, step=max(told.step, run.step or 0)), run.phases, news.figures[told.phase])
    if run.is_live and told.memory_bytes:
        parts.append(f"card memory {format_bytes(told.memory_bytes)}")
    if run.is_live and told.eta_s is not None:
        is_last = told.phase == run.phases[-1] if run.phases else True
        parts.append(f"eta {format_duration(told.eta_s)}" + ("" if is_last else " of this phase"))
    return " | ".join(parts)


def _data(run: Trained, news: News) -> dict[str, Any]:
    metric = codec.dump(news.metric) if news.metric is not None else None
    return {**run.to_dict(), "metric": metric, "figures": news.figures.get(run.phase, {})}


def newest_saved(home: Home, run: Trained) -> str:
    """The newest whole checkpoint, `pretrain step 1,200`; "" where there is none."""
    return newest_in(store_here(home), run.run, lambda: list(run.phases))


def log_of(home: Home, run: Trained, program: str, *, is_following: bool, tell: Callable[[str], None]) -> Iterator[str]:
    """The trainer's; there is no other program."""
    check_program(program, run.run)
    if program != "trainer":
        raise UsageError(
            what=f"{run.run} has no log of {program}.",
            why=f"It was trained on this computer: {program} works on rented machines.",
            fix=f"homing logs {run.run}",
        )
    tail = Tail(store_here(home), run_key(run.run, names.LOGS, f"{program}.log"))
    if not is_following:
        return iter(tail.lines())
    return follow_tail(tail, lambda: not look_again(home, run).is_live, home.world, tell)


def ask_to_stop(home: Home, run: Trained) -> None:
    if not run.is_live:
        raise UsageError(
            what=f"{run.run} is not being trained: it is {run.state}.", why=run.reason or _NO_WORD, fix=run.next_words
        )
    control = Control(stop=True, reason="A stop was asked for from another terminal.")
    home.world.write(home.run_dir(run.run) / names.CONTROL, codec.dumps(control).encode())


def wait_for_stop(home: Home, run: Trained, *, timeout_s: float) -> Trained:
    deadline = home.world.monotonic() + timeout_s
    while (run := look_again(home, run)).is_live:
        if home.world.monotonic() >= deadline:
            raise HomingError(
                what=f"{run.run} did not stop within {format_duration(timeout_s)}.",
                why=f"The trainer looks for a stop after each step; it is at {run.where}. The request stays.",
                fix=f"homing watch {run.run}   or Ctrl-C, twice, where it was started: at once, without a checkpoint",
            )
        home.world.sleep(_STOP_POLL_S)
    return run
