"""One page about a run: find it, read it, and write the page. What `homing report` and `Run.report()` do."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from homing.api.lookup.find_runs import find_finished, name_here
from homing.api.lookup.local_runs import Trained
from homing.api.notices import say_problems
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import ADOPTED, RunRow
from homing.cloud.reconcile.reconcile import refresh
from homing.errors import UsageError
from homing.report import Report, Subject, render_html, render_markdown
from homing.report.render_page import MARK, picture_of

__all__ = ["check_target", "look_up", "next_commands", "subject_of", "write_report"]

_SUFFIXES = (".md", ".html")
_MARK_WITHIN = 200  # bytes


def look_up(home: Home, typed: str | None) -> RunRow | Trained:
    found = find_finished(home, typed)
    if isinstance(found, Trained) or not _may_have_changed(home, found):
        return found
    say_problems(refresh(home))
    return home.ledger.run(found.id) or found


def _may_have_changed(home: Home, row: RunRow) -> bool:
    """Return whether the providers must be asked; for a run that has ended and is destroyed, the ledger is complete."""
    return row.is_live or any(line.destroyed_at is None for line in home.ledger.lines(row.id))


def subject_of(found: RunRow | Trained) -> Subject:
    if isinstance(found, Trained):
        return Subject(found.run, found.name, found.state, found.reason, None)
    return Subject(found.id, found.name, found.state, found.reason, found)


def next_commands(found: RunRow | Trained, report: Report) -> list[str]:
    """Return the next commands: how to complete the run, and how to use its weights if there are any."""
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
    is_adopted = found.state == ADOPTED
    return f"homing adopt {shlex.quote(found.store)} {found.id}" if is_adopted else f"homing launch {name} --resume"


def check_target(out: Path | None) -> None:
    """Before anything is read, refuse an unknown file format and a file that is not a homing report."""
    if out is None:
        return
    if out.suffix not in _SUFFIXES:
        raise UsageError(
            what=f"--out {out}: unknown file extension.",
            why=f"Use {' or '.join(_SUFFIXES)}; for data use --json.",
            fix=f"--out {out.with_suffix('.html')}",
        )
    for path in (out, *([out.with_suffix(".svg")] if out.suffix == ".md" else [])):
        if path.exists() and not _is_ours(path):
            raise UsageError(
                what=f"{path} already exists and is not a homing report, so it is not overwritten.",
                fix=f"--out {out.with_name(f'{out.stem}-report{out.suffix}')}",
            )


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return MARK.encode() in file.read(_MARK_WITHIN)
    except OSError:
        return False


def write_report(out: Path, report: Report) -> list[str]:
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
