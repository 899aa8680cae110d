"""Control requests and heartbeats.

    requests: user's computer --request.json--> store --sync--> agent --control.json--> trainer
    progress: trainer --metrics, events--> agent --heartbeat.json--> sync --> store --> user's computer

The user's computer never contacts the trainer directly, and the trainer does not know that the machine is rented. Each
process reads one small file at its own pace, so a message may be delayed but is not lost.

Deadlines in these files use the boot clock, which keeps running during sleep and does not change when the wall clock is
set. All processes of one machine share this clock, so one process can act on a time that another wrote to a file. The
boot clock restarts when the machine reboots."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Dict, Optional

from homing.wire.codec import record


@record("control", 1)
@dataclass(frozen=True)
class Control:
    """The content of control.json, which the agent writes and the trainer reads between steps."""

    stop: bool = False
    reason: str = ""
    land_by: Optional[float] = None  # boot-clock time by which the final checkpoint must be on disk


@record("request", 1)
@dataclass(frozen=True)
class Request:
    """The content of request.json, which the user's computer writes to the run's store. The highest serial wins."""

    serial: int
    stop: bool = False
    reason: str = ""
    spend_limit_usd: Optional[str] = None
    time_limit_s: Optional[float] = None
    t: float = 0.0
    # seconds since billing began, measured by the user's computer, because the instance's clock may be behind
    age_s: Optional[float] = None


@record("heartbeat", 1)
@dataclass(frozen=True)
class Heartbeat:
    t: float
    mark: str
    attempt: int
    state: str  # booting | fetching | training | pushing | kept | ending | ended
    started_at: float  # when billing began, according to boot.json
    rate_usd_per_hour: str
    spend_usd: str  # spend of this attempt and all earlier ones
    spend_limit_usd: Optional[str] = None
    phase: str = ""
    step: int = 0
    num_steps: int = 0
    last_progress_at: float = 0.0
    loss: Optional[float] = None
    tokens_per_s: Optional[float] = None
    mfu: Optional[float] = None
    step_s: Optional[float] = None
    # The trainer's estimate of the seconds until the phase completes or stops early (landing). Copied from Metric.
    eta_s: Optional[float] = None
    trainer_pid: Optional[int] = None
    end_step: Optional[int] = None  # the step at which the phase ends early (landing); None if it runs to num_steps
    is_pushed: bool = False  # whether all results are in the store and verified
    problem: str = ""
    has_dead_man: bool = False  # whether the dead-man, a second guard process on the instance, is alive
    time_limit_s: float = 0.0
    use: Dict[str, float] = field(default_factory=dict)  # utilization, see Use
    plan_s: Optional[float] = None  # seconds until the originally planned end; set only while landing (ending early)


@record("use", 1)
@dataclass(frozen=True)
class Use:
    """The content of use.json: the machine's utilization, as measured by the monitor."""

    # cpu | memory | gpu | gpu_memory -> utilization, from 0 to 1
    shares: Dict[str, float] = field(default_factory=dict)


# CLOCK_BOOTTIME exists only on Linux. On macOS, CLOCK_MONOTONIC runs during sleep too; on other systems it is the
# closest available clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def boot_clock_s() -> float:
    """Return the seconds since a fixed moment that changes only when the machine reboots."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
