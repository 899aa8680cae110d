"""Write a one-page report about a run. Implements `homing report` and `Run.report()`."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.api.lookup.find_runs import find_finished, name_here, open_home
from homing.api.lookup.local_runs import Trained
from homing.api.notices import say_problems
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import ADOPTED, RunRow
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import has_checkpoint
from homing.config.home_and_run_files import launch_again
from homing.errors import UsageError
from homing.report import Report, Subject, read_report, render_html, render_markdown
from homing.report.collect import add_evals
from homing.report.render_page import MARK, picture_of, render_for_maintainers

__all__ = ["RunReport", "report_run", "subject_of"]

_SUFFIXES = (".md", ".html")
_MARK_WITHIN = 200  # bytes


@dataclass(frozen=True)
class RunReport:
    report: Report
    text: str  # the bug report for the maintainers; "" for an ordinary report
    files: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text} if self.text else {**self.report.to_dict(), "files": self.files}


def report_run(
    run: str | None = None, *, out: Path | None = None, evals: Sequence[Path] = (), for_maintainers: bool = False
) -> RunReport:
    """Collect what is known about a run, and write it to `out` (.md or .html) if given.

    `evals`: results saved by `homing eval --out`. `for_maintainers`: a bug report instead, in Markdown.
    """
    _check_target(out, for_maintainers)
    with open_home() as home:
        found = _look_up(home, run)
        report = read_report(home, subject_of(found))
        if for_maintainers:
            text = render_for_maintainers(report, home)
            if out is not None:
                out.write_text(f"<!-- {MARK} -->\n\n{text}", encoding="utf-8")
            return RunReport(report, text, [str(out)] if out is not None else [])
        report = dataclasses.replace(report, next=_next_commands(home, found, report))
    for file in evals:
        report = add_evals(report, file)
    return RunReport(report, "", _write(out, report) if out is not None else [])


def _look_up(home: Home, typed: str | None) -> RunRow | Trained:
    found = find_finished(home, typed)
    if isinstance(found, Trained) or not _may_have_changed(home, found):
        return found
    say_problems(refresh(home))
    return home.ledger.run(found.id) or found


def _may_have_changed(home: Home, row: RunRow) -> bool:
    """Return True if the providers must be queried. Once all instances are destroyed, the ledger is complete."""
    return row.is_live or any(line.destroyed_at is None for line in home.ledger.lines(row.id))


def subject_of(found: RunRow | Trained) -> Subject:
    if isinstance(found, Trained):
        return Subject(found.run, found.name, found.state, found.reason, None)
    return Subject(found.id, found.name, found.state, found.reason, found)


def _next_commands(home: Home, found: RunRow | Trained, report: Report) -> list[str]:
    """Return the next commands: how to complete the run, and how to use its weights if there are any."""
    name = found.run if isinstance(found, Trained) else name_here(found)
    commands = []
    if found.is_live:
        commands.append(f"homing watch {name}")
    elif not report.is_finished:
        commands.append(_again(home, found, name))
    if not report.kept:
        return commands
    if isinstance(found, RunRow) and not any("fetched" in each.called for each in report.kept):
        commands.append(f"homing fetch {name}")
    return [*commands, f"homing chat {name}", f"homing eval {name} --out evals.md", f"homing export {name}"]


def _again(home: Home, found: RunRow | Trained, name: str) -> str:
    if isinstance(found, Trained):
        return found.again
    if found.state == ADOPTED:
        return f"homing adopt {shlex.quote(found.store)} {found.id}"
    return f"homing launch {name} --resume" if has_checkpoint(home, found) else launch_again(found.name)


def _check_target(out: Path | None, for_maintainers: bool) -> None:
    """Before reading anything, refuse to write an unknown file format, or over a file that is not a homing report."""
    if out is None:
        return
    if out.suffix not in _SUFFIXES:
        raise UsageError(
            what=f"--out {out}: unknown file extension.",
            why=f"Use {' or '.join(_SUFFIXES)}; for machine-readable data, use --json.",
            fix=f"Use --out {out.with_suffix('.html')}",
        )
    for path in (out, *([out.with_suffix(".svg")] if out.suffix == ".md" else [])):
        if path.exists() and not _is_ours(path):
            raise UsageError(
                what=f"{path} already exists and is not a homing report, so it is not overwritten.",
                fix=f"Use --out {out.with_name(f'{out.stem}-report{out.suffix}')}",
            )
    if for_maintainers and out.suffix != ".md":
        raise UsageError(what="--for-maintainers writes only Markdown.", fix=f"Use --out {out.with_suffix('.md')}")


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return MARK.encode() in file.read(_MARK_WITHIN)
    except OSError:
        return False


def _write(out: Path, report: Report) -> list[str]:
    """Write each file atomically, the picture before the page that shows it."""
    pages: Sequence[tuple[Path, str]] = [(out, render_html(report))]
    if out.suffix == ".md":
        drawn, svg = picture_of(report), out.with_suffix(".svg")
        pictures = [(svg, f"<!-- {MARK} -->\n{drawn}")] if drawn else []
        pages = [*pictures, (out, render_markdown(report, svg.name if drawn else ""))]
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, text in pages:
        temporary = path.with_name(f".{path.name}.partial")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    return [str(path) for path, _ in reversed(pages)]
