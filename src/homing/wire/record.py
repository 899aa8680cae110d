"""The run's own record, kept in the store so that another machine can adopt it, and the lines of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from homing.wire.codec import record

__all__ = ["BILLING", "INSTANCE_STATES", "RUN_STATES", "Attempt", "LedgerLine", "RunRecord"]

RUN_STATES = ("planned", "launching", "running", "landing", "done", "failed", "stopped")
INSTANCE_STATES = ("requested", "booting", "ready", "preempted", "destroying", "gone", "unknown")
BILLING = ("yes", "no", "maybe")


@dataclass(frozen=True)
class Attempt:
    number: int
    provider: str
    mark: str
    instance_id: Optional[str]
    rate_usd_per_hour: str
    requested_at: float
    ended_at: Optional[float] = None
    spend_usd: str = "0"


@record("run-record", 1)
@dataclass(frozen=True)
class RunRecord:
    run_id: str
    run_name: str
    owner: str  # six characters of the home that launched it
    state: str
    spend_limit_usd: Optional[str]
    attempts: List[Attempt] = field(default_factory=list)
    updated_at: float = 0.0


@record("ledger-line", 1)
@dataclass(frozen=True)
class LedgerLine:
    """One instance: from the intent to the receipt. Never deleted."""

    mark: str
    run_id: str
    run_name: str
    attempt: int
    provider: str
    offer: str
    rate_usd_per_hour: str
    limit_usd: Optional[str]
    intent_at: float
    instance_id: Optional[str] = None
    created_at: Optional[float] = None
    destroyed_at: Optional[float] = None  # when the provider showed it absent
    state: str = "requested"
    billing: str = "maybe"
    spend_usd: str = "0"
    note: str = ""
