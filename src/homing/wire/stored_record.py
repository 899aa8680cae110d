"""The run's record in the store, from which another machine can adopt the run."""

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
    guard: str = ""  # a sentence that describes the provider's own spend guard
    note: str = ""
    host: str = ""  # the host and home that launched the instance; the folder of a `local` instance is in that home
    home: str = ""
    # the provider account that rented the instance; the keys of other accounts do not show it
    account: Optional[str] = None


@record("lease", 1)
@dataclass(frozen=True)
class Lease:
    """runs/<id>/lease/<number>.json, written once by create-if-absent and never changed; the highest number counts.

    It says which home owns the run and which instance may write into its prefix. An instance with a different mark has
    been superseded: it ends its own billing and writes nothing more.
    """

    number: int
    run_id: str
    owner: str  # six characters that identify the home
    host: str  # for display
    mark: str  # mark of the instance that may write; "" if there is none
    t: float
    nonce: str = ""  # distinguishes two processes in one home, and a lost response from a lost race


@record("run-record", 1)
@dataclass(frozen=True)
class RunRecord:
    run_id: str
    run_name: str
    owner: str  # six characters that identify the home that launched the run
    state: str
    spend_limit_usd: Optional[str]
    attempts: List[Attempt] = field(default_factory=list)
    updated_at: float = 0.0
    store: str = ""  # the store's address as the owner writes it
    created_at: float = 0.0
    time_limit_s: float = 0.0  # 0: none
    run_file_sha256: str = ""
    reason: str = ""
    exit_code: Optional[int] = None
    ended_at: Optional[float] = None
    host: str = ""  # host name of the home that wrote this record, for display
