"""boot.json: all that the agent is told at start. It holds no secret and no provider code.

How to end billing is data: one command or one HTTP request that the provider's adapter wrote, so the agent can end
any machine without knowing whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from homing.wire.codec import record


@dataclass(frozen=True)
class EndBilling:
    kind: str  # command | request
    argv: List[str] = field(default_factory=list)
    method: str = ""
    url: str = ""
    header_env: Dict[str, str] = field(default_factory=dict)  # header name -> environment variable with its value
    body: str = ""


@dataclass(frozen=True)
class Input:
    """A file that must lie on the instance before training: its key in the store, its place, its hash."""

    key: str
    path: str  # relative to the instance's work folder
    num_bytes: int
    sha256: str


@record("boot", 1)
@dataclass(frozen=True)
class Boot:
    run_id: str
    run_name: str
    mark: str
    attempt: int
    work_dir: str  # on the instance; holds run/ and data/
    store: str
    inputs: List[Input]
    trainer_argv: List[str]
    sync_argv: List[str]  # `... --once`, `--fetch` and `--watch` are appended by the agent
    end_billing: EndBilling
    started_at: float  # when billing began
    rate_usd_per_hour: str
    spent_before_usd: str  # by earlier attempts
    spend_limit_usd: Optional[str]
    time_limit_s: float
    idle_limit_s: float
    stall_factor: float
    heartbeat_s: float = 5.0
    stop_grace_s: float = 120.0  # from "stop" to SIGKILL of the trainer
    env: Dict[str, str] = field(default_factory=dict)  # for trainer and sync; never secrets
    fence: int = 0  # the lease under which it was launched; 0: none was taken
    agent_argv: List[str] = field(default_factory=list)  # with which the dead-man starts an agent that died again
    notice_url: str = ""  # where the machine tells of its preemption: any 200 is a notice
    keep_on_failure_s: float = 0.0  # how long a failed instance stays for a person to look at; inside the limit
