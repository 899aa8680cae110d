"""Data for the dashboard's page about one run, read while a browser shows it: curves, samples, events, log, report.

  every 2 s      new parts of metrics, events, samples and log; the progress line of `homing watch`; less often if the
                 store is written to less often
  every 10 s     what `homing status` shows, and the next commands
  every minute   checkpoints, instances and receipt, as in `homing report`; immediately after a new checkpoint

Each run has one thread for all this, so that a slow store delays only that run. The page is read-only: it enforces no
limits and destroys no instances.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, cast

from homing.api.lookup.local_runs import Trained, look_again, progress_of, store_here
from homing.api.lookup.status import look_closely, next_words, rows_here
from homing.api.pages.mask_secrets import MOST_KEY_LINES, Mask, MaskLines
from homing.api.pages.write_report import subject_of
from homing.cloud.ask_providers import ASK_S
from homing.cloud.contact.heartbeats import Tail
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.reconcile.run_status import BY_REWARD, look, newest_beat
from homing.cloud.watch.progress import Planned, planned, progress_line
from homing.cloud.watch.run_output import PROGRAMS, EventFeed
from homing.errors import HomingError, StoreError
from homing.report import read_report
from homing.store import FileStore, NotInStore, Store, pace_of, run_key
from homing.store.base import Entries, not_in_store
from homing.web.dashboard.section_feed import Feed
from homing.wire import file_names
from homing.wire.codec import WireError
from homing.wire.event_lines import Metric
from homing.world import World

__all__ = ["Following", "Remembering", "commands_in", "plan_of", "remember"]

POLL_S = 2.0  # or half the store's push interval, if that is longer: more frequent reads would find nothing new
_ENDED_S = 60.0  # for a rented run that has ended: each read costs requests, and only a resume changes the data
_STATUS_S = 10.0
_REPORT_S = 60.0
_MOST_LOG = 400  # lines
_MOST_EVENTS = 300
_MOST_SAMPLES = 40
_MOST_POINTS = 8000  # maximum per curve; more points would not look better and would slow down the page
_log = logging.getLogger(__name__)


class Following:
    """Follows one run from when its first viewer arrives until its last viewer leaves."""

    def __init__(self, home: Home, run: RunRow | Trained) -> None:
        self.feed = Feed()
        self._since: float | None = None  # monotonic time when the current read began
        self._home, self._run, self._is_left = home, run, threading.Event()
        self._id = run.run if isinstance(run, Trained) else run.id
        self._mask = Mask(home.world.environment())
        self._mask_log = {program: MaskLines(self._mask) for program in PROGRAMS}
        self._due: dict[str, float] = {}
        self._problems: dict[str, list[str]] = {}
        self._plans: dict[str, Planned] = {}  # by mark
        self._pushed = ""
        self._is_over = False  # neither live nor billing
        self._metrics: list[Metric] = []
        self._points: list[list[Any]] = []  # one per metric
        self._opened: tuple[Remembering, EventFeed, dict[str, Tail]] | None = None
        threading.Thread(target=self._follow, name=f"homing-dashboard {self._id}", daemon=True).start()

    def leave(self) -> None:
        self._is_left.set()

    def say_silence(self) -> None:
        """Report that the current read takes longer than the time limit for providers. Called from another thread."""
        since, now = self._since, self._home.world.monotonic()
        if since is not None and now - since > ASK_S:
            self._put("problems", [f"No response for more than {ASK_S:g} s: showing older data. Still trying."])
            self.feed.is_reported.set()

    def _follow(self) -> None:
        world = self._home.world
        while not self._is_left.is_set():
            self._since = world.monotonic()
            self._look("lines", 0.0, self._read_on)
            self._look("status", _STATUS_S, self._look_closely)
            self._look("report", _REPORT_S, self._report)
            self._since = None
            self._put("problems", list(dict.fromkeys(itertools.chain(*self._problems.values()))))
            self.feed.is_reported.set()
            self._is_left.wait(self._pause_s())

    def _pause_s(self) -> float:
        if isinstance(self._run, Trained):
            return POLL_S
        return _ENDED_S if self._is_over else max(POLL_S, pace_of(self._run.store) / 2)

    def _look(self, what: str, every_s: float, work: Callable[[list[str]], None]) -> None:
        """Run `work` if it is due. The problems it reports are shown until it runs again."""
        now = self._home.world.monotonic()
        if now < self._due.get(what, now):
            return
        self._due[what], problems = now + every_s, self._problems.setdefault(what, [])
        problems.clear()
        try:
            work(problems)
        except (HomingError, WireError, OSError) as exc:
            problems.append((str(exc) or type(exc).__name__).splitlines()[0])
        except Exception as exc:  # a bug: show it on the page, and continue with the other parts
            _log.exception("a refresh of %s failed", self._id)
            problems.append(f"Dashboard error: {type(exc).__name__}: {exc}")

    # --- on every poll ---

    def _read_on(self, problems: list[str]) -> None:
        self._run = self._look_again()
        lines = [] if isinstance(self._run, Trained) else self._home.ledger.lines(self._id)
        self._is_over = not self._run.is_live and not billing_lines(lines)
        store, feed, logs = self._open()
        store.look_again()
        reports = list(feed.reports(lines, self._home.world.now()))
        self._add_points(feed.fresh, lines)
        for report in reports:
            if report.kind == "sample":
                self._add("samples", [{"name": report.data["name"], "text": report.text}], _MOST_SAMPLES)
            else:
                self._add("events", [{"t": report.data.get("t"), "kind": report.kind, "text": report.text}],
                          _MOST_EVENTS)  # fmt: skip
        for program, tail in logs.items():
            # A program killed in the middle of a line leaves no newline at the end of its log.
            fresh = tail.lines(is_last=self._is_over)[-_MOST_LOG - MOST_KEY_LINES :]
            self.feed.add(f"log {program}", self._mask_log[program](fresh)[-_MOST_LOG:], most=_MOST_LOG)
        self._put("head", self._head(feed, problems))

    def _look_again(self) -> RunRow | Trained:
        if isinstance(self._run, Trained):
            return look_again(self._home, self._run)
        return self._home.ledger.run(self._id) or self._run

    def _open(self) -> tuple[Remembering, EventFeed, dict[str, Tail]]:
        if self._opened is None:
            is_here = isinstance(self._run, Trained)
            found = store_here(self._home) if is_here else self._home.store_of(cast(RunRow, self._run))
            remembering = remember(found, self._home.world, run_key(self._id, ""))
            store = cast(Store, remembering)
            programs = ("trainer",) if is_here else PROGRAMS
            logs = {each: Tail(store, run_key(self._id, file_names.LOGS, f"{each}.log")) for each in programs}
            self._opened = remembering, EventFeed(store, self._id, is_curve=True), logs
        return self._opened

    def _add_points(self, metrics: Sequence[Metric], lines: Sequence[LedgerLine]) -> None:
        """Add metrics to the curves.

        If the trainer went back to a checkpoint, or the file is read again, replace the points that are reported again.
        """
        fresh = [_point(metric, lines) for metric in metrics]
        cut = next((at for at, point in enumerate(self._points) if fresh and _is_behind(point, fresh[0])), None)
        if cut is not None:  # drop all points from here on, including later phases: they will be reported again
            self._points, self._metrics = [*self._points[:cut], *fresh], [*self._metrics[:cut], *metrics]
            self.feed.renew("points", self._points)
            return
        self._points += fresh
        self._metrics += metrics
        if len(self._points) > _MOST_POINTS:
            kept = [at for at, each in enumerate(self._metrics) if at % 2 == 0 or each.val_loss is not None]
            self._points, self._metrics = [self._points[at] for at in kept], [self._metrics[at] for at in kept]
            self.feed.renew("points", self._points)
        else:
            self.feed.add("points", fresh)

    def _head(self, feed: EventFeed, problems: list[str]) -> dict[str, Any]:
        if isinstance(self._run, Trained):
            run = self._run
            head = {"run": run.run, "name": run.name, "state": run.state, "reason": run.reason, "phases": run.phases,
                    "line": progress_of(run, feed)}  # fmt: skip
            return {**head, "is_live": run.is_live, "is_billing": False, "is_trained_here": True, "limit_usd": None}
        status = look(self._home, self._run)
        if status.problem:
            problems.append(status.problem)
        beat = newest_beat(status, feed.metric)
        figures = feed.figures.get(beat.phase) if beat else None
        mark = status.lines[-1].mark if status.lines else ""
        plan = plan_of(self._plans, self._home, self._run, mark)
        head = {"run": self._id, "name": self._run.name, "state": self._run.state, "reason": self._run.reason,
                "phases": status.phases, "line": progress_line(status, beat, figures, plan)}  # fmt: skip
        return {
            **head,
            "is_live": self._run.is_live,
            "is_billing": status.is_billing,
            "is_trained_here": False,
            "limit_usd": None if status.limit_usd is None else float(status.limit_usd),
        }

    # --- less often ---

    def _look_closely(self, problems: list[str]) -> None:
        if isinstance(self._run, Trained):
            rows, next_ = rows_here(self._home, self._run, self._open()[1]), commands_in(self._run.next_words)
            pushed = dict(rows).get("saved", "")
        else:
            found = look_closely(self._home, self._run, problems)
            words = next_words(found.status, self._id, has_checkpoint=found.has_checkpoint)
            rows, next_ = found.rows, commands_in(words)
            pushed = str(found.document["pushed"])
            if found.status.is_billing:
                next_.append({"why": "End billing now", "command": f"homing destroy {self._id}"})
        if pushed != self._pushed:
            self._pushed = pushed
            self._due.pop("report", None)
        next_.append({"why": "Write a one-page report", "command": f"homing report {self._id} --out report.html"})
        self._put("rows", rows)
        self._put("next", next_)

    def _report(self, problems: list[str]) -> None:
        report = read_report(self._home, subject_of(self._run), metrics=self._metrics).to_dict()
        problems += report["problems"]
        keys = ("kept", "attempts", "machines", "made", "spend_usd", "spend_limit_usd", "is_at_most", "stored")
        self._put("report", {name: report[name] for name in keys})

    def _put(self, name: str, value: Any) -> None:
        self.feed.put(name, self._mask(value))

    def _add(self, name: str, items: list[Any], most: int) -> None:
        self.feed.add(name, self._mask(items), most=most)


def plan_of(known: dict[str, Planned], home: Home, run: RunRow, mark: str) -> Planned | None:
    """Return the plan of the run, computed only once for each mark.

    While a launch tries one offer after another, the plan in the run documents is temporary and is not cached.
    """
    if mark in known:
        return known[mark]
    found = planned(home, run)
    if found is not None and run.state != "launching":
        known[mark] = found
    return found


def commands_in(words: str) -> list[dict[str, str]]:
    """Split a line such as `Watch it: homing watch moss   Stop it: homing stop moss` into its commands."""
    found = []
    for part in words.split("   "):
        why, _, command = part.rpartition(": ")
        if command.startswith("homing "):
            found.append({"why": why, "command": command})
    return found


def _point(metric: Metric, lines: Sequence[LedgerLine]) -> list[Any]:
    """Return one line of metrics as a compact list, because there may be thousands of lines.

    The list has the phase, the step, the time, and the figures in the order that page.js expects.
    """
    learned = metric.more.get("reward") if metric.phase == BY_REWARD else metric.loss
    figures = [learned, metric.val_loss, metric.tokens_per_s, metric.mfu, metric.memory_bytes, metric.lr]
    usd = _spent_at(lines, metric.t) if lines else None
    return [metric.phase, metric.step, metric.t, *figures, usd]


def _spent_at(lines: Sequence[LedgerLine], t: float) -> float:
    """Return our own estimate of the spend as of a past time, ignoring provider figures that arrived later."""
    spent = Decimal(0)
    for line in lines:
        if line.created_at is not None:
            until = t if line.destroyed_at is None else min(t, line.destroyed_at)
            spent += meter.cost(Decimal(line.rate_usd_per_hour), until - line.created_at)
    return round(float(spent), 6)


def _is_behind(point: list[Any], other: list[Any]) -> bool:
    """Return True if `other` makes `point` obsolete: it repeats `point` or is an earlier step of the same phase."""
    return point[0] == other[0] and (point[1] > other[1] or point[:3] == other[:3])


_GROWING = (".jsonl", ".log")
_SEAM_BYTES = 256  # number of bytes compared at the end of our copy; if they differ, the file was replaced


def remember(store: Store, world: World, prefix: str) -> Remembering:
    """Return the store wrapped in a cache. For a file store, the cache can also read parts of files."""
    return (
        RememberingFolder(store, world, prefix) if isinstance(store, FileStore) else Remembering(store, world, prefix)
    )


class Remembering:
    """Cached view of the files below `prefix`. After each call to `look_again`, the next read lists the store again."""

    def __init__(self, store: Store, world: World, prefix: str) -> None:
        self.url, self._store, self._world, self._prefix = store.url, store, world, prefix
        self._listed: Entries | None = None
        self._have: dict[str, bytes] = {}
        self._sha256: dict[str, str | None] = {}

    def look_again(self) -> None:
        self._listed = None

    def list(self, prefix: str) -> Entries:
        if isinstance(self._store, FileStore) or not prefix.startswith(self._prefix):
            return self._store.list(prefix)
        if self._listed is None:
            self._listed = self._store.list(self._prefix)
        return [entry for entry in self._listed if entry.key.startswith(prefix)]

    def read(self, key: str) -> bytes:
        if not key.endswith(_GROWING):
            return self._store.read(key)
        store = self._store
        try:
            data = self._from_folder(store.root, key) if isinstance(store, FileStore) else self._from_far(key)
        except NotInStore:
            self._have.pop(key, None)
            raise
        self._have[key] = data
        return data

    def _from_folder(self, root: str, key: str) -> bytes:
        have, path = self._have.get(key, b""), os.path.join(root, *key.split("/"))
        seam = have[-_SEAM_BYTES:]
        try:
            fresh = self._world.read(path, len(have) - len(seam))
        except (FileNotFoundError, NotADirectoryError):
            return self._store.read(key)  # distinguishes a missing file from a missing disk
        except OSError as exc:
            raise StoreError(f"Cannot read {key} in {self.url}.", str(exc), "homing doctor") from exc
        return have + fresh[len(seam) :] if fresh.startswith(seam) else self._store.read(key)

    def _from_far(self, key: str) -> bytes:
        entry = next((each for each in self.list(key) if each.key == key), None)
        if entry is None:
            raise not_in_store(key, self.url)
        have = self._have.get(key)
        if have is not None and len(have) == entry.num_bytes and self._sha256.get(key) == entry.sha256:
            return have
        self._sha256[key] = entry.sha256
        return self._store.read(key)


class RememberingFolder(Remembering):
    def num_bytes(self, key: str) -> int:
        assert isinstance(self._store, FileStore), self.url
        return self._store.num_bytes(key)

    def read_part(self, key: str, start: int, num_bytes: int) -> bytes:
        assert isinstance(self._store, FileStore), self.url
        return self._store.read_part(key, start, num_bytes)
