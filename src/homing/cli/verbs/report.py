"""`homing report`: one page about a run, to keep, to share, or to publish with a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from homing.api.lookup.find_runs import open_home
from homing.api.notices import say_problems
from homing.api.pages.write_report import check_target, look_up, next_commands, subject_of, write_report
from homing.cli import output
from homing.cli.options import Json, RunName
from homing.cloud.home import Home
from homing.errors import UsageError
from homing.report import Report, read_report, render_markdown
from homing.report.collect import add_evals
from homing.report.render_page import MARK, render_for_maintainers

__all__ = ["command"]


def command(
    run: RunName = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.md|FILE.html", help="Output file; default: Markdown on stdout."),
    ] = None,
    evals: Annotated[
        list[Path] | None,
        typer.Option("--eval", metavar="FILE.json", help="Results saved by `homing eval --out`; repeatable."),
    ] = None,
    for_maintainers: Annotated[
        bool,
        typer.Option("--for-maintainers", help="Write a bug report: versions, times, events; no secrets."),
    ] = False,
    json_: Json = False,
) -> None:
    """Write one page about a run: what was trained, on which data, how it went, samples, where, and the cost.

    NAME selects the newest finished run with that name, as in chat; NAME@RUN selects any run, finished or not.
    """
    check_target(out)
    with open_home() as home:
        found = look_up(home, run)
        report = read_report(home, subject_of(found))
        if for_maintainers:
            _for_maintainers(report, home, out)
            return
    report = dataclasses.replace(report, next=next_commands(found, report))
    for file in evals or []:
        report = add_evals(report, file)
    files = write_report(out, report) if out is not None else []
    output.emit("report/1", {**report.to_dict(), "files": files})
    say_problems(report.problems)
    if out is None and not output.is_json():
        print(render_markdown(report), end="")
    if out is not None:
        output.say(f"Written: {' and '.join(files)}")
    elif not output.is_json():
        output.say(f"Write one file with curves: homing report {report.run} --out {report.name}.html")


def _for_maintainers(report: Report, home: Home, out: Path | None) -> None:
    text = render_for_maintainers(report, home)
    output.emit("maintainers/1", {"text": text})
    if out is None:
        if not output.is_json():
            print(text, end="")
        return
    if out.suffix != ".md":
        raise UsageError(what="--for-maintainers writes Markdown.", fix=f"--out {out.with_suffix('.md')}")
    out.write_text(f"<!-- {MARK} -->\n\n{text}", encoding="utf-8")
    output.say(f"Written: {out}. Read it through before you send it.")
