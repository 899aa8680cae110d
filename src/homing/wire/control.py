"""Wishes and signs of life.

    home --request.json--> store --sync--> agent --control.json--> trainer        (what is wanted)
    trainer --metrics, events--> agent --heartbeat.json--> sync --> store --> home (how it goes)

Home never talks to the trainer and the trainer never knows that it is rented: each reads one small file at its own
pace, so a lost message is only a late one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Optional

from homing.wire.codec import record


@record("control", 1)
@dataclass(frozen=True)
class Control:
    """Written by the agent, read by the trainer between steps."""

    stop: bool = False
    reason: str = ""
    land_by: Optional[float] = (
        None  # on clock.py's clock: when the final checkpoint must be on disk; told from the start
    )


@record("request", 1)
@dataclass(frozen=True)
class Request:
    """Written by home into the run's prefix of the store; the newest serial counts."""

    serial: int
    stop: bool = False
    reason: str = ""
    spend_limit_usd: Optional[str] = None
    time_limit_s: Optional[float] = None
    t: float = 0.0
    age_s: Optional[float] = None  # since billing began, counted at home: the instance's clock may be behind


@record("heartbeat", 1)
@dataclass(frozen=True)
class Heartbeat:
    t: float
    mark: str
    attempt: int
    state: str  # booting | fetching | training | pushing | kept | ending | ended
    started_at: float  # when billing began, as far as the agent was told
    rate_usd_per_hour: str
    spend_usd: str  # of this attempt and those before it
    spend_limit_usd: Optional[str] = None
    phase: str = ""
    step: int = 0
    num_steps: int = 0
    last_progress_at: float = 0.0
    loss: Optional[float] = None
    tokens_per_s: Optional[float] = None
    mfu: Optional[float] = None
    step_s: Optional[float] = None
    eta_s: Optional[float] = None  # to the end of the phase, planned or of a landing, in the trainer's words (Metric)
    trainer_pid: Optional[int] = None
    end_step: Optional[int] = None  # the run is landing: it ends at this step, before num_steps
    is_pushed: bool = False  # everything worth keeping is in the store, verified
    problem: str = ""
    has_dead_man: bool = False  # a second guard on the instance, in a process of its own, is alive
    time_limit_s: float = 0.0
    use: Dict[str, float] = field(default_factory=dict)  # shares of the machine, see Use
    plan_s: Optional[float] = None  # while it lands: to the planned end instead


@record("use", 1)
@dataclass(frozen=True)
class Use:
    """Written by the lookout: how busy the machine is."""

    shares: Dict[str, float] = field(default_factory=dict)  # cpu, memory, gpu, gpu_memory: 0..1
