"""`homing status`: one run, now."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from typing import Annotated, Any

import typer

from homing.cli import talk
from homing.cli.control import find_any, find_run, open_home, say_problems, usd
from homing.cli.find_run import name_here
from homing.cli.options import Json, RunName
from homing.cli.trained_here import Trained, look_again, store_here
from homing.cli.watch_here import newest_saved, progress_of
from homing.cloud import diary
from homing.cloud.ahead import ahead, planned
from homing.cloud.connect import find_login
from homing.cloud.guards import out_of_reach
from homing.cloud.home import Home
from homing.cloud.ledger import ADOPTED, LedgerLine, RunRow
from homing.cloud.meter import at_most, is_charged, line_spend
from homing.cloud.news import News
from homing.cloud.reconcile import refresh
from homing.cloud.status import Status, check_interval, figures_of, look, newest_pushed, progress_line
from homing.cloud.stored import kept_by
from homing.errors import HomingError, UsageError
from homing.units import format_duration, parse_duration
from homing.wire import codec, names

__all__ = ["Closely", "command", "look_closely", "next_words", "rows_here"]

_TOLD = 3  # of what the guard at home did and said, the last


def command(
    run: RunName = None,
    watch: Annotated[
        str | None, typer.Option("--watch", metavar="[60]", help="Again every so many seconds, until the run ends.")
    ] = None,
    json_: Json = False,
) -> None:
    """One run, now: state, instances, dollars, what is pushed."""
    try:
        every_s = None if watch is None else check_interval(parse_duration(watch), "--watch")
    except ValueError as exc:
        raise UsageError(what=f"--watch: {exc}.", fix="--watch 30") from exc
    with open_home() as home:
        found = find_any(home, run)
        if isinstance(found, Trained):
            _look_here(home, found, every_s)
            return
        status = _look_once(home, found.id)
        while every_s is not None and (status.run.is_live or status.is_billing):
            home.world.sleep(every_s)
            status = _look_once(home, status.run.id)
        if words := next_words(status, name_here(status.run)):
            talk.say(words)


def _look_here(home: Home, run: Trained, every_s: float | None) -> None:
    """What `homing train` trained has a state and a folder, and no machine that anybody could be charged for."""
    _show_here(home, run)
    while every_s is not None and run.is_live:
        home.world.sleep(every_s)
        run = look_again(home, run)
        _show_here(home, run)
    talk.say(run.next_words)


def _show_here(home: Home, run: Trained) -> None:
    news = News(store_here(home), run.run)
    for _ in news.reports():  # only what the last lines say is shown here
        pass
    saved, progress = newest_saved(home, run), progress_of(run, news)
    metric = codec.dump(news.metric) if news.metric is not None else None
    talk.emit("status/1", {**run.to_dict(), "saved": saved, "progress": progress, "metric": metric})
    talk.table(["", ""], rows_here(home, run, news))


def rows_here(home: Home, run: Trained, news: News) -> list[tuple[str, str]]:
    """What there is to say of it, each under its label."""
    folder = home.run_dir(run.run)
    log = folder / names.LOGS / "trainer.log"
    rows = [
        ("run", run.run),
        ("state", f"{run.state}: {run.reason}" if run.reason else run.state),
        ("progress", progress_of(run, news)),
        ("learned", news.learned()),
        ("saved", newest_saved(home, run) or "no checkpoint yet"),
        ("trained", "on this computer; nothing bills"),
        ("folder", str(folder)),
        ("numbers", str(folder / names.METRICS)),
        ("log", str(log) if home.world.exists(log) else ""),
    ]
    return [row for row in rows if row[1]]


def _look_once(home: Home, run: str | None) -> Status:
    problems = refresh(home)
    found = look_closely(home, find_run(home, run), problems)
    talk.emit("status/1", {**found.status.to_dict(), **found.document})
    talk.table(["", ""], found.rows)
    say_problems(problems)
    return found.status


@dataclasses.dataclass(frozen=True)
class Closely:
    status: Status
    document: dict[str, Any]  # beside what `Status` tells of itself
    rows: list[tuple[str, str]]  # for people


def look_closely(home: Home, run: RunRow, problems: list[str]) -> Closely:
    """Also its store, its provider and its plan. `problems`: what is known to be silent; what is found is added."""
    status = look(home, run)
    if status.problem and not any(status.run.id in problem for problem in problems):
        problems.append(status.problem)
    ways, pushed, figures = {"ssh": _ssh_line(home, status), "page": _page(home, status)}, "", dict[str, float]()
    beat = status.signs.heartbeat if status.signs else None
    try:
        figures = figures_of(home, status.run, beat)
        pushed = newest_pushed(home, status.run) if any(line.created_at for line in status.lines) else ""
    except (HomingError, OSError) as exc:
        if not problems:
            problems.append(f"The store could not be looked at: {str(exc).splitlines()[0]}")
    kept = None if status.run.is_live else kept_by(home, status.run)
    told = [event for event in diary.read(home, status.run.id) if event.kind != "lost"][-_TOLD:]
    plan = planned(home, status.run) if status.run.is_live else None
    found = ahead(status, beat, plan)
    document = {
        **ways,
        "pushed": pushed,
        "figures": figures,
        "ahead": dataclasses.asdict(found) if found else None,
        "kept": kept.to_dict() if kept else None,
        "guard": [codec.dump(event) for event in told],
        "problems": problems,
    }
    progress = progress_line(status, beat, figures, plan)
    rows = _rows(status, progress, ways, pushed, str(kept or ""), [event.text for event in told])
    if status.is_billing and (status.problem or status.is_silent) and (said := _last_log_line(home, status.lines[-1])):
        rows.append(("its log", said))
    if status.is_billing:
        away = " ".join(out_of_reach(home, name) for name in sorted({line.provider for line in status.lines[-1:]}))
        document["guard_at_home"] = {"is_armed": not away, "why": away}
        rows.append(("at home", away or "a guard, which made its round lately and reached the provider"))
    return Closely(status, document, rows)


def _last_log_line(home: Home, line: LedgerLine) -> str:
    """Of the provider's log, which needs no store: an agent that cannot push says there why."""
    if line.instance_id is None:
        return ""
    with contextlib.suppress(HomingError, OSError):
        return (home.provider_of(line).log(line.instance_id).strip().splitlines() or [""])[-1]
    return ""


def _ssh_line(home: Home, status: Status) -> str:
    """Ready to paste; "" where nothing runs or its provider is not reached by SSH."""
    try:
        return shlex.join(find_login(home, status.run).shell()) if status.is_billing else ""
    except HomingError:
        return ""


def _page(home: Home, status: Status) -> str:
    """The provider's own list of instances; "" where nothing runs, or it has none."""
    try:
        return home.provider_of(status.lines[-1]).page if status.is_billing else ""
    except (HomingError, OSError):
        return ""


def _rows(
    status: Status, progress: str, ways: dict[str, str], pushed: str, kept: str, told: list[str]
) -> list[tuple[str, str]]:
    run = status.run
    beat = status.signs.heartbeat if status.signs else None
    rows = [
        ("run", run.id),
        ("state", f"{run.state}: {run.reason}" if run.reason else run.state),
        ("progress", progress),
    ]
    if beat is not None and status.heartbeat_age_s is not None:
        old = ", which is long: it may be cut off or dead" if status.is_silent else ""
        rows.append(("heartbeat", f"{beat.state}, {format_duration(status.heartbeat_age_s)} ago{old}"))
        if status.is_billing:
            rows.append(("guards", "agent and dead-man" if beat.has_dead_man else "agent alone"))
        rows.append(("pushed", _pushed(pushed, is_all=beat.is_pushed)))
        if beat.problem:
            rows.append(("problem", beat.problem))
    for line in status.lines:
        where = f"{line.provider} {line.instance_id or line.mark}"
        so_far = "in all" if line.destroyed_at is not None else "so far"
        money = f"{usd(line.rate_usd_per_hour)}/h, {at_most(line)}{usd(line_spend(line, status.at))} {so_far}"
        rows.append(
            (f"attempt {line.attempt}", f"{where}: {line.state}, billing {line.billing}, {money}. {line.note}".rstrip())
        )
    rows += [(name, way) for name, way in ways.items() if way]
    rows.append(("store", run.store))
    if kept:
        rows.append(("kept there", kept))
    rows += [("home", text) for text in told]
    outcome = status.signs.outcome if status.signs else None
    if outcome is not None and outcome.log_tail and run.state == "failed":
        rows.append(("last words", outcome.log_tail))
    return rows


def _pushed(newest: str, *, is_all: bool) -> str:
    if is_all:
        return "all, verified" + (f"; the newest checkpoint is {newest}" if newest else "")
    return f"{newest}; it goes on while it trains" if newest else "no checkpoint yet"


def next_words(status: Status, name: str) -> str:
    """Each as `why: command`, three spaces apart; "" where nothing is left to do."""
    state = status.run.state
    if status.run.is_live:
        return f"Watch it: homing watch {name}   Read it: homing logs {name} -f   Stop it: homing stop {name}"
    if state == ADOPTED:
        back = f"homing adopt {shlex.quote(status.run.store)} {status.run.id}"
        return f"It goes on under that home. Take it back: {back}"
    if status.is_billing and not any(is_charged(line) for line in status.lines):
        return f"It has ended, and its processes on this computer have not: homing destroy {name}"
    if status.is_billing:
        return f"It has ended and its instance may still cost money: homing destroy {name}"
    if state == "done" and status.run.fetched_step is None:
        return f"Fetch it: homing fetch {name}"
    if state == "failed":
        return f"Why: homing logs {name}   Go on from its last checkpoint: homing launch {name} --resume"
    return f"Fetch it: homing fetch {name}   Go on: homing launch {name} --resume" if state == "stopped" else ""
