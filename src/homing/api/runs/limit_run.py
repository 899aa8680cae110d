"""Change the limits of a run that is live or may resume, everywhere they are enforced. Implements `homing limit`."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from homing.api import notices
from homing.api.lookup.find_runs import find_run, open_home
from homing.api.notices import say_problems
from homing.cloud.guard.change_limit_or_stop import Change, change_limit, propose
from homing.cloud.home import Home
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.reconcile.reconcile import refresh
from homing.doctor.check import Prepaid, check_balance

__all__ = ["Limited", "limit_run"]


@dataclass(frozen=True)
class Limited:
    change: Change
    is_confirmed: bool  # by the agent
    is_live: bool

    def to_dict(self) -> dict[str, object]:
        change = self.change
        return {
            "run": change.run.id,
            "old_usd": None if change.old_usd is None else str(change.old_usd),
            "new_usd": str(change.new_usd),
            "old_time_s": change.old_time_s,
            "new_time_s": change.new_time_s,
            "spend_usd": str(change.spend_usd),
            "worst_case_usd": str(change.worst_case_usd),
            "is_confirmed": self.is_confirmed,
        }


def limit_run(
    run: str,
    *,
    spend_usd: Decimal | None = None,
    time_s: float | None = None,
    typed: str = "",
    home: Home | None = None,
) -> Limited:
    """Set a new spend limit, a new time limit (0: none) or both: in the ledger, at the provider, on the instance.

    `typed`: the options as the caller typed them, for an error that repeats the command.
    """
    with open_home(home) as opened:
        say_problems(refresh(opened))
        row = find_run(opened, run, changes=f"limit {{}}{typed}")
        change = propose(opened, row, spend_usd, time_s)
        _warn_of_balance(opened, change)
        is_confirmed = change_limit(opened, change, notify=lambda text: notices.say(f"  {text}"))
        return Limited(change, is_confirmed, (opened.ledger.run(row.id) or row).is_live)


def _warn_of_balance(home: Home, change: Change) -> None:
    """Warn if the run may now cost more than its account holds, where the provider reports the balance.

    This is no error, because the user may add funds during the run.
    """
    running = billing_lines(change.lines)
    is_more_time = change.old_time_s > 0 and not 0 < change.new_time_s <= change.old_time_s
    if not running or not (is_more_time or (change.old_usd is not None and change.new_usd > change.old_usd)):
        return
    provider = home.provider_of(running[-1])
    if not isinstance(provider, Prepaid):
        return
    found = check_balance(provider, change.worst_case_usd - change.spend_usd)
    if found.is_finding:
        say_problems([f"{found.text} {found.fix} {found.page}".strip()])
