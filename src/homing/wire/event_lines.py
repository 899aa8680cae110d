"""The content of events.jsonl, metrics.jsonl and outcome.json. A run's progress is shown from the first two files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Optional

from homing.wire.codec import record


@record("event", 1)
@dataclass(frozen=True)
class Event:
    t: float  # unix seconds
    source: str  # trainer | agent | dead-man | sync | home
    kind: str  # such as phase_started, checkpoint_saved, resumed, step_skipped, stop_asked, limit_reached
    text: str  # one sentence for people
    phase: str = ""
    step: Optional[int] = None
    data: Dict[str, Any] = field(default_factory=dict)


@record("metric", 1)
@dataclass(frozen=True)
class Metric:
    t: float
    phase: str
    step: int
    num_steps: int
    num_tokens: int
    loss: Optional[float] = None  # training loss in nats per token; None if it was not finite
    lr: Optional[float] = None
    grad_norm: Optional[float] = None
    tokens_per_s: Optional[float] = None
    mfu: Optional[float] = None  # model FLOP/s utilization, from 0 to 1; None if the device's peak FLOP/s are unknown
    step_s: Optional[float] = None
    memory_bytes: Optional[int] = None
    val_loss: Optional[float] = None
    val_bits_per_byte: Optional[float] = None
    val_perplexity: Optional[float] = None
    end_step: Optional[int] = None  # the step at which the phase ends early (landing); None if it runs to num_steps
    more: Dict[str, float] = field(default_factory=dict)  # values specific to this phase, such as the reward in rl
    # Seconds until this phase is trained, evaluated and saved, computed from measured speeds. Every ETA that homing
    # shows comes from this value.
    eta_s: Optional[float] = None
    plan_s: Optional[float] = None  # seconds until the originally planned end; set only while landing (ending early)


@record("outcome", 1)
@dataclass(frozen=True)
class Outcome:
    """The content of outcome.json in the run directory, which says how the run ended."""

    state: str  # done | failed | stopped
    reason: str
    exit_code: int
    phase: str = ""
    step: int = 0
    t: float = 0.0
    is_final: bool = False  # True if no further attempt is needed
    is_preempted: bool = False  # True if the instance was preempted and the run resumes on another instance
    log_tail: str = ""  # the trainer's last log lines, if it failed
