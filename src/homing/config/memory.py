"""How much memory training takes on a card, by part, and what to lower where it does not fit.

    always there   fp32 weights, fp32 gradients, optimizer state, CUDA itself
    a forward      bf16 copies of the matrices, activations per row, logits (in pieces, as the trainer's loss does)
    a step         Muon's scratch for its largest group of matrices; never at the same time as a forward

so the peak is `always + max(forward, step)`. Activations are those that backward needs, by counting the decoder's
tensors; attention is the fused kind, whose memory does not grow with the square of the context. torch.compile keeps
fewer activations and more logits. The constants were fitted to peaks measured on an H200 (tests/config/test_memory.py
has them): eager within +1 to +5%, compiled within +1 to +2%.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from homing.config.derive import parameter_table, round_up
from homing.gpus import GPUS, Gpu
from homing.wire.run import Model, Phase, Run

__all__ = ["Fit", "Memory", "fits", "memory_of", "training_memory"]

FP32, BF16 = 4, 2
# The context, cuBLAS and cuDNN work spaces of one process: 0.75 GiB there, and more with other drivers.
CUDA_BYTES = 2**30
# The allocator rounds and leaves holes; what it cannot hand out is not ours to plan with.
USABLE = 0.94
# The trainer's loss holds the logits of so many (token, entry) pairs at a time, some of them three times in fp32.
PIECE_LOGITS = 2**26
BYTES_PER_LOGIT = 16
# What torch.compile leaves of the activations, by recomputing what is cheap; and what it holds of the logits of all
# pieces together, which it does not free one by one.
COMPILED_ACTIVATIONS = 0.72
COMPILED_BYTES_PER_LOGIT = 4.3
# Stacked gradient, momentum mix and update in fp32, and the polynomial's operands in bf16.
MUON_SCRATCH_BYTES = 16


@dataclass(frozen=True)
class Memory:
    """Bytes by part; the last three grow with the micro-batch or end with the step."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations_per_row: int
    logits_per_row: int
    logits_most: int
    scratch: int
    is_compiled: bool = True
    cuda: int = CUDA_BYTES

    @property
    def always(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.cuda

    def peak(self, micro_batch: int) -> int:
        return self.always + max(self.forward(micro_batch), self.scratch)

    def forward(self, micro_batch: int) -> int:
        logits = float(min(self.logits_most, micro_batch * self.logits_per_row))
        activations = float(micro_batch * self.activations_per_row)
        if self.is_compiled:
            activations *= COMPILED_ACTIVATIONS
            if micro_batch * self.logits_per_row > self.logits_most:
                logits += micro_batch * self.logits_per_row * COMPILED_BYTES_PER_LOGIT / BYTES_PER_LOGIT
        return int(self.copies + activations + logits)


@dataclass(frozen=True)
class Fit:
    """One card: whether the phase as written fits, the most rows that would, and what to lower if it does not."""

    gpu: Gpu
    peak_bytes: int  # at the micro-batch that would be used there
    usable_bytes: int
    micro_batch: int  # what would be used there; 0 if not even one row fits
    most_rows: int
    is_fitting: bool
    lower: str = ""


def training_memory(run: Run, phase: Phase | None = None, *, has_bf16: bool = True) -> Memory:
    """Of one phase (the first when none is given) at the precision a card with or without bf16 takes."""
    phase = phase or run.phases[0]
    is_bf16 = run.train.precision == "bf16" or (run.train.precision == "auto" and has_bf16)
    return memory_of(run.model, phase.optimizer.kind, is_bf16=is_bf16, is_compiled=run.train.compile != "off")


def memory_of(model: Model, optimizer: str, *, is_bf16: bool, is_compiled: bool = True) -> Memory:
    size = BF16 if is_bf16 else FP32
    padded_vocab = round_up(model.vocab_size, 64)
    table = {part.name: part.num_params for part in parameter_table(model)}
    head = padded_vocab * model.width
    num_params = sum(table.values()) + (head - model.vocab_size * model.width) * (1 if model.is_tied else 2)
    blocks = sum(table[name] for name in ("attention q", "attention k, v", "attention out", "feed-forward"))
    muon = blocks if optimizer == "muon" else 0
    num_logits = model.context * padded_vocab
    return Memory(
        weights=FP32 * num_params,
        gradients=FP32 * num_params,
        optimizer=FP32 * muon + 2 * FP32 * (num_params - muon),
        copies=BF16 * (blocks + head) if is_bf16 else 0,
        activations_per_row=model.context * (_activations_per_token(model) * size + 8),
        logits_per_row=num_logits * BYTES_PER_LOGIT,
        # Past one piece the head's gradient is summed in a copy of its own.
        logits_most=PIECE_LOGITS * BYTES_PER_LOGIT + FP32 * head,
        scratch=MUON_SCRATCH_BYTES * _largest_group(table) if muon else 0,
        is_compiled=is_compiled,
    )


def _activations_per_token(model: Model) -> int:
    """Numbers per token that backward needs, all layers: see `Block`, `Attention` and `SwiGLU`."""
    d, queries, keys = model.width, model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    stream = 4 * d  # two residual streams and their norms
    projections = (3 if model.arch == "qwen3" else 2) * (queries + keys)  # before the norm, before and after turning
    attention = keys + 2 * queries  # values; what attention gave, in both orders of its axes
    feed_forward = 4 * model.ffn_width  # gate, its silu, up, their product
    return model.num_layers * (stream + projections + attention + feed_forward) + 4 * d


def _largest_group(table: dict[str, int]) -> int:
    """Matrices of one shape are stepped together: gate and up, or q and out."""
    return max(table["feed-forward"] * 2 // 3, table["attention q"] + table["attention out"])


def fits(run: Run, phase: Phase | None = None, gpus: dict[str, Gpu] | None = None) -> list[Fit]:
    """Every known card, smallest memory first."""
    phase = phase or run.phases[0]
    known = sorted((gpus or GPUS).values(), key=lambda gpu: (gpu.memory_gib, gpu.name))
    return [_fit(run, phase, gpu) for gpu in known]


def _fit(run: Run, phase: Phase, gpu: Gpu) -> Fit:
    memory = training_memory(run, phase, has_bf16=gpu.has_bf16)
    usable = int(gpu.memory_gib * 2**30 * USABLE)
    rows = phase.batch_tokens // run.model.context
    most = _most_rows(memory, usable, rows)
    used = phase.micro_batch or most
    lower = ""
    if run.train.precision == "bf16" and not gpu.has_bf16:
        lower = "train.precision: the card has no bf16, use auto or fp32"
    elif most == 0:
        lower = _what_to_shrink(run, phase, gpu, usable)
    elif phase.micro_batch > most:
        lower = f"phases.{run.phases.index(phase)}.micro_batch to {most}"
    return Fit(
        gpu=gpu,
        peak_bytes=memory.peak(max(1, used)),
        usable_bytes=usable,
        micro_batch=used if most else 0,
        most_rows=most,
        is_fitting=not lower,
        lower=lower,
    )


def _most_rows(memory: Memory, usable: int, rows: int) -> int:
    """The largest divisor of the batch's rows that fits: accumulation needs whole micro-batches."""
    divisors = [n for n in range(1, int(rows**0.5) + 1) if rows % n == 0]
    for n in sorted({*divisors, *(rows // n for n in divisors)}, reverse=True):
        if memory.peak(n) <= usable:
            return n
    return 0


def _what_to_shrink(run: Run, phase: Phase, gpu: Gpu, usable: int) -> str:
    """One row is too much: a half, a quarter ... of the context if that helps, else the model itself."""
    context = run.model.context // 2
    while context >= 64:
        shorter = replace(run, model=replace(run.model, context=context))
        if training_memory(shorter, phase, has_bf16=gpu.has_bf16).peak(1) <= usable:
            return f"model.context to {context}"
        context //= 2
    return "model.layers or model.width: no context is short enough"
