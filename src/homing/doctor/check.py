"""Results of `homing doctor`: each Check answers one question. A fault includes a fix and where to read more.

A provider can add its own checks with a method `checks() -> list[Check]` that changes nothing. A prepaid provider
also has `balance()`, which returns the remaining funds and the current spend per hour, or None if the provider does not
report them. Both `doctor` and `launch` check the balance before anything is rented. When the balance runs out, the
provider stops the machines before they can write a last checkpoint or save results. Therefore both commands compare
the balance with what the run may cost. `doctor` warns of a low balance. `launch` refuses it unless --allow low-balance
is given, because the user may add funds during the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, Protocol, runtime_checkable

from homing.cloud.api_key_table import ACCOUNTS
from homing.cloud.ledger.meter import show_usd

__all__ = ["Balance", "Check", "Checked", "Prepaid", "State", "check_balance", "fault", "ok", "skipped", "warning"]

State = Literal["ok", "warning", "fault", "skipped"]


@dataclass(frozen=True)
class Check:
    name: str  # SUBJECT.QUESTION, such as runpod.key or ssh.client
    state: State
    text: str  # the result of the check, as a sentence
    fix: str = ""  # a command to type or a key to change
    page: str = ""  # a web page or guide that provides what is missing or explains more

    @property
    def is_finding(self) -> bool:
        return self.state in ("warning", "fault")


@runtime_checkable
class Checked(Protocol):
    """A provider that has further checks in addition to the check of its key, for example of permissions and quota."""

    def checks(self) -> list[Check]: ...


def ok(name: str, text: str) -> Check:
    return Check(name, "ok", text)


def skipped(name: str, text: str, fix: str = "", page: str = "") -> Check:
    """Return a skipped check, which does not count as a problem. If set, `fix` and `page` say what to do."""
    return Check(name, "skipped", text, fix, page)


def warning(name: str, text: str, fix: str, page: str = "") -> Check:
    return Check(name, "warning", text, fix, page)


def fault(name: str, text: str, fix: str, page: str = "") -> Check:
    return Check(name, "fault", text, fix, page)


@dataclass(frozen=True)
class Balance:
    left_usd: Decimal
    rate_usd_per_hour: Decimal  # total hourly cost of everything that the account rents, for all its users


@runtime_checkable
class Prepaid(Protocol):
    name: str
    page: str

    # the balance that the provider reports, never an estimate; None if the key may not read it or there was no response
    def balance(self) -> Balance | None: ...


def check_balance(provider: Prepaid, needed_usd: Decimal | None) -> Check:
    """Check the balance. `needed_usd` is the most that the run may still cost, or None if that is unknown."""
    name, account = f"{provider.name}.balance", ACCOUNTS.get(provider.name)
    title, page = (account.title, account.usage_page) if account else (provider.name, provider.page)
    balance = provider.balance()
    if balance is None:
        text = f"This key cannot read the balance at {title}. If the account is empty, the launch will fail."
        return skipped(name, text, "Check the balance before a long run.", page)
    goes = f", spending {show_usd(balance.rate_usd_per_hour)}/h" if balance.rate_usd_per_hour else ""
    left = f"{show_usd(max(balance.left_usd, Decimal(0)))} left at {title}{goes}"
    if balance.left_usd <= 0:
        return warning(name, f"{left}: nothing can be started.", "Add funds.", page)
    if needed_usd is not None and balance.left_usd < needed_usd:
        text = (
            f"{left}; this run may cost {show_usd(needed_usd)}. At $0, the provider stops its instance without saving."
        )
        return warning(name, text, "Add funds, or set a lower --spend-limit.", page)
    return ok(name, f"{left}.")
