"""Check that a prepaid account has enough balance. Used by `doctor`, and by `launch` before it rents.

    Prepaid.balance()   what is left, and the current spend per hour; None if the provider does not report it

An empty balance ends machines as a limit does, but without a last checkpoint and without bringing the results home. So
it is compared with what the run may cost while topping up still helps. Nothing is refused: it may grow during the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol, runtime_checkable

from homing.cloud.accounts import ACCOUNTS
from homing.cloud.ledger.meter import show_usd
from homing.doctor.check import Check, ok, skipped, warning

__all__ = ["Balance", "Prepaid", "check_balance"]


@dataclass(frozen=True)
class Balance:
    left_usd: Decimal
    rate_usd_per_hour: Decimal  # of everything the account rents now, by anyone


@runtime_checkable
class Prepaid(Protocol):
    name: str
    page: str

    def balance(self) -> Balance | None: ...  # asked, never guessed; None: this key may not see it, or no answer


def check_balance(provider: Prepaid, needed_usd: Decimal | None) -> Check:
    """Check the balance. `needed_usd` is what a run may still cost; None if no run or no limit is known."""
    name, account = f"{provider.name}.balance", ACCOUNTS.get(provider.name)
    title, page = (account.title, account.usage_page) if account else (provider.name, provider.page)
    balance = provider.balance()
    if balance is None:
        text = f"{title} does not show the balance to this key; a launch fails if it is empty."
        return skipped(name, text, "Check it before a long run.", page)
    goes = f", spending {show_usd(balance.rate_usd_per_hour)}/h" if balance.rate_usd_per_hour else ""
    left = f"{show_usd(max(balance.left_usd, Decimal(0)))} left at {title}{goes}"
    if balance.left_usd <= 0:
        return warning(name, f"{left}: nothing can be started.", "Add funds.", page)
    if needed_usd is not None and balance.left_usd < needed_usd:
        text = f"{left}; this run may cost {show_usd(needed_usd)}. At $0 its instance is stopped without saving."
        return warning(name, text, "Add funds, or set a lower --spend-limit.", page)
    return ok(name, f"{left}.")
