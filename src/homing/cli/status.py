"""`homing status`: one run, now."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import find_run, open_home, say_problems, usd
from homing.cli.find_run import TrainedHere, name_here
from homing.cli.options import Json, RunName
from homing.cli.trained_here import Trained, trained_here
from homing.cloud import diary
from homing.cloud.ahead import ahead, planned
from homing.cloud.connect import find_login
from homing.cloud.home import Home
from homing.cloud.ledger import ADOPTED
from homing.cloud.meter import at_most, line_spend
from homing.cloud.reconcile import refresh
from homing.cloud.status import Status, figures_of, look, newest_pushed, progress_line
from homing.cloud.stored import kept_by
from homing.cloud.watch import check_interval
from homing.errors import HomingError, UsageError
from homing.units import format_duration, parse_duration
from homing.wire import codec, names

__all__ = ["command"]

_TOLD = 3  # of what the guard at home did and said, the last


def command(
    run: RunName = None,
    watch: Annotated[
        str | None, typer.Option("--watch", metavar="[30]", help="Again every so many seconds, until the run ends.")
    ] = None,
    json_: Json = False,
) -> None:
    """One run, now: state, instances, dollars, what is pushed."""
    try:
        every_s = None if watch is None else check_interval(parse_duration(watch))
    except ValueError as exc:
        raise UsageError(what=f"--watch: {exc}.", fix="--watch 30") from exc
    with open_home() as home:
        try:
            status = _look_once(home, run)
        except TrainedHere as found:
            trained: Trained | None = found.run
            while trained is not None:
                _show_trained(home, trained)
                trained = _later(home, trained, every_s)
            return
        while every_s is not None and (status.run.is_live or status.is_billing):
            home.world.sleep(every_s)
            status = _look_once(home, status.run.id)
        _say_next(status)


def _show_trained(home: Home, run: Trained) -> None:
    """What `homing train` trained has a state and a folder, and no machine that anybody could be charged for."""
    folder = home.run_dir(run.run)
    talk.emit("status/1", {**dataclasses.asdict(run), "is_trained_here": True, "is_billing": False})
    at = f"{run.phase} step {run.steps}" if run.steps else ""
    rows = [("run", run.run), ("state", run.state), ("progress", at), ("trained", "on this computer; nothing bills"),
            ("folder", str(folder)), ("log", str(folder / names.METRICS))]  # fmt: skip
    talk.table(["", ""], rows)
    if run.state == "done":
        talk.say(f"Talk to it: homing chat {run.run}   Measure it: homing eval {run.run}")
    elif run.state != "training":
        talk.say(f"Go on: homing train {run.name}")


def _later(home: Home, run: Trained, every_s: float | None) -> Trained | None:
    """The same run after a while, where that is wanted and a trainer is at work on it."""
    if every_s is None or run.state != "training":
        return None
    home.world.sleep(every_s)
    return next((each for each in trained_here(home, set()) if each.run == run.run), None)


def _look_once(home: Home, run: str | None) -> Status:
    problems = refresh(home)
    status = look(home, find_run(home, run))
    if status.problem and not any(status.run.id in problem for problem in problems):
        problems.append(status.problem)
    login, pushed, figures = _ssh_line(home, status), "", dict[str, float]()
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
        "ssh": login,
        "pushed": pushed,
        "figures": figures,
        "ahead": dataclasses.asdict(found) if found else None,
        "kept": kept.to_dict() if kept else None,
        "guard": [codec.dump(event) for event in told],
        "problems": problems,
    }
    talk.emit("status/1", {**status.to_dict(), **document})
    progress = progress_line(status, beat, figures, plan)
    _show(status, progress, login, pushed, str(kept or ""), [event.text for event in told])
    say_problems(problems)
    return status


def _ssh_line(home: Home, status: Status) -> str:
    """Ready to paste; "" where nothing runs or its provider is not reached by SSH."""
    try:
        return shlex.join(find_login(home, status.run).shell()) if status.is_billing else ""
    except HomingError:
        return ""


def _show(status: Status, progress: str, login: str, pushed: str, kept: str, told: list[str]) -> None:
    run = status.run
    beat = status.signs.heartbeat if status.signs else None
    rows: list[tuple[str, object]] = [
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
    if login:
        rows.append(("ssh", login))
    rows.append(("store", run.store))
    if kept:
        rows.append(("kept there", kept))
    rows += [("home", text) for text in told]
    outcome = status.signs.outcome if status.signs else None
    if outcome is not None and outcome.log_tail and run.state == "failed":
        rows.append(("last words", outcome.log_tail))
    talk.table(["", ""], rows)


def _pushed(newest: str, *, is_all: bool) -> str:
    if is_all:
        return "all, verified" + (f"; the newest checkpoint is {newest}" if newest else "")
    return f"{newest}; it goes on while it trains" if newest else "no checkpoint yet"


def _say_next(status: Status) -> None:
    name, state = name_here(status.run), status.run.state
    if status.run.is_live:
        talk.say(f"Watch it: homing watch {name}   Read it: homing logs {name} -f   Stop it: homing stop {name}")
    elif state == ADOPTED:
        talk.say(f"It goes on under that home. Take it back: homing adopt {status.run.store} {status.run.id}")
    elif status.is_billing:
        talk.say(f"It has ended and its instance may still cost money: homing destroy {name}")
    elif state == "done" and status.run.fetched_step is None:
        talk.say(f"Fetch it: homing fetch {name}")
    elif state == "failed":
        talk.say(f"Why: homing logs {name}   Go on from its last checkpoint: homing launch {name} --resume")
    elif state == "stopped":
        talk.say(f"Fetch it: homing fetch {name}   Go on: homing launch {name} --resume")
