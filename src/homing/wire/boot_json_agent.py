"""The agent's part of boot.json. It contains no secrets and no provider code.

`EndBilling` describes the command or HTTP request that ends billing. The provider's adapter wrote it, so the agent can
end any instance without provider-specific code. The commands that start the trainer and sync are listed here too, so
the agent needs no code for training or for the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from homing.wire.codec import record
from homing.wire.guard_timing import STOP_GRACE_S


@dataclass(frozen=True)
class EndBilling:
    kind: str  # command | request
    argv: List[str] = field(default_factory=list)
    method: str = ""
    url: str = ""
    # HTTP header -> the environment variable that contains its value
    header_env: Dict[str, str] = field(default_factory=dict)
    body: str = ""


@record("boot", 1)
@dataclass(frozen=True)
class Orders:
    mark: str
    attempt: int
    work_dir: str  # the work folder on the instance, which contains run/ and data/
    trainer_argv: List[str]
    sync_argv: List[str]  # the agent appends `--once`, `--fetch` or `--watch`
    end_billing: EndBilling
    started_at: float  # when billing began
    rate_usd_per_hour: str
    spent_before_usd: str  # dollars spent by earlier attempts
    spend_limit_usd: Optional[str]
    time_limit_s: float
    idle_limit_s: float
    stall_factor: float
    heartbeat_s: float = 5.0
    stop_grace_s: float = STOP_GRACE_S  # time from the stop request until the trainer gets SIGKILL
    # environment variables for the programs that the agent starts; contains no secrets
    env: Dict[str, str] = field(default_factory=dict)
    # Names of the environment variables that contain the store's keys. Sync gets these variables; the trainer does not.
    secret_names: List[str] = field(default_factory=list)
    agent_argv: List[str] = field(default_factory=list)  # command with which the dead-man restarts a dead agent
    # The command to run before training; empty if the machine already has everything it needs.
    bootstrap_argv: List[str] = field(default_factory=list)
    # The command to run alongside the trainer, for alerts, preemption notices and utilization.
    lookout_argv: List[str] = field(default_factory=list)
    unsaved_limit_s: float = 0.0  # how long training may continue while the store refuses every push; 0 for no limit
    push_s: float = 0.0  # planned time to push a checkpoint, replaced by the measured time after the first push
    # time from the last save to the end of billing, excluding the push itself: starting processes, reading data back
    home_s: float = 0.0
    keep_on_failure_s: float = 0.0  # how long to keep a failed instance for inspection, within its limits
