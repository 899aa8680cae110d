"""`homing rehearse`: the whole workflow on a fake cloud, free of charge, with injected faults."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from homing.api.data.prepare import Prepared
from homing.api.lookup.find_runs import parse_limit, usd
from homing.api.tools.rehearse_run import Rehearsed, for_real, list_faults, rehearse_run
from homing.cli import output
from homing.cli.options import Json, Sets
from homing.cli.prep_report import Meter, print_report
from homing.errors import UsageError
from homing.units import format_duration

__all__ = ["command"]


def command(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run file.")] = None,
    fault: Annotated[
        list[str] | None, typer.Option("--fault", metavar="NAME", help="Fault to inject; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the simulated cloud.")] = 0,
    is_listing: Annotated[bool, typer.Option("--list-faults", help="List the faults.")] = False,
    no_guard: Annotated[bool, typer.Option("--no-guard", help="Simulate a provider that has no spend guard.")] = False,
    spend_limit: Annotated[
        str | None,
        typer.Option("--spend-limit", metavar="DOLLARS", help="Spend limit in simulated dollars; it is enforced."),
    ] = None,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Run the whole workflow with a small model on a fake cloud, with faults of your choice.

    Rents nothing, costs nothing.
    """
    if is_listing:
        _show_faults()
        return
    if run is None:
        raise UsageError(what="No run given.", fix="homing rehearse RUN   or: homing rehearse --list-faults")
    with Meter() as meter:

        def show_prepared(prepared: Prepared) -> None:
            meter.show(None)
            _print_prepared(prepared)

        rehearsed = rehearse_run(
            run,
            faults=fault or [],
            seed=seed,
            has_guard=not no_guard,
            spend_limit_usd=parse_limit(spend_limit),
            sets=sets or [],
            on_event=_print_event,
            on_progress=meter.show,
            on_prepared=show_prepared,
        )
    output.emit("rehearse/1", rehearsed.to_dict())
    _say_verdict(rehearsed)
    output.say(f"For real: {for_real(run, sets or [])}")


def _show_faults() -> None:
    faults = list_faults()
    output.emit("rehearse-faults/1", {"faults": faults})
    output.table(["fault", "what happens"], faults.items())
    output.say("Rehearse with some of these faults: homing rehearse RUN --fault preempt --fault destroy-lies")


def _print_event(kind: str, text: str) -> None:
    output.say({"step": f"\n== {text}", "fault": f"  !! {text}"}.get(kind, f"  {text}"))


def _print_prepared(prepared: Prepared) -> None:
    """Print the output of `homing prep` on stderr, because with --json our stdout carries a single document."""
    if "splits" in prepared.document:
        with contextlib.redirect_stdout(sys.stderr):
            print_report(prepared.document, is_run=prepared.is_run)
    for warning in prepared.warnings:
        output.say(f"warning: {warning}")


def _say_verdict(rehearsed: Rehearsed) -> None:
    done, order = rehearsed.done, rehearsed.order
    rows = [
        (row.mark, row.instances, format_duration(row.billed_s), usd(row.bill_usd), usd(row.ledger_usd))
        for row in done.verdict.rows
    ]
    title = "Bill of the simulated cloud and our ledger"
    output.table(["mark", "instances", "billed for", "bill", "ledger"], rows, title=title)
    if rehearsed.error is not None:
        raise rehearsed.error
    assert done.fetched is not None
    output.say(
        f"Passed: nothing was left billing, {usd(done.verdict.bill_usd)} of {usd(order.limit_usd)} simulated dollars"
        f" were spent, bill and ledger agree, and the model from step {done.fetched.manifest.step:,} was fetched."
    )
