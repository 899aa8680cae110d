"""`homing reconcile`: compare everything with our mark, at every provider, with the ledger."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from homing.api.lookup.find_runs import open_home, usd
from homing.api.notices import say_problems
from homing.cli import output
from homing.cli.options import Json, Yes
from homing.cloud.destroy import end_finding
from homing.cloud.home import Home
from homing.cloud.reconcile.inventory import Finding, Survey, keep, survey
from homing.errors import StillBilling, UsageError
from homing.units import counted, format_duration

__all__ = ["command"]


def command(
    is_destroy: Annotated[
        bool, typer.Option("--destroy", help="Destroy resources that are leftover or missing in the ledger.")
    ] = False,
    is_adopt: Annotated[
        bool, typer.Option("--adopt", help="Add resources missing in the ledger to it and keep them.")
    ] = False,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Ask every provider for resources with our mark, and destroy or keep those missing in the ledger.

    Touches nothing else.
    """
    if is_destroy and is_adopt:
        raise UsageError(
            what="--destroy and --adopt cannot be combined.", fix="homing reconcile   asks about each resource"
        )
    with open_home() as home:
        found = survey(home)
        output.table(
            ["", "thing", "provider", "run", "age", "rate", "dollars", ""], [_row(each) for each in found.findings]
        )
        say_problems(found.problems)
        answers = {each.mark + each.id: _answer(home, each, is_destroy, is_adopt, yes) for each in found.to_answer}
        error = _still_billing(found, answers)
        output.emit_all("reconcile/1", _document(found, answers), error)
        if error is not None:
            raise error
        _say_end(found, answers)


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


def _answer(home: Home, finding: Finding, is_destroy: bool, is_adopt: bool, yes: bool) -> str:
    """Return "ended", "kept", or why it is neither."""
    name = f"{finding.thing} {finding.id} on {finding.provider}"
    money = f"{usd(finding.rate_usd_per_hour)}/h, {usd(finding.spend_usd)} in {format_duration(finding.age_s)}"
    can_keep = finding.line is not None
    is_chosen = is_destroy or is_adopt
    if not is_chosen and not sys.stdin.isatty():
        return "not decided: no terminal; pass --destroy or --adopt"
    if is_destroy or not is_chosen:
        # --yes alone decides nothing: it only agrees to what a flag asks for.
        if output.ask(f"Destroy {name} ({money})?", yes=yes and is_destroy):
            return end_finding(home, finding) or "ended"
        return "left unchanged" if is_destroy or not can_keep else _keep(home, finding, name, money, False)
    return _keep(home, finding, name, money, yes) if can_keep else "left unchanged: only an instance can be kept"


def _keep(home: Home, finding: Finding, name: str, money: str, yes: bool) -> str:
    if not output.ask(f"Keep {name} in the ledger and let it continue billing ({money})?", yes=yes):
        return "left unchanged"
    output.say(f"{name} is kept: {keep(home, finding)}")
    return "kept"


def _document(found: Survey, answers: dict[str, str]) -> dict[str, Any]:
    return {
        "findings": [
            {
                "kind": each.kind,
                "thing": each.thing,
                "provider": each.provider,
                "id": each.id,
                "mark": each.mark,
                "run": each.run_id,
                "age_s": each.age_s,
                "rate_usd_per_hour": str(each.rate_usd_per_hour),
                "spend_usd": str(each.spend_usd),
                "text": each.text,
                "answer": answers.get(each.mark + each.id, ""),
            }
            for each in found.findings
        ],
        "problems": found.problems,
        "is_blind": found.is_blind,
    }


def _still_billing(found: Survey, answers: dict[str, str]) -> StillBilling | None:
    """Return StillBilling (exit code 6) if something undecided may bill, or a provider could not be asked."""
    open_ = [
        each for each in found.to_answer if answers[each.mark + each.id] not in ("ended", "kept") and each.may_bill
    ]
    if not open_ and not found.is_blind:
        return None
    said = [
        f"{each.provider} {each.thing} {each.id} at {usd(each.rate_usd_per_hour)}/h: {answers[each.mark + each.id]}"
        for each in open_
    ]
    count = counted(len(open_), "resource")
    return StillBilling(
        what=f"{count} without a run may still be billing." if open_ else "A resource may still be billing.",
        why="\n".join(said + (found.problems if found.is_blind else [])),
        fix="homing reconcile --destroy" if open_ else "homing reconcile   when the provider responds again",
    )


def _say_end(found: Survey, answers: dict[str, str]) -> None:
    for each in found.to_answer:
        output.say(f"{each.thing} {each.id}: {answers[each.mark + each.id]}")
    if found.to_answer:
        output.say("See what was kept and destroyed: homing ledger")
    elif found.findings:
        output.say("Everything is in the ledger. See what is billing: homing runs")
    else:
        output.say(
            "No homing resources at any provider that responded."
            if found.problems
            else "No homing resources at any provider."
        )
