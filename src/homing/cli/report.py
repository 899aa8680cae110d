"""`homing report`: one page about a run, to keep, to show, or to put beside a published model."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import open_home, say_problems
from homing.cli.find_run import find_finished, name_here
from homing.cli.options import Json, RunName
from homing.cli.trained_here import Trained
from homing.cloud.home import Home
from homing.cloud.ledger import ADOPTED, RunRow
from homing.cloud.reconcile import refresh
from homing.errors import UsageError
from homing.report import Report, Subject, read_report, render_html, render_markdown
from homing.report.evals import add_evals
from homing.report.maintainers import render_for_maintainers
from homing.report.page import MARK, picture_of

__all__ = ["command", "subject_of"]

_SUFFIXES = (".md", ".html")
_MARK_WITHIN = 200  # bytes


def command(
    run: RunName = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.md|FILE.html", help="Write it there; Markdown on stdout when left out."),
    ] = None,
    evals: Annotated[
        list[Path] | None,
        typer.Option("--eval", metavar="FILE.json", help="Figures that `homing eval --out` kept; may be repeated."),
    ] = None,
    for_maintainers: Annotated[
        bool,
        typer.Option(
            "--for-maintainers", help="What to send if something differs: versions, times, events; no secrets."
        ),
    ] = False,
    json_: Json = False,
) -> None:
    """One page about a run: what was trained, on what, how it went, samples, where, for how much. NAME is its newest
    finished run, as it is for chat and the others; NAME@RUN is another one, finished or not."""
    _check(out)
    with open_home() as home:
        found = _look_up(home, run)
        report = read_report(home, subject_of(found))
        if for_maintainers:
            _for_maintainers(report, home, out)
            return
    report = dataclasses.replace(report, next=_next(found, report))
    for file in evals or []:
        report = add_evals(report, file)
    files = _write(out, report) if out is not None else []
    talk.emit("report/1", {**report.to_dict(), "files": files})
    say_problems(report.problems)
    if out is None and not talk.is_json():
        print(render_markdown(report), end="")
    if out is not None:
        talk.say(f"Written: {' and '.join(files)}")
    elif not talk.is_json():
        talk.say(f"With its curves, as one file: homing report {report.run} --out {report.name}.html")


def _for_maintainers(report: Report, home: Home, out: Path | None) -> None:
    text = render_for_maintainers(report, home)
    talk.emit("maintainers/1", {"text": text})
    if out is None:
        if not talk.is_json():
            print(text, end="")
        return
    if out.suffix != ".md":
        raise UsageError(what="--for-maintainers writes Markdown.", fix=f"--out {out.with_suffix('.md')}")
    out.write_text(f"<!-- {MARK} -->\n\n{text}", encoding="utf-8")
    talk.say(f"Written: {out}. Read it through before you send it.")


def _look_up(home: Home, typed: str | None) -> RunRow | Trained:
    found = find_finished(home, typed)
    if isinstance(found, Trained) or not _may_have_changed(home, found):
        return found
    say_problems(refresh(home))
    return home.ledger.run(found.id) or found


def _may_have_changed(home: Home, row: RunRow) -> bool:
    """Of what has ended, and is gone, the ledger tells all; nobody need be asked."""
    return row.is_live or any(line.destroyed_at is None for line in home.ledger.lines(row.id))


def subject_of(found: RunRow | Trained) -> Subject:
    if isinstance(found, Trained):
        return Subject(found.run, found.name, found.state, found.reason, None)
    return Subject(found.id, found.name, found.state, found.reason, found)


def _next(found: RunRow | Trained, report: Report) -> list[str]:
    """Commands: how to see it through, and where there are weights how to use them."""
    name = found.run if isinstance(found, Trained) else name_here(found)
    commands = []
    if found.is_live:
        commands.append(f"homing watch {name}")
    elif not report.is_finished:
        commands.append(_again(found, name))
    if not report.kept:
        return commands
    if isinstance(found, RunRow) and not any("fetched" in each.called for each in report.kept):
        commands.append(f"homing fetch {name}")
    return [*commands, f"homing chat {name}", f"homing eval {name} --out evals.md", f"homing export {name}"]


def _again(found: RunRow | Trained, name: str) -> str:
    if isinstance(found, Trained):
        return found.again
    is_theirs = found.state == ADOPTED
    return f"homing adopt {shlex.quote(found.store)} {found.id}" if is_theirs else f"homing launch {name} --resume"


def _check(out: Path | None) -> None:
    """Before anything is read: a name that says neither format, and a file that somebody else wrote."""
    if out is None:
        return
    if out.suffix not in _SUFFIXES:
        raise UsageError(
            what=f"--out {out}: what to write is told by its ending.",
            why=f"It is {' or '.join(_SUFFIXES)}; the same as data is --json.",
            fix=f"--out {out.with_suffix('.html')}",
        )
    for path in (out, *([out.with_suffix(".svg")] if out.suffix == ".md" else [])):
        if path.exists() and not _is_ours(path):
            raise UsageError(
                what=f"{path} is there already, and is no report of homing: it is not written over.",
                fix=f"--out {out.with_name(f'{out.stem}-report{out.suffix}')}",
            )


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return MARK.encode() in file.read(_MARK_WITHIN)
    except OSError:
        return False


def _write(out: Path, report: Report) -> list[str]:
    """Each whole or absent; the picture before the page that shows it."""
    pages: Sequence[tuple[Path, str]] = [(out, render_html(report))]
    if out.suffix == ".md":
        drawn, beside = picture_of(report), out.with_suffix(".svg")
        pictures = [(beside, f"<!-- {MARK} -->\n{drawn}")] if drawn else []
        pages = [*pictures, (out, render_markdown(report, beside.name if drawn else ""))]
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, text in pages:
        aside = path.with_name(f".{path.name}.aside")
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    return [str(path) for path, _ in reversed(pages)]
