"""`homing status`: one run, now."""

from __future__ import annotations

from homing.cli import talk
from homing.cli.control import find_run, open_home, say_problems, usd
from homing.cli.options import Json, RunName
from homing.cloud.reconcile import refresh
from homing.cloud.status import STALE_S, Status, look, progress_line
from homing.units import format_duration

__all__ = ["command"]


def command(run: RunName = None, json_: Json = False) -> None:
    """One run, now: state, instances, dollars, what is pushed."""
    with open_home() as home:
        problems = refresh(home)
        status = look(home, find_run(home, run))
        if status.problem and not any(status.run.id in problem for problem in problems):
            problems.append(status.problem)
        talk.emit("status/1", {**status.to_dict(), "problems": problems})
        _show(status)
        say_problems(problems)
        _say_next(status)


def _show(status: Status) -> None:
    run = status.run
    beat = status.signs.heartbeat if status.signs else None
    rows: list[tuple[str, object]] = [
        ("run", run.id),
        ("state", f"{run.state}: {run.reason}" if run.reason else run.state),
        ("progress", progress_line(status, beat)),
    ]
    if beat is not None and status.heartbeat_age_s is not None:
        old = ", which is long: it may be cut off or dead" if status.heartbeat_age_s > STALE_S and run.is_live else ""
        rows.append(("heartbeat", f"{beat.state}, {format_duration(status.heartbeat_age_s)} ago{old}"))
        rows.append(("pushed", "all, verified" if beat.is_pushed else "while it trains; not the end yet"))
        if beat.problem:
            rows.append(("problem", beat.problem))
    for line in status.lines:
        where = f"{line.provider} {line.instance_id or line.mark}"
        rate = f"{usd(line.rate_usd_per_hour)}/h"
        rows.append((f"attempt {line.attempt}", f"{where}: {line.state}, billing {line.billing}, {rate}. {line.note}"))
    rows.append(("store", run.store))
    talk.table(["", ""], rows)


def _say_next(status: Status) -> None:
    name, state = status.run.name, status.run.state
    if status.run.is_live:
        talk.say(f"Watch it: homing watch {name}   Read it: homing logs {name} -f   Stop it: homing stop {name}")
    elif status.is_billing:
        talk.say(f"It has ended and its instance may still cost money: homing destroy {name}")
    elif state == "done" and status.run.fetched_step is None:
        talk.say(f"Fetch it: homing fetch {name}")
    elif state == "failed":
        talk.say(f"Why: homing logs {name}   Go on from its last checkpoint: homing launch {name} --resume")
    elif state == "stopped":
        talk.say(f"Fetch it: homing fetch {name}   Go on: homing launch {name} --resume")
