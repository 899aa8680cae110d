"""`homing reconcile`: compare everything that homing created, at every provider, with the ledger."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from homing.api.lookup.find_runs import usd
from homing.api.runs.reconcile_all import Reconciled, reconcile_all
from homing.cli import output
from homing.cli.options import Json, Yes
from homing.cloud.reconcile.inventory import Finding, Survey
from homing.units import format_duration

__all__ = ["command"]


def command(
    is_destroy: Annotated[
        bool, typer.Option("--destroy", help="Destroy resources that are left over or missing from the ledger.")
    ] = False,
    is_adopt: Annotated[
        bool, typer.Option("--adopt", help="Record resources that the ledger does not list, and keep them running.")
    ] = False,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """List the resources that homing created at any provider, and destroy or keep those missing from the ledger.

    Changes nothing else.
    """
    is_chosen = is_destroy or is_adopt

    def agrees(question: str) -> bool:
        # --yes alone decides nothing: it only confirms the action that a flag requests.
        return output.ask(question, yes=yes and is_chosen)

    reconciled = reconcile_all(
        is_destroy=is_destroy,
        is_adopt=is_adopt,
        agrees=agrees if is_chosen or sys.stdin.isatty() else None,
        on_found=_show,
    )
    error = reconciled.error
    output.emit_all("reconcile/1", reconciled.to_dict(), error)
    if error is not None:
        raise error
    _say_end(reconciled)


def _show(found: Survey) -> None:
    output.table(
        ["", "thing", "provider", "run", "age", "rate", "dollars", ""], [_row(each) for each in found.findings]
    )


def _row(finding: Finding) -> tuple[object, ...]:
    return (
        finding.kind,
        f"{finding.thing} {finding.id}",
        finding.provider,
        finding.run_id or "(no run)",
        format_duration(finding.age_s),
        f"{usd(finding.rate_usd_per_hour)}/h",
        usd(finding.spend_usd),
        finding.text,
    )


def _say_end(reconciled: Reconciled) -> None:
    found = reconciled.found
    for each in found.to_answer:
        output.say(f"{each.thing} {each.id}: {reconciled.answer_to(each)}")
    if found.to_answer:
        output.say("See what was kept and destroyed: homing ledger")
    elif found.findings:
        output.say("Everything found is in the ledger. See what is billing: homing runs")
    else:
        output.say(
            "No homing resources at any provider that responded."
            if found.problems
            else "No homing resources at any provider."
        )
