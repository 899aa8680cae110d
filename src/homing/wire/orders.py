"""What the agent reads of boot.json. It holds no secret and no provider code.

How to end billing is data: one command or one HTTP request that the provider's adapter wrote, so the agent can end
any machine without knowing whose it is. So is what it starts: it knows neither trainer nor store.
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


@record("boot", 1)
@dataclass(frozen=True)
class Orders:
    mark: str
    attempt: int
    work_dir: str  # on the instance; holds run/ and data/
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
    env: Dict[str, str] = field(default_factory=dict)  # for what the agent starts; never secrets
    secret_names: List[str] = field(default_factory=list)  # variables with keys to the store: sync's, not the trainer's
    agent_argv: List[str] = field(default_factory=list)  # with which the dead-man starts an agent that died again
    furnish_argv: List[str] = field(default_factory=list)  # before training; empty: the machine has all it needs
    lookout_argv: List[str] = field(default_factory=list)  # beside it: alarms, notices, how busy the machine is
    unsaved_limit_s: float = 0.0  # so long it may train while the store refuses every push; 0: to the other limits
    push_s: float = 0.0  # how long a checkpoint takes to the store, as planned; measured pushes replace it
    home_s: float = 0.0  # beside it, from the last save to the end of billing: processes that start, reading back
    keep_on_failure_s: float = 0.0  # how long a failed instance stays for a person to look at; inside the limit
