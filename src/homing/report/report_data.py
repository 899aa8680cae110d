"""A report's content as plain data, which `--json` prints and `make_sections` turns into text.

None, "" and an empty list mean that nothing was stored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Attempt", "Data", "Eval", "Happening", "Kept", "Made", "Phase", "Report", "Sample", "Validation"]


@dataclass(frozen=True)
class Made:
    """Settings from the resolved run."""

    seed: int
    model: dict[str, Any]
    num_params: int
    flops_per_token: float
    code_version: str
    run_file_sha256: str
    base: str = ""  # address of the open weights that the run started from
    base_licence: str = ""


@dataclass(frozen=True)
class Data:
    of: str  # "the run", or the name of one of its phases
    manifest_sha256: str
    vocab_size: int = 0
    tokenizer_sha256: str = ""
    # train | val -> number of tokens, documents and text bytes
    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    num_files: int = 0
    num_bytes: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)  # the first few of the `num_files` files
    code_version: str = ""
    problem: str = ""  # the reason why the manifest could not be read


@dataclass(frozen=True)
class Validation:
    step: int
    loss: float  # held-out loss, or the missing reward in an rl phase; see `figure_of` in wire.checkpoint_manifest
    bits_per_byte: float | None = None


@dataclass(frozen=True)
class Phase:
    kind: str
    method: str = ""
    num_steps: int = 0  # planned number of steps
    step: int = 0  # the last step reached
    end_step: int | None = None  # the step at which the phase ended early to stay within a limit
    num_tokens: int = 0  # number of tokens trained on
    batch_tokens: int = 0
    eval_tokens: int = 0  # approximate number of held-out tokens per validation; 0 if all are used, or if unknown
    optimizer: str = ""
    lr: float | None = None
    weight_decay: float | None = None
    schedule: str = ""
    adapter: str = ""
    curve_of: str = "loss"
    curve: list[tuple[int, float]] = field(default_factory=list)
    lr_curve: list[tuple[int, float]] = field(default_factory=list)
    speed_curve: list[tuple[int, float]] = field(default_factory=list)  # tokens per second
    validations: list[Validation] = field(default_factory=list)
    best: Validation | None = None
    last: Validation | None = None
    tokens_per_s: float | None = None  # the median of the values in the phase's metrics
    mfu: float | None = None
    seconds: float | None = None  # time spent on training steps
    figures: dict[str, float] = field(default_factory=dict)  # latest values of the phase-specific metrics
    choices: dict[str, Any] = field(default_factory=dict)  # the trainer's choices, from its newest checkpoint


@dataclass(frozen=True)
class Happening:
    t: float
    source: str
    kind: str
    text: str
    phase: str = ""
    step: int | None = None
    num_alike: int = 0  # number of later events of the same kind that the report omits


@dataclass(frozen=True)
class Sample:
    phase: str
    step: int
    text: str
    is_cut: bool = False


@dataclass(frozen=True)
class Eval:
    """One result that `homing eval --out` wrote."""

    phase: str
    step: int | None
    name: str  # name of the evaluation set
    figure: str
    value: float | None
    low: float | None
    high: float | None
    num_units: int
    num_tokens: int | None = None  # number of tokens in the set, if it consists of text or conversations


@dataclass(frozen=True)
class Attempt:
    number: int
    provider: str
    offer: str
    rate_usd_per_hour: str
    began_at: float
    ended_at: float | None
    state: str
    billing: str
    spend_usd: str
    is_at_most: bool
    provider_usd: str | None  # the amount reported by the provider, if any
    note: str = ""


@dataclass(frozen=True)
class Kept:
    """Stored weights."""

    where: str
    phase: str
    step: int
    num_bytes: int
    weights: dict[str, str]  # name -> sha256
    called: list[str] = field(default_factory=list)  # latest, best, fetched
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Report:
    run: str
    name: str
    state: str
    reason: str
    is_trained_here: bool
    is_finished: bool
    made_at: float
    version: str  # version of homing that wrote the report
    began_at: float | None = None
    ended_at: float | None = None
    made: Made | None = None
    run_file: str = ""  # the YAML that the run was started with: what differs from the defaults
    data: list[Data] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    evals: list[Eval] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)  # messages that trainers logged when they started
    offer: dict[str, Any] = field(default_factory=dict)  # the offer that the last launch used
    attempts: list[Attempt] = field(default_factory=list)
    spend_usd: str | None = None
    spend_limit_usd: str | None = None
    is_at_most: bool = False
    stored: str = ""  # a sentence about what remains in the store and what it costs
    kept: list[Kept] = field(default_factory=list)
    next: list[str] = field(default_factory=list)  # commands that the user may run next
    problems: list[str] = field(default_factory=list)  # a sentence for each item that could not be read

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
