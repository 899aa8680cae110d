"""Is there enough left on an account that is paid in advance? Asked by `doctor`, and by `launch` before it rents.

    Prepaid.balance()   what is left, and what goes from it by the hour; None where the provider does not tell

A balance at nothing ends machines as a limit does, but without a last checkpoint and a trip home: so it is compared
with what the run may cost, and said while adding to it still helps. Nothing is refused: it may grow while a run trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol, runtime_checkable

from homing.cloud.accounts import ACCOUNTS
from homing.cloud.checks import Check, ok, skipped, warning
from homing.cloud.meter import show_usd

__all__ = ["Balance", "Prepaid", "check_balance"]


@dataclass(frozen=True)
class Balance:
    left_usd: Decimal
    rate_usd_per_hour: Decimal  # of all that the account rents now, by whomever


@runtime_checkable
class Prepaid(Protocol):
    name: str
    page: str

    def balance(self) -> Balance | None: ...  # asked, never guessed; None: this key is not told, or nobody answers now


def check_balance(provider: Prepaid, needed_usd: Decimal | None) -> Check:
    """`needed_usd`: what a run may cost from now on; None where no run or no limit is known."""
    name, account = f"{provider.name}.balance", ACCOUNTS.get(provider.name)
    title, page = (account.title, account.usage_page) if account else (provider.name, provider.page)
    balance = provider.balance()
    if balance is None:
        text = f"{title} does not tell this key the balance; an empty one is refused at a launch."
        return skipped(name, text, "Look there before a long run.", page)
    goes = f", and {show_usd(balance.rate_usd_per_hour)} an hour goes from it" if balance.rate_usd_per_hour else ""
    left = f"{show_usd(max(balance.left_usd, Decimal(0)))} is left at {title}{goes}"
    if balance.left_usd <= 0:
        return warning(name, f"{left}: nothing can be started.", "Add to the balance.", page)
    if needed_usd is not None and balance.left_usd < needed_usd:
        text = f"{left}; this run may cost {show_usd(needed_usd)}, and at nothing left its machine is stopped unsaved."
        return warning(name, text, "Add to the balance, or set a lower --spend-limit.", page)
    return ok(name, f"{left}.")
