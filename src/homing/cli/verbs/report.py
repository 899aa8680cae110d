"""`homing report`: one page about a run, to keep, to share, or to publish with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homing.api.notices import say_problems
from homing.api.pages.write_report import RunReport, report_run
from homing.cli import output
from homing.cli.options import Json, RunName
from homing.report import render_markdown

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
        typer.Option("--for-maintainers", help="Write a bug report with versions, times and events, but no secrets."),
    ] = False,
    json_: Json = False,
) -> None:
    """Write one page about a run: the model, its data, how training went, samples, the machine and the cost.

    NAME selects the newest finished run with that name, as in chat; NAME@RUN selects any run, finished or not.
    """
    done = report_run(run, out=out, evals=evals or [], for_maintainers=for_maintainers)
    if for_maintainers:
        _show_for_maintainers(done, out)
        return
    report = done.report
    output.emit("report/1", done.to_dict())
    say_problems(report.problems)
    if out is None and not output.is_json():
        print(render_markdown(report), end="")
    if out is not None:
        output.say(f"Written: {' and '.join(done.files)}")
    elif not output.is_json():
        output.say(f"Write an HTML page with curves: homing report {report.run} --out {report.name}.html")


def _show_for_maintainers(done: RunReport, out: Path | None) -> None:
    output.emit("maintainers/1", done.to_dict())
    if out is not None:
        output.say(f"Written: {out}. Review it before you send it.")
    elif not output.is_json():
        print(done.text, end="")
