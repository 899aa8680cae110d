"""All runs for the page, and what bills: the table of `homing runs`, kept up to date by three kinds of threads.

    every second     the ledger and the runs trained here: states, dollars so far
    money            `refresh`: every provider is asked and the ledger brought up to date, as `homing runs` does
    a look           one for each run that lives or was not looked at yet: heartbeat and outcome from its store

So a provider or a store that is slow, or silent, leaves its own line as it was and says so there; no other line waits.
It is no guard: what reached its limit is ended by the agent, the provider, `homing guard` or `homing watch`, not here.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from homing.cli.dashboard_run import Following, plan_of
from homing.cli.mask import Mask
from homing.cli.runs import HEADERS, billing_words, forgotten_row, forgotten_words, run_row, thing_row, trained_row
from homing.cli.trained_here import Trained, trained_here
from homing.cloud import meter
from homing.cloud.ahead import Planned
from homing.cloud.ask import ASK_S
from homing.cloud.home import Home
from homing.cloud.ledger import LedgerLine, Receipts, RunRow
from homing.cloud.lost import what_is_lost
from homing.cloud.providers.base import Resource
from homing.cloud.reconcile import refresh
from homing.cloud.status import Status, billing_lines, look, progress_line
from homing.cloud.survey import billing_things
from homing.errors import HomingError
from homing.units import format_moment
from homing.web.dashboard.app import NoSuchRun
from homing.web.dashboard.feed import Feed
from homing.wire.codec import WireError
from homing.world import World

__all__ = ["Board"]

TICK_S = 1.0
_UNSEEN_S = 5.0  # while nobody looks
_LOOK_S = 5.0  # at a run that lives
_MONEY_S = 10.0  # while something lives or bills and somebody looks
_IDLE_S = 60.0
_STALE_S = 2 * (_IDLE_S + ASK_S)
_MOST_ENDED = 30  # runs that have ended for good; all others are always shown
_MOST_AT_ONCE = 8  # looks; those that wait for longer than ASK_S do not count
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Look:
    began: float  # by the stop watch
    ended: float | None = None
    status: Status | None = None
    problem: str = ""

    def is_silent(self, now: float) -> bool:
        return self.ended is None and now - self.began > ASK_S


@dataclasses.dataclass
class _Money:
    asked_at: float | None = None
    things: list[Resource] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)


class Board:
    def __init__(self, path: Path) -> None:
        self._path, self._world = path, World()
        self._home = Home(path, self._world)
        self._asker = Home(path, World())  # for one thread alone: it remembers what was seen of the meter
        self._mask = Mask(self._world.environment())
        self._feed = Feed()
        self._ending = threading.Event()
        self._lock = threading.Lock()  # around the two below
        self._num_viewers = 0
        self._followed: dict[str, tuple[Following, int]] = {}  # with how many look at it
        self._looks: dict[str, _Look] = {}
        self._plans: dict[str, Planned] = {}  # by mark
        self._money = _Money()
        self._receipts: tuple[tuple[int, frozenset[str]], Receipts] | None = None
        self._is_busy = False  # something lives or bills

    # --- for the web ---

    @property
    def is_ending(self) -> bool:
        return self._ending.is_set()

    @property
    def _is_seen(self) -> bool:
        return bool(self._num_viewers or self._followed)

    @contextmanager
    def all_runs(self) -> Iterator[Feed]:
        with self._lock:
            self._num_viewers += 1
        try:
            yield self._feed
        finally:
            with self._lock:
                self._num_viewers -= 1

    def one_run(self, run_id: str) -> AbstractContextManager[Feed]:
        return self._followed_run(self._find(run_id))

    @contextmanager
    def _followed_run(self, run: RunRow | Trained) -> Iterator[Feed]:
        run_id = run.run if isinstance(run, Trained) else run.id
        with self._lock:
            following, num_viewers = self._followed.get(run_id) or (Following(Home(self._path, World()), run), 0)
            self._followed[run_id] = following, num_viewers + 1
        try:
            yield following.feed
        finally:
            with self._lock:
                following, num_viewers = self._followed.pop(run_id)
                if num_viewers > 1:
                    self._followed[run_id] = following, num_viewers - 1
                else:
                    following.leave()

    def _find(self, run_id: str) -> RunRow | Trained:
        """By its whole id alone: what is typed into an address never becomes a path."""
        here = (each for each in trained_here(self._home, self._home.ledger.run_ids()) if each.run == run_id)
        run = self._home.ledger.run(run_id) or next(here, None)
        if run is None:
            raise NoSuchRun(run_id)
        return run

    # --- looking ---

    def begin(self) -> None:
        for name, work in (("board", self._tick), ("money", self._ask)):
            threading.Thread(target=self._go_on, args=(name, work), name=f"homing-{name}", daemon=True).start()

    def end(self) -> None:
        self._ending.set()
        with self._lock:
            for following, _ in self._followed.values():
                following.leave()

    def _go_on(self, name: str, work: Callable[[], float]) -> None:
        """`work` again and again, each time after as long as it said."""
        pause_s = 0.0
        while not self._ending.wait(pause_s):
            try:
                pause_s = work()
            except Exception as exc:  # a page that stands still without a word would be believed
                is_told = isinstance(exc, (HomingError, WireError, OSError))
                said = _first_line(exc) if is_told else repr(exc)
                _log.log(logging.WARNING, "a look failed", exc_info=exc)
                self._feed.put(f"failure {name}", self._mask(f"What is shown is from before: {said}"))
                pause_s = _MONEY_S
            else:
                self._feed.put(f"failure {name}", "")

    def _ask(self) -> float:
        home = self._asker
        lost = what_is_lost(home)
        problems = [*lost, *refresh(home)]
        things, more = billing_things(home, problems)
        self._money = _Money(self._world.now(), things, problems + more)
        return _MONEY_S if self._is_busy and self._is_seen else _IDLE_S

    def _tick(self) -> float:
        rows, open_, known = self._rows(), self._home.ledger.open_lines(), self._home.ledger.run_ids()
        trained = trained_here(self._home, known)
        now = self._world.now()
        own = self._home.ledger.lines_of(row.id for row in rows)
        self._look_at(rows, own)
        statuses = [self._status(row, own[row.id], now) for row in rows]
        billing, money = billing_lines(open_), self._money
        forgotten = [line for line in billing if line.run_id not in known]
        self._is_busy = bool(billing) or any(row.is_live for row in rows)
        shown = [
            *(self._row(status, now) for status in statuses),
            *({**_cells(trained_row(each, now)), "is_live": each.is_live, "is_here": True, "line": _line_here(each),
               "at": each.began_at} for each in trained),
        ]  # fmt: skip
        # At work before ended, newest first.
        self._put("runs", sorted(shown, key=lambda row: (not row["is_live"], -row["at"])))
        problems = [*money.problems, *_stale(money, now)]
        words = billing_words(billing, money.things, problems)
        self._put(
            "money",
            {
                "words": words if money.asked_at is not None or billing else ["The providers are being asked."],
                "is_billing": bool(billing or money.things),
                "asked": format_moment(money.asked_at) if money.asked_at is not None else "",
                "beside": [
                    *(_cells(forgotten_row(line, now)) for line in forgotten),
                    *(_cells(thing_row(each, now)) for each in money.things),
                ],
                "problems": [*problems, *map(forgotten_words, forgotten)],
                "total": self._total(open_, now),
                "left_out": max(0, len(known) - len(rows)),
                "is_empty": not shown and not self._home.ledger.num_lines(),
                "home": str(self._home.path),
            },
        )
        self._feed.is_told.set()
        with self._lock:
            followed = [following for following, _ in self._followed.values()]
        for each in followed:
            each.say_silence()
        return TICK_S if self._is_seen else _UNSEEN_S

    def _rows(self) -> list[RunRow]:
        """Every run that is not over, and the newest of the others: a page with thousands of rows helps nobody."""
        return self._home.ledger.unfinished_runs(_MOST_ENDED)

    def _total(self, open_: list[LedgerLine], now: float) -> str:
        """Of all lines ever."""
        # Receipts stay as they are: they are added up again only when a line was written, closed or reopened.
        key = self._home.ledger.num_lines(), frozenset(line.mark for line in open_)
        if self._receipts is None or self._receipts[0] != key:
            self._receipts = key, self._home.ledger.receipts()
        receipts, billing = self._receipts[1], billing_lines(open_)
        if not receipts.number and not billing:
            return ""
        total = receipts.total_usd + meter.total_spend(billing, now)
        return ("at most " if receipts.is_at_most else "") + meter.show_usd(total)

    # --- one look for each run, side by side ---

    def _look_at(self, rows: list[RunRow], own: dict[str, list[LedgerLine]]) -> None:
        now = self._world.monotonic()
        under_way = [each for each in self._looks.values() if each.ended is None and not each.is_silent(now)]
        free = _MOST_AT_ONCE - len(under_way)
        for row in rows:
            last = self._looks.get(row.id)
            if last is not None and (last.ended is None or not self._is_due(row, own[row.id], last, now)):
                continue
            if free <= 0:
                return
            free -= 1
            self._looks[row.id] = current = _Look(now, status=last.status if last is not None else None)
            threading.Thread(
                target=self._look, args=(row, own[row.id], current), name=f"homing-look {row.id}", daemon=True
            ).start()

    def _is_due(self, row: RunRow, lines: list[LedgerLine], last: _Look, now: float) -> bool:
        """What lives, every few seconds while somebody looks; what has ended, once after its end, and again after a
        while where that look failed."""
        if row.is_live or billing_lines(lines):
            return self._is_seen and last.ended is not None and now - last.ended >= _LOOK_S
        if last.problem:
            return self._is_seen and last.ended is not None and now - last.ended >= _IDLE_S
        return last.status is None or last.status.run != row

    def _look(self, row: RunRow, lines: list[LedgerLine], current: _Look) -> None:
        try:
            current.status = look(Home(self._path, World()), row, lines)
            current.problem = current.status.problem
        except (HomingError, WireError, OSError) as exc:
            current.problem = _first_line(exc)
        except Exception as exc:  # our mistake, in a thread that nobody waits for: its line says so
            _log.exception("a look at %s failed", row.id)
            current.problem = f"The dashboard made a mistake here: {type(exc).__name__}: {exc}"
        finally:
            current.ended = self._world.monotonic()

    def _status(self, row: RunRow, lines: list[LedgerLine], now: float) -> Status:
        """The signs of the last look that was answered, with state and dollars of this moment."""
        last = self._looks[row.id].status if row.id in self._looks else None
        spend = meter.total_spend(lines, now)
        if last is None:
            return Status(row, lines, None, spend, None, at=now)
        is_same = bool(lines) and bool(last.lines) and lines[-1].mark == last.lines[-1].mark
        signs = last.signs if is_same or not lines else None  # of an earlier attempt they say nothing about this one
        return dataclasses.replace(last, run=row, lines=lines, signs=signs, spend_usd=spend, at=now)

    def _row(self, status: Status, now: float) -> dict[str, Any]:
        beat = status.signs.heartbeat if status.signs else None
        mark = status.lines[-1].mark if status.lines else ""
        plan = plan_of(self._plans, self._home, status.run, mark) if status.run.is_live else None
        last = self._looks.get(status.run.id)
        problem = last.problem if last is not None else ""
        if last is not None and last.is_silent(self._world.monotonic()):
            problem = (
                f"Its store has not answered for more than {ASK_S:g} s; states and dollars are those of the ledger."
            )
        return {
            **_cells(run_row(status, now)),
            "is_live": status.run.is_live or status.is_billing,
            "is_here": False,
            "line": progress_line(status, beat, plan=plan),
            "reason": status.run.reason,
            "problem": problem,
            "share": _share(status),
            "at": status.run.created_at,
        }

    def _put(self, name: str, value: Any) -> None:
        self._feed.put(name, self._mask(value))


def _stale(money: _Money, now: float) -> list[str]:
    """An answer from long ago says nothing about now: a provider hangs, or this computer slept."""
    if money.asked_at is None or now - money.asked_at < _STALE_S:
        return []
    return [f"The providers have not answered since {format_moment(money.asked_at)}."]


def _first_line(exc: Exception) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0]


def _cells(row: list[str]) -> dict[str, Any]:
    return dict(zip(HEADERS, row, strict=True))


def _line_here(run: Trained) -> str:
    """While it has no step to show beside its name, where it is instead."""
    return run.where if run.is_live and not run.steps else run.reason


def _share(status: Status) -> float | None:
    """Of its limit that is spent, for the bar."""
    limit = status.limit_usd
    return None if not limit else min(1.0, float(status.spend_usd / limit))
