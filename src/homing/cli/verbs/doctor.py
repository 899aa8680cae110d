"""`homing doctor`: find problems before they cost money."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from homing import progress
from homing.api.tools.run_doctor import run_doctor
from homing.cli import output
from homing.cli.options import Json, Sets
from homing.config.load import as_typed
from homing.doctor.check import Check
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

    Creates nothing, except that with RUN a probe file is written to the run's store, if that exists, and deleted again.
    """

    def show(check: Check) -> None:
        if not output.is_json() and (every or check.is_finding):
            asking.clear()
            _print(check)

    with _Asking() as asking:
        found = run_doctor(run, providers=provider or [], sets=sets or [], on_check=show, notify=asking)
    checks, faults = found.checks, found.faults
    output.emit("doctor/1", found.to_dict())
    counts = {state: sum(check.state == state for check in checks) for state in ("ok", "warning", "fault", "skipped")}
    output.say(
        f"{counted(len(checks), 'check')}: {counted(counts['fault'], 'fault')},"
        f" {counted(counts['warning'], 'warning')}, {counts['ok']} passed,"
        f" {counts['skipped']} skipped" + ("." if every else "; --all shows them.")
    )
    output.say(_again(faults, run, sets, provider) if faults else f"Next: {found.next}")
    if faults:
        raise typer.Exit(1)


def _again(faults: list[Check], run: str | None, sets: list[str] | None, providers: list[str] | None) -> str:
    """Return the command as the user typed it, because only the same checks can confirm that the problem is fixed."""
    named = [shlex.quote(run)] if run else []
    named += [f"--provider {shlex.quote(name)}" for name in providers or []]
    it = "it" if len(faults) == 1 else "them"
    return f"Fix {it} and run again: {' '.join(['homing doctor', *named])}{as_typed(sets or [])}"


class _Asking:
    """Show the check in progress as a bar, which disappears before other output."""

    def __init__(self) -> None:
        self._listener = progress.listener()  # the checks of providers run in other threads

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, subject: str) -> None:
        self._listener(progress.Progress(f"Checking {subject}"))

    def clear(self) -> None:
        progress.finished()


def _print(check: Check) -> None:
    print(f"{check.state:<8} {check.name:<18} {check.text}", flush=True)
    if check.is_finding or check.state == "skipped":
        for label, text in (("fix", check.fix), ("see", check.page)):
            if text:
                print(f"{'':<8} {label:<18} {text}")
