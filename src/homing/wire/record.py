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
    offer: str = "?"
    limit_usd: Optional[str] = None
    state: str = "unknown"
    guard: str = ""  # the provider's own spend guard, in a sentence
    note: str = ""
    host: str = ""  # where it was launched from, and the home there: a `local` instance lies below it
    home: str = ""
    account: Optional[str] = None  # of the provider, by the key that rented it: another's key does not show it


@record("lease", 1)
@dataclass(frozen=True)
class Lease:
    """runs/<id>/lease/<number>.json, made once by create-if-absent and never changed; the highest number counts.

    It says which home owns the run and which instance may write into its prefix. An instance under another mark has
    been superseded: it ends its own billing and touches nothing.
    """

    number: int
    run_id: str
    owner: str  # six characters of the home
    host: str  # for people
    mark: str  # of the instance that may write; "" while there is none
    t: float
    nonce: str = ""  # tells two takers of one home apart, and a lost answer from a lost race


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
    store: str = ""  # as its owner names it
    created_at: float = 0.0
    time_limit_s: float = 0.0  # 0: none
    run_file_sha256: str = ""
    reason: str = ""
    exit_code: Optional[int] = None
    ended_at: Optional[float] = None
    host: str = ""  # of the home that wrote this, for people
