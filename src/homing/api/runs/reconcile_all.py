"""Compare the resources that homing created, at every provider, with the ledger. Implements `homing reconcile`.

survey -> on_found -> for each resource that the ledger does not account for: destroy, keep or skip it -> Reconciled
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from homing.api import notices
from homing.api.confirmation import Agrees, refuse
from homing.api.lookup.find_runs import open_home, usd
from homing.api.notices import say_problems
from homing.cloud.destroy import end_finding
from homing.cloud.home import Home
from homing.cloud.reconcile.inventory import Finding, Survey, keep, survey
from homing.errors import StillBilling, UsageError
from homing.units import counted, format_duration

__all__ = ["Reconciled", "reconcile_all"]


@dataclass(frozen=True)
class Reconciled:
    """The providers' resources that homing created, and what happened to those that the ledger does not account for."""

    found: Survey
    answers: dict[str, str]  # "ended", "kept", or the reason why the resource was left unchanged

    def answer_to(self, finding: Finding) -> str:
        """Return what happened to the resource; "" if the ledger accounts for it."""
        return self.answers.get(finding.mark + finding.id, "")

    @property
    def error(self) -> StillBilling | None:
        """Return StillBilling if an undecided resource may be billing or a provider could not be queried."""
        found = self.found
        open_ = [each for each in found.to_answer if self.answer_to(each) not in ("ended", "kept") and each.may_bill]
        if not open_ and not found.is_blind:
            return None
        said = [
            f"{each.provider} {each.thing} {each.id} at {usd(each.rate_usd_per_hour)}/h: {self.answer_to(each)}"
            for each in open_
        ]
        count = counted(len(open_), "resource")
        return StillBilling(
            what=f"{count} without a run may still be billing." if open_ else "A resource may still be billing.",
            why="\n".join(said + (found.problems if found.is_blind else [])),
            fix="homing reconcile --destroy" if open_ else "homing reconcile   when the provider responds again",
        )

    def to_dict(self) -> dict[str, Any]:
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
                    "answer": self.answer_to(each),
                }
                for each in self.found.findings
            ],
            "problems": self.found.problems,
            "is_blind": self.found.is_blind,
        }


def reconcile_all(
    *,
    is_destroy: bool = False,
    is_adopt: bool = False,
    agrees: Agrees | None = None,
    on_found: Callable[[Survey], None] = lambda found: None,
    home: Home | None = None,
) -> Reconciled:
    """Query every provider for resources that homing created, and destroy or keep those missing from the ledger.

    `agrees` is called for each resource: with `is_destroy`, to ask whether to destroy it; with `is_adopt`, to ask
    whether to keep it in the ledger; with neither, possibly for both questions. Without `agrees`, nothing is changed.
    `on_found` is called before the first question. If an undecided resource may be billing, the result has an `error`.
    """
    if is_destroy and is_adopt:
        raise UsageError(
            what="--destroy and --adopt cannot be combined.", fix="homing reconcile   asks about each resource"
        )
    if agrees is None and (is_destroy or is_adopt):
        agrees = refuse
    with open_home(home) as opened:
        found = survey(opened)
        on_found(found)
        say_problems(str(each) for each in found.problems)  # a plain str, so that no provider is left out
        answers = {each.mark + each.id: _answer(opened, each, is_destroy, is_adopt, agrees) for each in found.to_answer}
        return Reconciled(found, answers)


def _answer(home: Home, finding: Finding, is_destroy: bool, is_adopt: bool, agrees: Agrees | None) -> str:
    """Destroy or keep the resource. Return "ended", "kept", or the reason why it was left unchanged."""
    if agrees is None:
        return "not decided: no terminal; pass --destroy or --adopt"
    name = f"{finding.thing} {finding.id} on {finding.provider}"
    money = f"{usd(finding.rate_usd_per_hour)}/h, {usd(finding.spend_usd)} in {format_duration(finding.age_s)}"
    can_keep = finding.line is not None
    if not is_adopt:
        if agrees(f"Destroy {name} ({money})?"):
            return end_finding(home, finding) or "ended"
        return "left unchanged" if is_destroy or not can_keep else _keep(home, finding, name, money, agrees)
    return _keep(home, finding, name, money, agrees) if can_keep else "left unchanged: only an instance can be kept"


def _keep(home: Home, finding: Finding, name: str, money: str, agrees: Agrees) -> str:
    if not agrees(f"Keep {name} in the ledger and let it continue billing ({money})?"):
        return "left unchanged"
    notices.say(f"{name} is kept: {keep(home, finding)}")
    return "kept"
