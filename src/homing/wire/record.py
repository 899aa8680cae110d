"""The run's own record, kept in the store so that another machine can adopt it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from homing.wire.codec import record


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
