"""Defines a run's leases, and the record in the store that allows another computer to adopt the run."""

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
    guard: str = ""  # a sentence about how the provider itself limits spending
    note: str = ""
    # the computer and the $HOMING_HOME folder that launched the instance; they contain the files of a `local` instance
    host: str = ""
    home: str = ""
    # the provider account that rented the instance; other accounts' keys cannot see the instance
    account: Optional[str] = None


@record("lease", 1)
@dataclass(frozen=True)
class Lease:
    """The content of runs/<id>/lease/<number>.json, written once by create-if-absent. The highest number wins.

    A lease says which homing home owns the run and which instance may write the run's files. An instance with a
    different mark has been superseded: it stops writing and ends its own billing.
    """

    number: int
    run_id: str
    owner: str  # six characters that identify the homing home that owns the run
    host: str  # host name of the owner's computer, for display
    mark: str  # mark of the instance that may write to the store; "" if there is none
    t: float
    nonce: str = ""  # random value by which a process recognizes its own lease, even if the store's response was lost


@record("run-record", 1)
@dataclass(frozen=True)
class RunRecord:
    run_id: str
    run_name: str
    owner: str  # six characters that identify the homing home that launched the run
    state: str
    spend_limit_usd: Optional[str]
    attempts: List[Attempt] = field(default_factory=list)
    updated_at: float = 0.0
    store: str = ""  # the store's address as the user writes it
    created_at: float = 0.0
    time_limit_s: float = 0.0  # time limit in seconds; 0 for none
    run_file_sha256: str = ""
    reason: str = ""
    exit_code: Optional[int] = None
    ended_at: Optional[float] = None
    host: str = ""  # host name of the computer that wrote this record, for display
