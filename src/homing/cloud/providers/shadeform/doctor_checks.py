"""Shadeform checks for `homing doctor`: are the clouds in cloud.shadeform available, and are all instances guarded?

The API does not report the balance. There are no permissions to check, because every key has full access. The
checks change nothing.
"""

from __future__ import annotations

from typing import Any

from homing.cloud.check_numbers import MOST_USD, read_figure
from homing.cloud.providers.shadeform.api import mark_of
from homing.cloud.providers.shadeform.auto_delete import moment_of
from homing.cloud.providers.shadeform.offers import Choice
from homing.doctor.check import Check, fault, ok, skipped, warning

__all__ = ["check_shadeform"]

_EXPLAIN = "homing explain cloud.shadeform"


def check_shadeform(
    types: list[dict[str, Any]], living: list[dict[str, Any]], choice: Choice, page: str, wallet_page: str
) -> list[Check]:
    """Run all checks. `types` is the catalogue, and `living` contains the data of our live instances."""
    no_balance = "Shadeform's API does not report the balance; without funds a launch fails."
    return [
        _check_clouds(types, choice),
        _check_os(types, choice),
        _check_guards(living, page),
        skipped("shadeform.balance", no_balance, "Check the balance before a long run.", wallet_page),
    ]


def _check_clouds(types: list[dict[str, Any]], choice: Choice) -> Check:
    there = sorted({str(body["cloud"]) for body in types})
    if not there:
        return warning("shadeform.clouds", "The catalog is empty.", "Try again in a minute.")
    unknown = [name for name in choice.clouds if name not in there]
    if unknown:
        # Only warn: the name may be right and the cloud sold out, because the catalogue lists only what is available.
        text = f"cloud.shadeform.clouds lists {', '.join(unknown)}, which have no offers now."
        return warning("shadeform.clouds", text, f"Available now: {', '.join(there)}   {_EXPLAIN}.clouds")
    return ok("shadeform.clouds", f"{len(types)} instance types from {', '.join(there)}.")


def _check_os(types: list[dict[str, Any]], choice: Choice) -> Check:
    options = sorted({str(each) for body in types for each in body["configuration"].get("os_options") or []})
    if choice.os and choice.os not in options:
        text = f"No instance type offers cloud.shadeform.os {choice.os!r}."
        return fault("shadeform.os", text, f"Use one of: {', '.join(options)}   or remove cloud.shadeform.os")
    return ok("shadeform.os", f"{choice.os or 'The newest Ubuntu with drivers'} is available.")


def _check_guards(living: list[dict[str, Any]], page: str) -> Check:
    """Check that each live instance has both auto_delete thresholds, because they can be removed in the console."""
    bare = [body for body in living if not _is_guarded(body.get("auto_delete"))]
    if bare:
        names = ", ".join(f"{body['id']} ({mark_of(body)})" for body in bare)
        text = f"No auto_delete is set at Shadeform for: {names}."
        return fault(
            "shadeform.guard", text, "Set it again: homing limit RUN --spend DOLLARS   or: homing destroy RUN", page
        )
    return ok("shadeform.guard", f"{len(living)} running, each with an auto_delete amount and date.")


def _is_guarded(shown: Any) -> bool:
    guard = shown if isinstance(shown, dict) else {}
    return (
        bool(read_figure(guard.get("spend_threshold"), MOST_USD)) and moment_of(guard.get("date_threshold")) is not None
    )
