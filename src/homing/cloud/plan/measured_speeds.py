"""Looks up measured training speeds, and predicts the speed on any GPU with a formula fitted to these measurements.

    measured.json   built from benchmarks/results by benchmarks/make_measured.py; ships with the package. Besides
                    speeds, it records how well each model family learned, to help choose one
    measured        a row with the same shape, method and precision on the same GPU
    modelled        seconds per token = products x FLOPs / peak + passes x bytes / bandwidth, with peak and bandwidth
                    from the GPU's data sheet and the two factors fitted to all rows

    an rl step      new tokens x (fixed time per layer + factor x weights and caches read / bandwidth + products), with
                    fixed time and factor fitted to measured sampling, plus the training of its rows

`bytes` is the memory that a layer stores per token (see config.memory), as a proxy for everything that its elementwise
operations read and write. No prediction exceeds the GPU's peak. This module does not know about offers.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from homing.config.estimate.memory import LORA_TARGETS, NF4, layer_bytes
from homing.config.estimate.params_and_flops import (
    REACH,
    RECOMPUTED_OF,
    cache_bytes,
    num_rows,
    prompt_tokens,
    row_tokens,
    rows_at_a_time,
    training_flops,
    with_rows_of,
)
from homing.config.estimate.params_and_flops import sizes as sizes_of
from homing.gpus import GPUS, Gpu
from homing.wire import codec
from homing.wire.run_json import Lora, Model, Phase, Rl, Run, Sizes

__all__ = ["FILE", "LearnedRow", "SamplingRow", "StepRow", "Table", "find_row", "is_packed", "load_table", "rl_eval_s",
           "rl_step_s", "tokens_per_s"]  # fmt: skip

FILE = "measured.json"
# The highest fraction of the GPU's peak that matmuls may be predicted to reach in a whole step. Large isolated matmuls
# reached 0.80 on an H200, but inside a step they share the GPU with other work. Most measurements are of small
# models and say little about matmul speed, so without this cap, predictions for large models could be too high.
MOST_OF_PEAK = 0.70
_FORWARD = 1 / 3  # share of the training time per token that is spent in the forward pass


@dataclass(frozen=True)
class StepRow:
    """The training speed that one benchmark measured on one GPU."""

    source: str  # the file in benchmarks/results, plus the row if the file has several
    card: str
    tokens_per_s: float
    shape: Model
    kind: str = "pretrain"  # kind of phase
    precision: str = "bf16"
    lora: Lora | None = None
    is_nf4: bool = False  # True for qlora
    recompute: str = "none"
    is_packed: bool = False  # True if each row contains several documents, masked from each other


@dataclass(frozen=True)
class SamplingRow:
    """The measured time to generate new tokens for a batch of rows."""

    source: str
    card: str
    seconds: float
    shape: Model
    rows: int
    prompt: int  # number of tokens in the longest prompt
    num_new: int
    is_captured: bool


@dataclass(frozen=True)
class LearnedRow:
    """How well a model trained with one recipe learned in a given time, averaged over several seeds."""

    source: str
    card: str
    recipe: str  # `stock` or `swift` as homing trains them, a variant of these, or a different tool
    seconds: float
    text_tokens: int  # size of the training text; results on different texts are not comparable
    bits_per_byte: float  # on held-out text, averaged over the seeds
    num_seeds: int


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, so that fits can be cached for each table
class Table:
    steps: tuple[StepRow, ...]
    sampling: tuple[SamplingRow, ...]
    learned: tuple[LearnedRow, ...] = ()

    def without(self, source: str) -> Table:
        """Return the table without rows from this source, to check how well the other rows predict it."""
        return Table(
            tuple(row for row in self.steps if not row.source.startswith(source)),
            tuple(row for row in self.sampling if not row.source.startswith(source)),
            tuple(row for row in self.learned if not row.source.startswith(source)),
        )

    def learned_by(self, one: str, other: str) -> tuple[LearnedRow, LearnedRow] | None:
        """Return one row per recipe, with the same GPU, text and training time (the longest available), or None."""
        found = [
            (row, match)
            for row in self.learned
            for match in self.learned
            if (row.recipe, match.recipe) == (one, other) and _conditions(row) == _conditions(match)
        ]
        return max(found, key=lambda pair: (pair[0].seconds, pair[0].num_seeds), default=None)

    def gains_of_fp8(self) -> list[tuple[StepRow, float]]:
        """Return each FP8 row with its speed-up over the same training in bf16, smallest model first."""
        found = [
            (row, row.tokens_per_s / match.tokens_per_s)
            for row in self.steps
            for match in self.steps
            if row.precision == "fp8" and _in_bf16(row) == _in_bf16(match) and match.precision == "bf16"
        ]
        return sorted(found, key=lambda pair: sizes_of(pair[0].shape).num_matmul_params)

    @property
    def cards(self) -> list[str]:
        return sorted({row.card for row in self.steps})


@functools.cache
def load_table() -> Table:
    document: dict[str, Any] = json.loads(
        resources.files("homing.cloud.plan").joinpath(FILE).read_text(encoding="utf-8")
    )
    assert document["schema"] == "homing.measured/1", FILE
    return Table(
        tuple(codec.load(StepRow, row) for row in document["steps"]),
        tuple(codec.load(SamplingRow, row) for row in document["sampling"]),
        tuple(codec.load(LearnedRow, row) for row in document["learned"]),
    )


def _conditions(row: LearnedRow) -> tuple[str, float, int]:
    return row.card, row.seconds, row.text_tokens


def _in_bf16(row: StepRow) -> StepRow:
    """Return the row with bf16 and no source or speed, so that rows that differ only in these fields compare equal."""
    return replace(row, source="", tokens_per_s=0.0, precision="bf16")


def find_row(table: Table, card: str, run: Run, phase: Phase) -> StepRow | None:
    """Return the newest row that matches exactly, or None. In rl, sample lengths vary, so the result is always None."""
    precision = "bf16" if run.train.precision == "auto" else run.train.precision
    adapters, is_nf4 = _adapters(phase.lora), phase.method == "qlora"
    wanted = (card, _sizes_alone(run.model), precision, adapters, is_nf4, phase.recompute, is_packed(phase))
    for row in reversed(table.steps):
        adapters = _adapters(row.lora)
        found = (row.card, _sizes_alone(row.shape), row.precision, adapters, row.is_nf4, row.recompute, row.is_packed)
        if phase.rl is None and row.kind != "rl" and found == wanted:  # `speed` later adds the time for offload
            return row
    return None


def _sizes_alone(model: Model) -> Model:
    """Return the model without the settings that do not affect training time."""
    return replace(model, rope_base=0.0, norm_eps=0.0, rope_scaling=None, max_context=0)


def _adapters(lora: Lora | None) -> tuple[int, bool, bool, frozenset[str]] | None:
    """Return the adapter settings that affect training time."""
    if lora is None:
        return None
    targets = frozenset(LORA_TARGETS if "all" in lora.targets else lora.targets)
    return lora.rank, lora.is_dora, lora.dropout > 0, targets


def is_packed(phase: Phase) -> bool:
    """Return True if each row in this phase contains several conversations, masked from each other."""
    return phase.kind == "sft" or (phase.data is not None and phase.data.kind == "chat")


# -- training ----------------------------------------------------------------------------------------------------------


def tokens_per_s(table: Table, gpu: Gpu, run: Run, phase: Phase) -> float:
    """Return the predicted speed of one GPU. In rl, it is the speed of training on the rows, without sampling them."""
    precision = _precision(run, gpu)
    model, sizes = run.model, run.sizes
    if phase.rl is not None:
        model, sizes = with_rows_of(row_tokens(model, phase.rl), model, sizes)
    work = _work(model, sizes, phase.lora, phase.recompute, precision)
    return _rate(_fit(table), gpu, work, precision, is_packed=is_packed(phase))


@dataclass(frozen=True)
class _Work:
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class _Fit:
    products: float  # matmul time as a multiple of the time at the GPU's peak
    passes: float  # how many times the stored bytes of a layer are read or written
    # extra seconds per token if rows contain several documents; assumed to be the same on every GPU
    packed_s: float
    fp8: float  # speed-up over bf16


def _work(model: Model, sizes: Sizes, lora: Lora | None, recompute: str, precision: str) -> _Work:
    size = 4 if precision == "fp32" else 2
    again = 1.0 + _FORWARD * RECOMPUTED_OF[recompute]
    kept = layer_bytes(model, size, is_fp8=False, lora=lora)
    return _Work(
        flops=training_flops(model, sizes, lora, recompute),
        num_bytes=again * model.num_layers * kept + size * model.vocab_size,
    )


def _rate(fit: _Fit, gpu: Gpu, work: _Work, precision: str, *, is_packed: bool) -> float:
    peak = gpu.peak_flops("fp32" if precision == "fp32" else "bf16")
    seconds = fit.products * work.flops / peak + fit.passes * work.num_bytes / (gpu.bandwidth_gb_s * 1e9)
    seconds /= fit.fp8 if precision == "fp8" else 1.0
    seconds += fit.packed_s if is_packed else 0.0
    return min(1.0 / seconds, peak / work.flops)


@functools.cache
def _fit(table: Table) -> _Fit:
    plain = [row for row in table.steps if row.precision == "bf16" and not row.is_packed]
    assert plain, f"{FILE} has no row to learn from"
    terms = []
    for row in plain:
        gpu, work = GPUS[row.card], _work_of(row)
        of_products = row.tokens_per_s * work.flops / gpu.peak_flops("bf16")
        terms.append((of_products, row.tokens_per_s * work.num_bytes / (gpu.bandwidth_gb_s * 1e9)))
    products, passes = _two_factors(terms, least=1 / MOST_OF_PEAK)
    fit = _Fit(products, passes, packed_s=0.0, fp8=1.0)
    gains = [row.tokens_per_s / _predicted(fit, row) for row in table.steps if row.precision == "fp8"]
    slower = [_slower_s(fit, row, plain) for row in table.steps if row.is_packed]
    return _Fit(
        products, passes, packed_s=max(0.0, statistics.median(slower)) if slower else 0.0,
        fp8=max(1.0, statistics.median(gains)) if gains else 1.0,
    )  # fmt: skip


def _slower_s(fit: _Fit, packed: StepRow, plain: Sequence[StepRow]) -> float:
    """Return how many extra seconds per token training takes if rows are packed (measured if possible)."""
    same = [row for row in plain if replace(row, source="", tokens_per_s=0.0, kind="") == replace(
        packed, source="", tokens_per_s=0.0, kind="", is_packed=False
    )]  # fmt: skip
    unpacked = same[-1].tokens_per_s if same else _predicted(fit, packed)
    return 1 / packed.tokens_per_s - 1 / unpacked


def _work_of(row: StepRow) -> _Work:
    return _work(row.shape, sizes_of(row.shape), row.lora, row.recompute, row.precision)


def _predicted(fit: _Fit, row: StepRow) -> float:
    """Return the speed that the fit predicts for this row if it used bf16 and no packing."""
    return _rate(fit, GPUS[row.card], _work_of(row), "bf16", is_packed=False)


def _two_factors(terms: Sequence[tuple[float, float]], *, least: float) -> tuple[float, float]:
    """Fit x and y so that u x + v y is nearest to 1 over all terms (least squares), with y >= 0 and x >= `least`."""
    uu, uv, vv = (sum(a * b for a, b in pairs) for pairs in (
        [(u, u) for u, _ in terms], terms, [(v, v) for _, v in terms]
    ))  # fmt: skip
    u_sum, v_sum = sum(u for u, _ in terms), sum(v for _, v in terms)
    determinant = uu * vv - uv * uv
    x = (u_sum * vv - v_sum * uv) / determinant if determinant > 1e-9 * uu * vv else least
    x = max(least, x)
    y = (v_sum - x * uv) / vv
    return (x, y) if y >= 0.0 else (max(least, u_sum / uu), 0.0)


def _precision(run: Run, gpu: Gpu) -> str:
    if run.train.precision == "auto":
        return "bf16" if gpu.has_bf16 else "fp32"
    return run.train.precision


# -- rl ----------------------------------------------------------------------------------------------------------------


def rl_step_s(table: Table, gpu: Gpu, run: Run, phase: Phase, num_gpus: int = 1) -> float:
    """Return the seconds per RL step: sampling at full length, then training on the samples. GPUs split the rows."""
    rl = phase.rl
    assert rl is not None
    rows = num_rows(rl) / num_gpus
    trained = rows * row_tokens(run.model, rl) / tokens_per_s(table, gpu, run, phase)
    # With a KL penalty or several updates per rollout, each row also needs forward passes with the reference or the old
    # weights.
    looks = (rl.kl > 0 or rl.updates_per_rollout > 1) + (rl.kl > 0) / rl.updates_per_rollout
    return _sampling_s(table, gpu, run, phase, rl, rows) / rl.updates_per_rollout + trained * (1 + looks * _FORWARD)


def rl_eval_s(table: Table, gpu: Gpu, run: Run, phase: Phase) -> float:
    assert phase.rl is not None
    return _sampling_s(table, gpu, run, phase, phase.rl, phase.rl.eval_prompts * phase.rl.eval_samples)


def _sampling_s(table: Table, gpu: Gpu, run: Run, phase: Phase, rl: Rl, rows: float) -> float:
    """Return the seconds it takes to sample this many rows, in batches as large as the phase allows."""
    at_a_time = min(rows, rows_at_a_time(rl))
    size, prompt = 4 if _precision(run, gpu) == "fp32" else 2, prompt_tokens(run.model, rl)
    fixed, traffic = _sampling_fit(table, rl.graphs != "off")
    num_bytes = _read_bytes(run.model, at_a_time, prompt, rl.max_new_tokens, size)
    if phase.method == "qlora":  # before each matmul, qlora also reads the 4-bit weights and writes them dequantized
        blocks = run.sizes.num_matmul_params - run.model.vocab_size * run.model.width
        num_bytes += blocks * (size + NF4)
    weights_and_caches = num_bytes / (gpu.bandwidth_gb_s * 1e9)
    flops = 2.0 * at_a_time * run.sizes.num_matmul_params
    of_products = _fit(table).products * flops / gpu.peak_flops("fp32" if size == 4 else "bf16")
    token_s = fixed * run.model.num_layers + traffic * weights_and_caches + of_products
    return math.ceil(rows / at_a_time) * rl.max_new_tokens * token_s


def _read_bytes(model: Model, rows: float, prompt: int, num_new: int, size: int) -> float:
    """Return how many bytes are read for a new token halfway through a sample: all weights, and each row's cache."""
    reach = prompt + num_new // 2 + REACH // 2
    return size * sizes_of(model).num_matmul_params + cache_bytes(model, 1, reach, size) * rows


@functools.cache
def _sampling_fit(table: Table, is_captured: bool) -> tuple[float, float]:
    """Return the fixed seconds per layer, and how many times longer memory reads take than at full bandwidth."""
    captured = [row for row in table.sampling if row.is_captured]
    assert captured, f"{FILE} has no sampling to learn from"
    terms = []
    for row in captured:
        of_reading = _reading_s(row)
        left_s = row.seconds / row.num_new - _products_s(table, row)
        terms.append((of_reading / left_s, row.shape.num_layers / left_s))
    traffic, fixed = _two_factors(terms, least=1.0)
    plain = [row for row in table.sampling if not row.is_captured]
    if is_captured or not plain:
        return fixed, traffic
    slow = [
        (row.seconds / row.num_new - _products_s(table, row) - traffic * _reading_s(row)) / row.shape.num_layers
        for row in plain
    ]
    return max(fixed, statistics.median(slow)), traffic


def _reading_s(row: SamplingRow) -> float:
    return _read_bytes(row.shape, row.rows, row.prompt, row.num_new, 2) / (GPUS[row.card].bandwidth_gb_s * 1e9)


def _products_s(table: Table, row: SamplingRow) -> float:
    flops = 2.0 * row.rows * sizes_of(row.shape).num_matmul_params
    return _fit(table).products * flops / GPUS[row.card].peak_flops("bf16")
