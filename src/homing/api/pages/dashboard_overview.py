"""Data for the dashboard's table of runs: what `homing runs` knows, as numbers, read by three kinds of threads.

  board    every second, read states and dollars so far from the ledger and the runs trained here
  money    query every provider and update the ledger (`refresh`), as `homing runs` does
  look     one thread per run that is live or has not been read yet: read heartbeat, outcome and figures from its store

A slow or silent provider or store therefore delays only its own row, which shows the problem. The dashboard is not a
guard: it never ends a run at its limit. That is the job of the agent, the provider, `homing guard` or `homing watch`.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from homing.api.lookup.list_runs import billing_words, forgotten_words
from homing.api.lookup.local_runs import Trained, store_here, trained_here
from homing.api.pages.dashboard_figures import (
    About,
    billing_row,
    local_row,
    merge_figures,
    read_about,
    rented_row,
    resource_row,
)
from homing.api.pages.dashboard_run import Following, plan_of
from homing.api.pages.mask_secrets import Mask
from homing.cloud.ask_providers import ASK_S
from homing.cloud.contact.read_metrics import newest_metrics
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine, Receipts, RunRow
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.providers.base import Resource
from homing.cloud.reconcile.inventory import billing_things
from homing.cloud.reconcile.lost_ledger import what_is_lost
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import Status, look
from homing.cloud.watch.progress import Planned, progress_line
from homing.errors import HomingError, NotChecked
from homing.store import FileStore, run_key
from homing.units import format_moment
from homing.web.dashboard.dashboard_app import NoSuchRun
from homing.web.dashboard.section_feed import Feed
from homing.wire import file_names
from homing.wire.codec import WireError
from homing.world import World

__all__ = ["Board"]

TICK_S = 1.0
_BEHIND_S = 0.1  # while runs have not been read for the first time
_UNSEEN_S = 5.0  # while no page is open
_LOOK_S = 5.0  # for a live run
_MONEY_S = 10.0  # while a page is open and a run is live or anything is billing
_IDLE_S = 60.0
_STALE_S = 2 * (_IDLE_S + ASK_S)
_FAR_S = 60.0  # between two reads of a live run's metrics in a store that is not a folder, which sends the whole file
_MOST_ENDED = 100  # maximum number of ended runs to show; all other runs are always shown
_MOST_AT_ONCE = 16  # maximum number of stores read at once, not counting those silent for ASK_S seconds
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Look:
    began: float  # monotonic clock
    ended: float | None = None
    status: Status | None = None
    about: About = dataclasses.field(default_factory=About)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    figures_at: float | None = None  # monotonic clock
    problem: str = ""

    def is_first(self, now: float) -> bool:
        return self.ended is None and self.figures_at is None and not self.is_silent(now)

    def is_silent(self, now: float) -> bool:
        return self.ended is None and now - self.began > ASK_S


@dataclasses.dataclass
class _Local:
    """What was read of a run that is trained here, and the state of its metrics file at that time."""

    about: About
    size: int = -1
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Money:
    asked_at: float | None = None
    things: list[Resource] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)


class Board:
    def __init__(self, path: Path) -> None:
        self._path, self._world = path, World()
        self._home = Home(path, self._world)
        self._asker = Home(path, World())  # used by only one thread, because it remembers the last meter readings
        self._mask = Mask(self._world.environment())
        self._feed = Feed()
        self._ending = threading.Event()
        self._lock = threading.Lock()  # guards the two fields below
        self._num_viewers = 0
        self._followed: dict[str, tuple[Following, int]] = {}  # run id -> (its Following, number of viewers)
        self._looks: dict[str, _Look] = {}
        self._plans: dict[str, Planned] = {}  # by mark
        self._locals: dict[str, _Local] = {}
        self._money = _Money()
        self._receipts: tuple[tuple[int, frozenset[str]], dict[str, Receipts]] | None = None
        self._is_busy = False  # whether a run is live or anything is billing

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
        """Return the run with exactly this id. The id comes from a URL, so it is never used as a path."""
        here = (each for each in trained_here(self._home, self._home.ledger.run_ids()) if each.run == run_id)
        run = self._home.ledger.run(run_id) or next(here, None)
        if run is None:
            raise NoSuchRun(run_id)
        return run

    # --- background threads ---

    def begin(self) -> None:
        for name, work in (("board", self._tick), ("money", self._ask)):
            threading.Thread(target=self._go_on, args=(name, work), name=f"homing-{name}", daemon=True).start()

    def end(self) -> None:
        self._ending.set()
        with self._lock:
            for following, _ in self._followed.values():
                following.leave()

    def _go_on(self, name: str, work: Callable[[], float]) -> None:
        """Call `work` repeatedly, each time after the pause that it returned."""
        pause_s = 0.0
        while not self._ending.wait(pause_s):
            try:
                pause_s = work()
            except Exception as exc:  # a page that silently stops updating would be misleading
                is_expected = isinstance(exc, (HomingError, WireError, OSError))
                said = _first_line(exc) if is_expected else repr(exc)
                _log.log(logging.WARNING, "a refresh failed", exc_info=exc)
                self._feed.put(f"failure {name}", self._mask(f"Showing older data: {said}"))
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
        # Decided before the rows are made: a look that ends meanwhile must still be shown soon.
        is_behind = any(
            row.id not in self._looks or self._looks[row.id].is_first(self._world.monotonic()) for row in rows
        )
        statuses = [self._status(row, own[row.id], now) for row in rows]
        billing, money = billing_lines(open_), self._money
        forgotten = [line for line in billing if line.run_id not in known]
        self._is_busy = bool(billing) or any(row.is_live for row in rows)
        shown = [*(self._row(status) for status in statuses), *(self._row_here(each, now) for each in trained)]
        # Live runs before ended ones, newest first.
        self._put("runs", sorted(shown, key=lambda row: (not row["is_live"], -row["created_at"])))
        problems = [*money.problems, *_stale(money, now)]
        words = billing_words(billing, money.things, problems)
        rates = [Decimal(line.rate_usd_per_hour) for line in billing if meter.is_charged(line)]
        rates += [each.rate_usd_per_hour for each in money.things]
        total_usd, is_at_most = self._total(open_, now)
        self._put(
            "money",
            {
                "words": words if money.asked_at is not None or billing else ["Asking the providers ..."],
                "is_billing": bool(billing or money.things),
                "rate_usd_per_hour": float(sum(rates)),
                "asked_at": money.asked_at,
                "others": [
                    *(billing_row(line, now) for line in forgotten),
                    *(resource_row(each, now) for each in money.things),
                ],
                "problems": [
                    *(each for each in problems if not isinstance(each, NotChecked)),
                    *map(forgotten_words, forgotten),
                ],
                "total_spend_usd": total_usd,
                "is_total_at_most": is_at_most,
                "num_left_out": max(0, len(known) - len(rows)),
                "is_empty": not shown and not self._home.ledger.num_lines(),
                "home": str(self._home.path),
            },
        )
        self._feed.is_reported.set()
        with self._lock:
            followed = [following for following, _ in self._followed.values()]
        for each in followed:
            each.say_silence()
        return _BEHIND_S if is_behind else TICK_S if self._is_seen else _UNSEEN_S

    def _rows(self) -> list[RunRow]:
        """Return every unfinished run, but only the newest ended ones: a page with thousands of rows is useless."""
        return self._home.ledger.unfinished_runs(_MOST_ENDED)

    def _total(self, open_: list[LedgerLine], now: float) -> tuple[float | None, bool]:
        """Return the total real cost of all ledger lines, and whether it is an upper bound; None if there are none.

        Local runs have made-up dollars, which are left out.
        """
        # Receipts do not change, so they are summed again only after a line is written, closed or reopened.
        key = self._home.ledger.num_lines(), frozenset(line.mark for line in open_)
        if self._receipts is None or self._receipts[0] != key:
            self._receipts = key, self._home.ledger.receipts()
        real = [each for provider, each in self._receipts[1].items() if provider not in meter.FREE_PROVIDERS]
        billing = [line for line in billing_lines(open_) if meter.is_charged(line)]
        if not any(each.number for each in real) and not billing:
            return None, False
        total = sum((each.total_usd for each in real), meter.total_spend(billing, now))
        return round(float(total), 6), any(each.is_at_most for each in real)

    # --- one look per run, concurrently ---

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
            current = _Look(now) if last is None else dataclasses.replace(last, began=now, ended=None, problem="")
            self._looks[row.id] = current
            threading.Thread(
                target=self._look, args=(row, own[row.id], current), name=f"homing-look {row.id}", daemon=True
            ).start()

    def _is_due(self, row: RunRow, lines: list[LedgerLine], last: _Look, now: float) -> bool:
        """Return True if the run's store should be read again.

        A live run is read every few seconds while a page is open. An ended run is read once, or again if that failed.
        """
        if row.is_live or billing_lines(lines):
            return self._is_seen and last.ended is not None and now - last.ended >= _LOOK_S
        if last.problem:
            return self._is_seen and last.ended is not None and now - last.ended >= _IDLE_S
        return last.status is None or last.status.run != row

    def _look(self, row: RunRow, lines: list[LedgerLine], current: _Look) -> None:
        try:
            home = Home(self._path, World())
            current.status = look(home, row, lines)
            current.problem = current.status.problem
            if not current.problem:
                self._read_figures(home, row, current)
        except (HomingError, WireError, OSError) as exc:
            current.problem = _first_line(exc)
        except Exception as exc:  # a bug in a background thread: report it in the run's row
            _log.exception("a refresh of %s failed", row.id)
            current.problem = f"Dashboard error: {type(exc).__name__}: {exc}"
        finally:
            current.ended = self._world.monotonic()

    def _read_figures(self, home: Home, row: RunRow, current: _Look) -> None:
        store, now = home.store_of(row), self._world.monotonic()
        if current.about.run is None:
            current.about = read_about(home, row.id, store)
        is_far = row.is_live and not isinstance(store, FileStore)
        if current.figures_at is None or not is_far or now - current.figures_at >= _FAR_S:
            current.figures = merge_figures(newest_metrics(store, run_key(row.id, file_names.METRICS)))
            current.figures_at = now

    def _status(self, row: RunRow, lines: list[LedgerLine], now: float) -> Status:
        """Return the run's status: the last heartbeat that was read, with the run's current state and spend."""
        last = self._looks[row.id].status if row.id in self._looks else None
        spend = meter.total_spend(lines, now)
        if last is None:
            return Status(row, lines, None, spend, None, at=now)
        is_same = bool(lines) and bool(last.lines) and lines[-1].mark == last.lines[-1].mark
        reports = (
            last.reports if is_same or not lines else None
        )  # drop reports of an earlier attempt, because they do not apply to this one
        return dataclasses.replace(last, run=row, lines=lines, reports=reports, spend_usd=spend, at=now)

    def _row(self, status: Status) -> dict[str, Any]:
        beat = status.reports.heartbeat if status.reports else None
        mark = status.lines[-1].mark if status.lines else ""
        plan = plan_of(self._plans, self._home, status.run, mark) if status.run.is_live else None
        last = self._looks.get(status.run.id) or _Look(0.0, 0.0)
        problem = last.problem
        if last.is_silent(self._world.monotonic()):
            problem = f"Its store has not responded for more than {ASK_S:g} s; states and dollars are from the ledger."
        line = progress_line(status, beat, plan=plan)
        return rented_row(status, last.figures, last.about, line=line, problem=problem)

    def _row_here(self, run: Trained, now: float) -> dict[str, Any]:
        known = self._locals.get(run.run)
        if known is None:
            known = self._locals[run.run] = _Local(read_about(self._home, run.run))
        elif known.about.run is None:  # run.json is not written yet
            known.about = read_about(self._home, run.run)
        path = self._home.run_dir(run.run) / file_names.METRICS
        size = self._world.size(path) if self._world.exists(path) else 0
        if size != known.size:
            key = run_key(run.run, file_names.METRICS)
            known.size, known.figures = size, merge_figures(newest_metrics(store_here(self._home), key))
        return local_row(run, known.figures, known.about, now, line=_line_here(run))

    def _put(self, name: str, value: Any) -> None:
        self._feed.put(name, self._mask(value))


def _stale(money: _Money, now: float) -> list[str]:
    """Warn if the providers' last answer is out of date, because one of them hangs or this computer was asleep."""
    if money.asked_at is None or now - money.asked_at < _STALE_S:
        return []
    return [f"The providers have not responded since {format_moment(money.asked_at)}."]


def _first_line(exc: Exception) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0]


def _line_here(run: Trained) -> str:
    """Return the reason why the run ended or, for a live run whose step is not known yet, its progress in words."""
    return run.where if run.is_live and not run.steps else run.reason
