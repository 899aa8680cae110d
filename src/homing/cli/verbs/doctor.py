"""`homing doctor`: find problems before they cost money."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from homing.api.data.stale_shards import stale_shards
from homing.api.lookup.find_runs import open_home
from homing.api.run_changes import as_typed
from homing.cli import output
from homing.cli.options import Json, Sets
from homing.cloud.home import Home
from homing.cloud.providers.registry import PROVIDERS
from homing.config.load import load_run
from homing.config.paths import run_files, typed_name
from homing.config.projects import find_run_file
from homing.doctor.check import Check
from homing.doctor.run_checks import examine
from homing.doctor.subject import Examined
from homing.errors import HomingError, UsageError
from homing.units import counted

__all__ = ["command"]


def command(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Also check this run: its file, data, providers and store.")
    ] = None,
    provider: Annotated[
        list[str] | None, typer.Option("--provider", metavar="NAME", help="Check this provider; repeatable.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Also show checks that passed or were skipped.")] = False,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Check keys, permissions, clients, SSH, disk, clock, ledger and store, and print a fix for each problem.

    Creates nothing. With RUN, a probe file is written to its store, if the store exists, and deleted again.
    """
    checks, asking = list[Check](), _Asking()
    with open_home() as home, asking:
        examined = _examined(home, run, sets or [], provider or [], asking)
        for check in examine(examined):
            checks.append(check)
            if not output.is_json() and (every or check.is_finding):
                asking.clear()
                _print(check)
    faults = [check for check in checks if check.state == "fault"]
    output.emit("doctor/1", {"checks": [dataclasses.asdict(check) for check in checks], "num_faults": len(faults)})
    counts = {state: sum(check.state == state for check in checks) for state in ("ok", "warning", "fault", "skipped")}
    output.say(
        f"{counted(len(checks), 'check')}: {counted(counts['fault'], 'fault')},"
        f" {counted(counts['warning'], 'warning')}, {counts['ok']} passed,"
        f" {counts['skipped']} skipped" + ("." if every else "; --all shows them.")
    )
    output.say(_again(faults, run, sets, provider) if faults else f"Next: {_next(examined.typed)}")
    if faults:
        raise typer.Exit(1)


def _next(typed: str) -> str:
    """Return the next command: for the given run, the newest run file, or a first one."""
    if not typed and not run_files():
        return "homing new first --from tiny"
    return f"homing plan {typed}".rstrip()


def _again(faults: list[Check], run: str | None, sets: list[str] | None, providers: list[str] | None) -> str:
    """Repeat the command as typed: a different check would not show that the fault is gone."""
    named = [shlex.quote(run)] if run else []
    named += [f"--provider {shlex.quote(name)}" for name in providers or []]
    it = "it" if len(faults) == 1 else "them"
    return f"Fix {it} and run again: {' '.join(['homing doctor', *named])}{as_typed(sets or [])}"


class _Asking:
    """The check in progress, on a terminal: one line on stderr, rewritten, and cleared when there is output."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty() and not output.is_quiet()

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, subject: str) -> None:
        if self._is_shown:
            output.redraw(f"asking: {subject} ...")

    def clear(self) -> None:
        if self._is_shown:
            output.redraw("")


def _examined(
    home: Home, run: str | None, sets: list[str], named: list[str], notify: Callable[[str], None]
) -> Examined:
    examined = Examined(home, Path.cwd(), named=tuple(named), notify=notify)
    if run is None:
        return examined
    if run in PROVIDERS and run not in run_files():
        raise UsageError(
            what=f"No run called {run!r} found.",
            why=f"{run} is a provider.",
            fix=f"homing doctor --provider {run}",
        )
    examined.run_text = _text(run)
    try:
        loaded = load_run(run, sets)
    except HomingError as exc:
        return dataclasses.replace(examined, run_error=exc)
    typed = f"{typed_name(loaded.file)}{as_typed(sets)}"
    is_prepared = loaded.is_prepared and not any(stale_shards(loaded))
    return dataclasses.replace(examined, run=loaded.run, is_prepared=is_prepared, typed=typed)


def _text(run: str) -> str:
    """Return the run file's text: placeholders are searched for even if the file does not resolve."""
    try:
        return find_run_file(run).read_text(encoding="utf-8", errors="replace")
    except (HomingError, OSError):
        return ""


def _print(check: Check) -> None:
    print(f"{check.state:<8} {check.name:<18} {check.text}", flush=True)
    if check.is_finding or check.state == "skipped":
        for label, text in (("fix", check.fix), ("see", check.page)):
            if text:
                print(f"{'':<8} {label:<18} {text}")
