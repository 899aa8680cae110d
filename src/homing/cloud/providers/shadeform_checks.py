"""What `homing doctor` asks Shadeform: whether cloud.shadeform names what there is, and whether what bills is guarded.

Its API tells no balance and no rights: any key may do all that the account may. Nothing is changed by asking.
"""

from __future__ import annotations

from typing import Any

from homing.cloud.checks import Check, fault, ok, skipped, warning
from homing.cloud.figures import MOST_USD, read_figure
from homing.cloud.providers.shadeform_account import mark_of
from homing.cloud.providers.shadeform_guard import moment_of
from homing.cloud.providers.shadeform_offers import Choice

__all__ = ["check_shadeform"]

_EXPLAIN = "homing explain cloud.shadeform"


def check_shadeform(
    types: list[dict[str, Any]], living: list[dict[str, Any]], choice: Choice, page: str, wallet_page: str
) -> list[Check]:
    """`types` is its catalogue, `living` what it says of each instance that lives under our mark."""
    untold = "Shadeform's API does not tell the balance; an account without funds is refused at a launch."
    return [
        _check_clouds(types, choice),
        _check_os(types, choice),
        _check_guards(living, page),
        skipped("shadeform.balance", untold, "Look there before a long run.", wallet_page),
    ]


def _check_clouds(types: list[dict[str, Any]], choice: Choice) -> Check:
    there = sorted({str(body["cloud"]) for body in types})
    if not there:
        return warning("shadeform.clouds", "Its catalogue is empty now.", "Try again in a minute.")
    unknown = [name for name in choice.clouds if name not in there]
    if unknown:
        # It may be sold out and not misspelt: its catalogue shows only what can be had.
        text = f"cloud.shadeform.clouds names {', '.join(unknown)}, and nothing of theirs can be had now."
        return warning("shadeform.clouds", text, f"Now there are: {', '.join(there)}   {_EXPLAIN}.clouds")
    return ok("shadeform.clouds", f"{len(types)} types of machine, of {', '.join(there)}.")


def _check_os(types: list[dict[str, Any]], choice: Choice) -> Check:
    options = sorted({str(each) for body in types for each in body["configuration"].get("os_options") or []})
    if choice.os and choice.os not in options:
        text = f"No machine there has cloud.shadeform.os {choice.os!r}."
        return fault("shadeform.os", text, f"One of: {', '.join(options)}   or leave it out")
    return ok("shadeform.os", f"{choice.os or 'The newest Ubuntu with drivers'} can be had.")


def _check_guards(living: list[dict[str, Any]], page: str) -> Check:
    """Whatever lives must be deleted at a sum and at a date; somebody may have taken that away in the console."""
    bare = [body for body in living if not _is_guarded(body.get("auto_delete"))]
    if bare:
        names = ", ".join(f"{body['id']} ({mark_of(body)})" for body in bare)
        text = f"Shadeform would not end this by itself, at any sum or date: {names}."
        return fault(
            "shadeform.guard", text, "homing limit RUN --spend DOLLARS   sets it again, or: homing destroy RUN", page
        )
    return ok(
        "shadeform.guard", f"{len(living)} of ours live there, each with a sum and a date at which it is deleted."
    )


def _is_guarded(shown: Any) -> bool:
    told = shown if isinstance(shown, dict) else {}
    return (
        bool(read_figure(told.get("spend_threshold"), MOST_USD)) and moment_of(told.get("date_threshold")) is not None
    )
