"""boot.json: all that the agent is told at start. It holds no secret and no provider code.

How to end billing is data: one command or one HTTP request that the provider's adapter wrote, so the agent can end
any machine without knowing whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from homing.wire.codec import record
from homing.wire.limit import STOP_GRACE_S


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


@dataclass(frozen=True)
class Bootstrap:
    """What the machine must have before training: each part is left out where its value is empty."""

    folders: List[str] = field(default_factory=list)  # to be made, beside run/ and data/
    disk_bytes: int = 0
    code: str = ""  # a wheel in the work folder, unpacked into code_dir
    code_sha256: str = ""
    code_dir: str = ""
    lock: List[str] = field(default_factory=list)  # name==version, without torch
    torch: str = ""  # torch==version, unless the image's own is in torch_range (from, below)
    torch_range: List[str] = field(default_factory=list)
    python: str = ""  # from which the environment is made
    env_dir: str = ""  # its fingerprint is appended; <work folder>/env leads there
    gpu_names: List[str] = field(default_factory=list)  # as a driver may call the card: a-z0-9 only
    num_gpus: int = 0
    inputs_dir: str = ""  # what an earlier instance here fetched, by hash: it is not fetched again
    probe_argv: List[str] = field(default_factory=list)
    probe_floor: Dict[str, float] = field(default_factory=dict)  # figure -> the least that is not far too slow


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
    stop_grace_s: float = STOP_GRACE_S  # from "stop" to SIGKILL of the trainer
    env: Dict[str, str] = field(default_factory=dict)  # for trainer and sync; never secrets
    secret_names: List[str] = field(default_factory=list)  # variables with keys to the store: sync's, not the trainer's
    fence: int = 0  # the lease under which it was launched; 0: none was taken
    agent_argv: List[str] = field(default_factory=list)  # with which the dead-man starts an agent that died again
    notice_url: str = ""  # where the machine tells of its preemption: any 200 is a notice
    push_s: float = 0.0  # how long a checkpoint takes to the store, as planned; measured pushes replace it
    home_s: float = 0.0  # beside it, from the last save to the end of billing: processes that start, reading back
    keep_on_failure_s: float = 0.0  # how long a failed instance stays for a person to look at; inside the limit
    planned_tokens_per_s: float = 0.0  # 0: nobody knows; a third of it is slow
    on_divergence: str = "alert"  # alert | stop
    on_slow: str = "alert"  # alert | stop
    bootstrap: Optional[Bootstrap] = None  # None: the machine has all it needs
    mailbox: str = ""  # takes the log by HTTP PUT when booting failed before anything could reach the store
