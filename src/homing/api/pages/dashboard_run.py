"""Data for the dashboard's page about one run, read while a browser shows it: curves, samples, events, log, report.

  once           the resolved run.json
  every 2 s      new parts of metrics, events, samples and log; the run's figures; less often if the store is written to
                 less often
  every 10 s     what `homing status` shows, and the next commands
  every minute   checkpoints, instances and receipt, as in `homing report`; immediately after a new checkpoint

Each run has one thread for all this, so that a slow store delays only that run. The page is read-only: it enforces no
limits and destroys no instances.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from homing.api.lookup.local_runs import Trained, look_again, progress_of, store_here
from homing.api.lookup.status import look_closely, next_words, rows_here
from homing.api.pages.dashboard_figures import (
    COLUMNS,
    About,
    local_row,
    merge_figures,
    point,
    read_about,
    rented_row,
)
from homing.api.pages.dashboard_store import Remembering, remember
from homing.api.pages.mask_secrets import MOST_KEY_LINES, Mask, MaskLines
from homing.api.pages.write_report import subject_of
from homing.cloud.ask_providers import ASK_S
from homing.cloud.contact.heartbeats import Tail, read_document
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.reconcile.run_status import look, newest_beat
from homing.cloud.watch.progress import Planned, planned, progress_line
from homing.cloud.watch.run_output import PROGRAMS, EventFeed
from homing.errors import HomingError
from homing.report import read_report
from homing.store import Store, pace_of, run_key
from homing.web.dashboard.section_feed import Feed
from homing.wire import codec, file_names
from homing.wire.codec import WireError
from homing.wire.event_lines import Metric, Outcome

__all__ = ["Following", "commands_in", "plan_of", "sample_of"]

POLL_S = 2.0  # or half the store's push interval, if that is longer: more frequent reads would find nothing new
_ENDED_S = 60.0  # for a rented run that has ended: each read costs requests, and only a resume changes the data
_STATUS_S = 10.0
_REPORT_S = 60.0
_MOST_LOG = 400  # lines
_MOST_EVENTS = 300
_MOST_SAMPLES = 40
_FAILED = ("failed", "unfinished")
_NEWEST = 20  # metrics that the head is made from
_LAST_LINES = 20  # of the log of a failed run
_MOST_POINTS = 8000  # maximum per curve; more points would not look better and would slow down the page
_MONEY = ("spend_usd", "spend_limit_usd", "rate_usd_per_hour", "provider_usd")
_ANY_PROMPT = re.compile(r"\[([^\]\n]{1,300})\]")
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
        self._about = About()
        self._prompts: list[str] = []
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
        self._read_config(store)
        self._add_points(feed.fresh, lines)
        for report in reports:
            if report.kind == "sample":
                self._add("samples", [sample_of(report.data["name"], report.data["text"], self._prompts)],
                          _MOST_SAMPLES)  # fmt: skip
            elif "val_loss" not in report.data:  # validations are in the points
                names = {name: report.data.get(name) for name in ("t", "phase", "step", "source")}
                event = {**names, "kind": str(report.data.get("kind") or report.kind), "text": report.text,
                         "is_alert": report.kind == "alert"}  # fmt: skip
                self._add("events", [event], _MOST_EVENTS)
        for program, tail in logs.items():
            # A program killed in the middle of a line leaves no newline at the end of its log.
            fresh = tail.lines(is_last=self._is_over)[-_MOST_LOG - MOST_KEY_LINES :]
            self.feed.add(f"log {program}", self._mask_log[program](fresh)[-_MOST_LOG:], most=_MOST_LOG)
        self._put("head", self._head(feed, problems))
        self._put("failure", self._failure(store))

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
        fresh = [point(metric, lines) for metric in metrics]
        cut = next((at for at, point in enumerate(self._points) if fresh and _is_behind(point, fresh[0])), None)
        if cut is not None:  # drop all points from here on, including later phases: they will be reported again
            self._points, self._metrics = [*self._points[:cut], *fresh], [*self._metrics[:cut], *metrics]
            self.feed.renew("points", self._points)
            return
        self._points += fresh
        self._metrics += metrics
        if len(self._points) > _MOST_POINTS:
            kept = [at for at, each in enumerate(self._metrics) if at % 2 == 0 or each.val_loss is not None]
            if len(kept) > 3 * _MOST_POINTS // 4:  # so many validations that they are thinned too
                kept = list(range(0, len(self._metrics), -(-len(self._metrics) // (_MOST_POINTS // 2))))
            self._points, self._metrics = [self._points[at] for at in kept], [self._metrics[at] for at in kept]
            self.feed.renew("points", self._points)
        else:
            self.feed.add("points", fresh)

    def _read_config(self, store: Remembering) -> None:
        if self._about.run is None:
            self._about = read_about(self._home, self._id, cast(Store, store))
            self._prompts = self._about.prompts()
            run = self._about.run
            self._put("config", None if run is None else codec.dump(run))
            self._put("point_columns", list(COLUMNS))

    def _head(self, feed: EventFeed, problems: list[str]) -> dict[str, Any]:
        # The last validation may be far from the newest lines.
        validated = next((each for each in reversed(self._metrics) if each.val_loss is not None), None)
        figures = merge_figures([*([validated] if validated else []), *self._metrics[-_NEWEST:]])
        if isinstance(self._run, Trained):
            now = self._home.world.now()
            return local_row(self._run, figures, self._about, now, line=progress_of(self._run, feed))
        status = look(self._home, self._run)
        if status.problem:
            problems.append(status.problem)
        beat = newest_beat(status, feed.metric)
        own = feed.figures.get(beat.phase) if beat else None
        mark = status.lines[-1].mark if status.lines else ""
        line = progress_line(status, beat, own, plan_of(self._plans, self._home, self._run, mark))
        return rented_row(status, figures, self._about, line=line, problem=status.problem)

    def _failure(self, store: Remembering) -> dict[str, Any] | None:
        """Return why the run failed: the trainer's last words, its exit code and the reason. None if it did not."""
        if self._run.state not in _FAILED:
            return None
        outcome = read_document(cast(Store, store), run_key(self._id, file_names.OUTCOME), Outcome)
        is_own = outcome is not None and outcome.state != "done"
        tail = outcome.log_tail.splitlines() if outcome is not None and is_own else []
        own_code = self._run.exit_code if isinstance(self._run, RunRow) else None
        return {
            "reason": self._run.reason or (outcome.reason if outcome is not None and is_own else ""),
            "exit_code": outcome.exit_code if outcome is not None and is_own else own_code,
            "phase": outcome.phase if outcome is not None and is_own else None,
            "step": outcome.step if outcome is not None and is_own else None,
            "log_tail": tail[-_LAST_LINES:] or list(self.feed.whole().get("log trainer", []))[-_LAST_LINES:],
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
        keys = ("kept", "attempts", "machines", "made", "is_at_most", "stored")
        found = {name: report[name] for name in keys}
        found["attempts"] = [_numbers(each, _MONEY) for each in report["attempts"]]
        amounts = {name: report[name] for name in ("spend_usd", "spend_limit_usd")}
        self._put("report", {**found, **_numbers(amounts, _MONEY)})

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


def sample_of(name: str, text: str, prompts: Sequence[str]) -> dict[str, Any]:
    """Split a file of samples, which holds `[PROMPT]TEXT` one after another, at the prompts of the run."""
    phase, _, step = name.removesuffix(".txt").rpartition("-")
    starts = [(at, prompt) for prompt in prompts if (at := _start_of(text, prompt)) >= 0]
    if not starts and (found := _ANY_PROMPT.match(text)):
        starts = [(0, found[1])]
    starts.sort()
    parts = []
    for (at, prompt), (end, _) in itertools.pairwise([*starts, (len(text), "")]):
        parts.append({"prompt": prompt, "text": text[at + len(prompt) + 2 : end].strip("\n")})
    return {"name": name, "phase": phase, "step": int(step) if step.isdigit() else None,
            "parts": parts or [{"prompt": "", "text": text.strip()}]}  # fmt: skip


def _start_of(text: str, prompt: str) -> int:
    """Return where the sample of this prompt begins. A model may also write a prompt, so the first place counts."""
    marked = f"[{prompt}]"
    if text.startswith(marked):
        return 0
    at = text.find(f"\n\n{marked}")
    return at + 2 if at >= 0 else -1


def _numbers(record: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the record with these amounts as numbers. They are strings in a report, which must not round them."""
    return {name: float(value) if name in names and value is not None else value for name, value in record.items()}


def _is_behind(point: list[Any], other: list[Any]) -> bool:
    """Return True if `other` makes `point` obsolete: it repeats `point` or is an earlier step of the same phase."""
    return point[0] == other[0] and (point[1] > other[1] or point[:3] == other[:3])
