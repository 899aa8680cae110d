"""`homing reconcile`: everything that carries our mark, at every provider, against the ledger."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from homing.cli import talk
from homing.cli.control import open_home, say_problems, usd
from homing.cli.options import Json, Yes
from homing.cloud.home import Home
from homing.cloud.survey import Finding, Survey, end, keep, survey
from homing.errors import StillBilling, UsageError
from homing.units import format_duration

__all__ = ["command"]


def command(
    is_destroy: Annotated[
        bool, typer.Option("--destroy", help="End what the ledger forgot and what is left over.")
    ] = False,
    is_adopt: Annotated[bool, typer.Option("--adopt", help="Keep what the ledger forgot, in the ledger.")] = False,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Ask every provider for what carries our mark; end or keep what the ledger forgot. Nothing else is touched."""
    if is_destroy and is_adopt:
        raise UsageError(
            what="--destroy and --adopt exclude each other.", fix="homing reconcile   asks for each thing by itself"
        )
    with open_home() as home:
        found = survey(home)
        talk.table(
            ["", "thing", "provider", "run", "age", "rate", "dollars", ""], [_row(each) for each in found.findings]
        )
        say_problems(found.problems)
        answers = {each.mark + each.id: _answer(home, each, is_destroy, is_adopt, yes) for each in found.to_answer}
        error = _still_billing(found, answers)
        talk.emit_all("reconcile/1", _document(found, answers), error)
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
    """ "ended", "kept", or why it is neither."""
    name = f"{finding.thing} {finding.id} on {finding.provider}"
    money = f"{usd(finding.rate_usd_per_hour)}/h, {usd(finding.spend_usd)} in {format_duration(finding.age_s)}"
    can_keep = finding.line is not None
    is_chosen = is_destroy or is_adopt
    if not is_chosen and not sys.stdin.isatty():
        return "nobody was there to decide: --destroy or --adopt"
    if is_destroy or not is_chosen:
        # --yes alone decides nothing: it agrees to what a flag asks for.
        if talk.ask(f"Destroy {name} ({money})?", yes=yes and is_destroy):
            return end(home, finding) or "ended"
        return "left as it is" if is_destroy or not can_keep else _keep(home, finding, name, money, False)
    return _keep(home, finding, name, money, yes) if can_keep else "left as it is: only an instance can be kept"


def _keep(home: Home, finding: Finding, name: str, money: str, yes: bool) -> str:
    if not talk.ask(f"Keep {name} in the ledger, to bill on ({money})?", yes=yes):
        return "left as it is"
    talk.say(f"{name} is kept: {keep(home, finding)}")
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
    """Exit code 6 while something may bill that nobody has decided about, or nobody could look at."""
    open_ = [
        each for each in found.to_answer if answers[each.mark + each.id] not in ("ended", "kept") and each.may_bill
    ]
    if not open_ and not found.is_blind:
        return None
    said = [
        f"{each.provider} {each.thing} {each.id} at {usd(each.rate_usd_per_hour)}/h: {answers[each.mark + each.id]}"
        for each in open_
    ]
    count = f"{len(open_)} thing{'s' * (len(open_) != 1)} of ours"
    return StillBilling(
        what=f"{count} may still cost money and no run owns it."
        if open_
        else "Something of ours may still cost money.",
        why="\n".join(said + (found.problems if found.is_blind else [])),
        fix="homing reconcile --destroy" if open_ else "homing reconcile   when the provider answers again",
    )


def _say_end(found: Survey, answers: dict[str, str]) -> None:
    for each in found.to_answer:
        talk.say(f"{each.thing} {each.id}: {answers[each.mark + each.id]}")
    if found.to_answer:
        talk.say("What is kept and what was ended: homing ledger")
    elif found.findings:
        talk.say("The ledger knows it all. What bills: homing runs")
    else:
        talk.say(
            "Nothing of ours is at any provider that could be asked."
            if found.problems
            else "Nothing of ours is anywhere."
        )
