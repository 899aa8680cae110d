"""Control requests and heartbeats.

    home --request.json--> store --sync--> agent --control.json--> trainer        (requests)
    trainer --metrics, events--> agent --heartbeat.json--> sync --> store --> home (progress)

Home never talks to the trainer, and the trainer does not know that it is rented. Each process reads one small file at
its own pace, so a lost message is merely delayed.

Deadlines in these files use the boot clock: it keeps running during sleep, and setting the wall clock does not move it.
All processes of one machine read the same value, so one may write it to a file and another read it. It restarts when
the machine reboots."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Dict, Optional

from homing.wire.codec import record


@record("control", 1)
@dataclass(frozen=True)
class Control:
    """Written by the agent, read by the trainer between steps."""

    stop: bool = False
    reason: str = ""
    land_by: Optional[float] = None  # by the boot clock: when the final checkpoint must be on disk; set from the start


@record("request", 1)
@dataclass(frozen=True)
class Request:
    """Written by home into the run's prefix in the store; the highest serial counts."""

    serial: int
    stop: bool = False
    reason: str = ""
    spend_limit_usd: Optional[str] = None
    time_limit_s: Optional[float] = None
    t: float = 0.0
    age_s: Optional[float] = None  # seconds since billing began by home's clock: the instance's clock may be behind


@record("heartbeat", 1)
@dataclass(frozen=True)
class Heartbeat:
    t: float
    mark: str
    attempt: int
    state: str  # booting | fetching | training | pushing | kept | ending | ended
    started_at: float  # when billing began, according to boot.json
    rate_usd_per_hour: str
    spend_usd: str  # of this attempt and all earlier ones
    spend_limit_usd: Optional[str] = None
    phase: str = ""
    step: int = 0
    num_steps: int = 0
    last_progress_at: float = 0.0
    loss: Optional[float] = None
    tokens_per_s: Optional[float] = None
    mfu: Optional[float] = None
    step_s: Optional[float] = None
    # Seconds until the phase ends, as planned or by landing, as estimated by the trainer (Metric).
    eta_s: Optional[float] = None
    trainer_pid: Optional[int] = None
    end_step: Optional[int] = None  # set while landing: the run ends at this step, before num_steps
    is_pushed: bool = False  # everything worth keeping is in the store, verified
    problem: str = ""
    has_dead_man: bool = False  # the dead-man, a second guard process on the instance, is alive
    time_limit_s: float = 0.0
    use: Dict[str, float] = field(default_factory=dict)  # utilization, see Use
    plan_s: Optional[float] = None  # while landing: seconds until the originally planned end


@record("use", 1)
@dataclass(frozen=True)
class Use:
    """Utilization of the machine, written by the lookout."""

    shares: Dict[str, float] = field(default_factory=dict)  # cpu, memory, gpu, gpu_memory: 0..1


# CLOCK_BOOTTIME exists on Linux. On macOS, CLOCK_MONOTONIC runs during sleep; elsewhere it is the closest available.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def boot_clock_s() -> float:
    """Return the seconds since a fixed moment that changes only when the machine reboots."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
