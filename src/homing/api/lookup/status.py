"""The current state of one run: what `homing status`, the dashboard and `Run.status()` show.

run_status(run)                      one run, once or until it ends: what the verb shows
look_closely(home, row, problems)    a launched run, with its store, provider and plan
rows_here(home, run, feed)           a run trained on this computer
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator
from typing import Any

from homing.api.lookup.find_runs import find_any, find_run, name_here, open_home, usd
from homing.api.lookup.local_runs import Trained, look_again, newest_saved, progress_of, store_here
from homing.cloud.artifacts.remove_from_store import kept_by
from homing.cloud.contact import action_log
from homing.cloud.contact.home_guard import out_of_reach
from homing.cloud.contact.ssh_access import find_login
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import ADOPTED, LedgerLine, RunRow
from homing.cloud.ledger.meter import at_most, billing_word, is_charged, line_spend
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import Status, figures_of, guards_on_instance, look, newest_pushed
from homing.cloud.watch.progress import ahead, planned, progress_line
from homing.cloud.watch.run_output import EventFeed
from homing.config.home_and_run_files import launch_again
from homing.errors import HomingError
from homing.units import format_duration
from homing.wire import codec, file_names

__all__ = ["Closely", "Seen", "look_closely", "next_words", "rows_here", "run_status"]

_NUM_ACTIONS = 3  # number of the guard's latest actions to show


@dataclasses.dataclass(frozen=True)
class Seen:
    """The state of a run at one moment."""

    document: dict[str, Any]
    rows: list[tuple[str, str]]  # label and text, for display
    problems: list[str]
    next_words: str  # the next commands; "" if nothing is left to do
    is_over: bool  # the run has ended, and nothing is billing


def run_status(run: str | None = None, *, every_s: float | None = None, home: Home | None = None) -> Iterator[Seen]:
    """Yield the state of a run once or, with `every_s`, repeatedly until it has ended and nothing is billing."""
    with open_home(home) as opened:
        found = find_any(opened, run)
        yield (seen := _see(opened, found))
        while every_s is not None and not seen.is_over:
            opened.world.sleep(every_s)
            yield (seen := _see(opened, found))


def _see(home: Home, found: RunRow | Trained) -> Seen:
    if isinstance(found, Trained):
        return _see_here(home, look_again(home, found))
    problems = refresh(home)
    closely = look_closely(home, find_run(home, found.id), problems)
    status = closely.status
    document = {**status.to_dict(), **closely.document}
    words = next_words(status, name_here(status.run), has_checkpoint=closely.has_checkpoint)
    is_over = not status.run.is_live and not status.is_billing
    return Seen(document, closely.rows, problems, words, is_over)


def _see_here(home: Home, run: Trained) -> Seen:
    """Return the state of a run of `homing train`, which has a folder but no billed instance."""
    feed = EventFeed(store_here(home), run.run)
    for _ in feed.reports():  # only the latest values are shown
        pass
    return Seen(_document_here(home, run, feed), rows_here(home, run, feed), [], run.next_words, not run.is_live)


def _document_here(home: Home, run: Trained, feed: EventFeed) -> dict[str, Any]:
    """Return the JSON document for a run of `homing train`: its state, newest checkpoint, progress and figures."""
    saved, progress = newest_saved(home, run), progress_of(run, feed)
    metric = codec.dump(feed.metric) if feed.metric is not None else None
    return {**run.to_dict(), "saved": saved, "progress": progress, "metric": metric}


def rows_here(home: Home, run: Trained, feed: EventFeed) -> list[tuple[str, str]]:
    """Return the rows of the table: label and text."""
    folder = home.run_dir(run.run)
    log = folder / file_names.LOGS / "trainer.log"
    rows = [
        ("run", run.run),
        ("state", f"{run.state}: {run.reason}" if run.reason else run.state),
        ("progress", progress_of(run, feed)),
        ("learned", feed.learned()),
        ("saved", newest_saved(home, run) or "no checkpoint yet"),
        ("trained", "on this computer; not billing"),
        ("folder", str(folder)),
        ("numbers", str(folder / file_names.METRICS)),
        ("log", str(log) if home.world.exists(log) else ""),
    ]
    return [row for row in rows if row[1]]


@dataclasses.dataclass(frozen=True)
class Closely:
    status: Status
    document: dict[str, Any]  # in addition to the fields of `Status`
    rows: list[tuple[str, str]]  # label and text, for display
    has_checkpoint: bool = True  # False if the store has no checkpoint of the run


def look_closely(home: Home, run: RunRow, problems: list[str]) -> Closely:
    """Read the state of the run from its store, provider and plan. New problems are appended to `problems`."""
    status = look(home, run)
    if status.problem and not any(status.run.id in problem for problem in problems):
        problems.append(status.problem)
    is_read = False
    ways, pushed, figures = {"ssh": _ssh_line(home, status), "page": _page(home, status)}, "", dict[str, float]()
    beat = status.reports.heartbeat if status.reports else None
    try:
        figures = figures_of(home, status.run, beat)
        pushed = newest_pushed(home, status.run) if any(line.created_at for line in status.lines) else ""
        is_read = True
    except (HomingError, OSError) as exc:
        if not problems:
            problems.append(f"The store could not be read: {str(exc).splitlines()[0]}")
    kept = None if status.run.is_live else kept_by(home, status.run)
    actions = [event for event in action_log.read(home, status.run.id) if event.kind != "lost"][-_NUM_ACTIONS:]
    plan = planned(home, status.run) if status.run.is_live else None
    found = ahead(status, beat, plan)
    document = {
        **ways,
        "pushed": pushed,
        "figures": figures,
        "ahead": dataclasses.asdict(found) if found else None,
        "kept": kept.to_dict() if kept else None,
        "guard": [codec.dump(event) for event in actions],
        "problems": problems,
    }
    progress = progress_line(status, beat, figures, plan)
    guards = guards_on_instance(home, status.lines[-1], beat) if beat is not None and status.is_billing else ""
    rows = _rows(status, progress, guards, ways, pushed, str(kept or ""), [event.text for event in actions])
    if status.is_billing and (status.problem or status.is_silent) and (said := _last_log_line(home, status.lines[-1])):
        rows.append(("log", said))
    if status.is_billing:
        away = " ".join(out_of_reach(home, name) for name in sorted({line.provider for line in status.lines[-1:]}))
        document["guard_at_home"] = {"is_armed": not away, "why": away}
        rows.append(("at home", away or "a guard checked recently and reached the provider"))
    return Closely(status, document, rows, bool(pushed) or not is_read)


def _last_log_line(home: Home, line: LedgerLine) -> str:
    """Return the last line of the provider's log, where an agent that cannot push to the store reports the problem."""
    if line.instance_id is None:
        return ""
    with contextlib.suppress(HomingError, OSError):
        return (home.provider_of(line).log(line.instance_id).strip().splitlines() or [""])[-1]
    return ""


def _ssh_line(home: Home, status: Status) -> str:
    """Return an ssh command ready to paste; "" if no instance is running, or the provider does not offer SSH."""
    try:
        return shlex.join(find_login(home, status.run).shell()) if status.is_billing else ""
    except HomingError:
        return ""


def _page(home: Home, status: Status) -> str:
    """Return the URL of the provider's instances page; "" if nothing is running, or if there is no such page."""
    try:
        return home.provider_of(status.lines[-1]).page if status.is_billing else ""
    except (HomingError, OSError):
        return ""


def _rows(
    status: Status, progress: str, guards: str, ways: dict[str, str], pushed: str, kept: str, actions: list[str]
) -> list[tuple[str, str]]:
    run = status.run
    beat = status.reports.heartbeat if status.reports else None
    rows = [
        ("run", run.id),
        ("state", f"{run.state}: {run.reason}" if run.reason else run.state),
        ("progress", progress),
    ]
    if beat is not None and status.heartbeat_age_s is not None:
        old = ", which is too long: the instance may be disconnected or dead" if status.is_silent else ""
        rows.append(("heartbeat", f"{beat.state}, {format_duration(status.heartbeat_age_s)} ago{old}"))
        if guards:
            rows.append(("guards", guards))
        rows.append(("pushed", _pushed(pushed, is_all=beat.is_pushed)))
        if beat.problem:
            rows.append(("problem", beat.problem))
    for line in status.lines:
        where = f"{line.provider} {line.instance_id or line.mark}"
        so_far = "total" if line.destroyed_at is not None else "so far"
        money = f"{usd(line.rate_usd_per_hour)}/h, {at_most(line)}{usd(line_spend(line, status.at))} {so_far}"
        rows.append(
            (
                f"attempt {line.attempt}",
                f"{where}: {line.state}, billing {billing_word(line)}, {money}. {line.note}".rstrip(),
            )
        )
    rows += [(name, way) for name, way in ways.items() if way]
    rows.append(("store", run.store))
    if kept:
        rows.append(("in the store", kept))
    rows += [("home", text) for text in actions]
    outcome = status.reports.outcome if status.reports else None
    if outcome is not None and outcome.log_tail and run.state == "failed":
        rows.append(("last log lines", outcome.log_tail))
    return rows


def _pushed(newest: str, *, is_all: bool) -> str:
    if is_all:
        return "all, verified" + (f"; the newest checkpoint is {newest}" if newest else "")
    return f"{newest}; more follow during training" if newest else "no checkpoint yet"


def next_words(status: Status, name: str, *, has_checkpoint: bool = True) -> str:
    """Return the next commands, each as `why: command`, separated by three spaces; "" if nothing is left to do.

    Without a checkpoint in the store, nothing can be fetched or resumed.
    """
    state = status.run.state
    if status.run.is_live:
        return f"Watch it: homing watch {name}   Logs: homing logs {name} -f   Stop it: homing stop {name}"
    if state == ADOPTED:
        back = f"homing adopt {shlex.quote(status.run.store)} {status.run.id}"
        return f"Another homing home has adopted this run. Take it back: {back}"
    if status.is_billing and not any(is_charged(line) for line in status.lines):
        return f"The run has ended, but its local processes are still running. End them: homing destroy {name}"
    if status.is_billing:
        return f"The run has ended, but its instance may still be billing. End billing: homing destroy {name}"
    if state == "done" and status.run.fetched_step is None:
        return f"Fetch it: homing fetch {name}"
    if state in ("failed", "stopped") and not has_checkpoint:
        why = f"See why: homing logs {name}   " if state == "failed" else ""
        return f"{why}No checkpoint was saved. Start over: {launch_again(status.run.name)}"
    if state == "failed":
        return f"See why: homing logs {name}   Resume from its last checkpoint: homing launch {name} --resume"
    return f"Fetch it: homing fetch {name}   Resume: homing launch {name} --resume" if state == "stopped" else ""
