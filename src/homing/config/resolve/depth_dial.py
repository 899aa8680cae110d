"""Scaling rules: depth -> model shape, tokens -> batch size, and both -> learning rates.

  depth -> width = 64 x depth in steps of 128, heads of 128 -> tokens = 12 per scaling parameter
        -> batch, a power of two: scales with tokens^0.383; below the reference point with tokens^0.62
        -> Muon's rate grows with batch^0.15 and falls with steps^0.32; embedding and head rates with 1/sqrt(width)
        -> stock above 12 layers: the factor by which fewer steps raise Muon's rate is scaled by 12/depth; minimum 1

The reference point is nanochat's (karpathy/nanochat, scripts/base_train.py): depth 12, 2,520 steps of 2^19 tokens, with
a Muon rate of 0.02. The rules for shorter runs come from sweeps at 6 layers (docs/development/log.md): 0.028 was best
in 320 steps of 65,536 tokens, and 0.020 was better than 0.028 in 1,281 steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from homing.config.estimate.params_and_flops import DATA_CONSTRAINED_EPOCHS, round_up, scaling_params
from homing.wire.run_json import Model

__all__ = [
    "Shape",
    "adamw_rate",
    "batch_for_steps",
    "batch_for_tokens",
    "batch_scale",
    "batch_within",
    "muon_rates",
    "shape_of_depth",
    "tokens_for",
]

HEAD_SIZE = 128
CONTEXT = 2048
TOKENS_PER_PARAM = 12
REFERENCE_DEPTH = 12
REFERENCE_WIDTH = 768
REFERENCE_BATCH = 2**19
REFERENCE_STEPS = 2520
BATCH_EXPONENT = 0.383
# Short runs gain more from additional steps than from larger batches: 640 steps of 32,768 tokens were better than 320
# of 65,536.
SHORT_BATCH_EXPONENT = 0.62
# With fewer steps than this, warm-up and decay are too short to work, so use a smaller batch and more steps.
LEAST_STEPS = 500
# Number of rows per sft step if only the number of steps is given. The rule for text would give one row, which holds
# too few answer tokens.
SFT_ROWS = 8

MUON_LR = 0.02
MUON_LR_BOUNDS = (0.01, 0.03)
MUON_BATCH_EXPONENT = 0.15
MUON_STEPS_EXPONENT = 0.32
ADAMW_LR = 6e-4
# Learning rates of the parameters that AdamW trains alongside Muon. swift normalizes its embedding, so only the
# direction of each embedding row matters.
PRETRAIN_RATES = {
    "stock": {"lr_embedding": 0.15, "lr_head": 0.008, "lr_norm": 0.008},
    "swift": {"lr_embedding": 0.3, "lr_head": 0.008, "lr_norm": 0.008, "lr_scalar": 0.15},
}
# Learning rates of later phases, before the factors for phase, batch and width are applied.
LATER_RATES = {
    "stock": {"lr_embedding": 0.05, "lr_head": 0.008, "lr_norm": 0.008},
    "swift": {"lr_embedding": 0.3, "lr_head": 0.008, "lr_norm": 0.008, "lr_scalar": 0.5},
}
# Below this batch size, an embedding without a norm needs a lower learning rate: at 2,048 tokens per step, 0.05 was
# better than 0.37 by 0.04 bits.
SMALL_BATCH = 2**16
BY_WIDTH = ("lr_embedding", "lr_head")
# Defaults that change if Muon is used: those of the AdamW that runs alongside it, and those of pretraining.
ADAM_WITH_MUON = {"beta1": 0.8, "eps": 1e-10}
MUON_PRETRAIN = {"clip": 0.3, "weight_decay": 0.28}
SWIFT_ROPE_BASE = 100_000.0


# Learning rate of each phase, as a fraction of the pretraining rate. Later phases use lower rates, so that they do not
# overwrite what was already learned.
PHASE_RATE = {"pretrain": 1.0, "mid": 0.3, "sft": 0.1, "rl": 0.05}
LOADED_LR = {"full": 2e-5, "lora": 2e-4}  # AdamW learning rates: for full training of open weights, and for adapters


@dataclass(frozen=True)
class Shape:
    num_layers: int
    width: int
    num_heads: int
    head_size: int
    ffn_width: int


def shape_of_depth(depth: int) -> Shape:
    width = round_up(64 * depth, 128)
    return Shape(depth, width, width // HEAD_SIZE, HEAD_SIZE, ffn_width_of(width))


def ffn_width_of(width: int, family: str = "stock") -> int:
    """Return the feed-forward width: three SwiGLU matrices of 8/3 x width cost as much as swift's two of 4 x width."""
    return 4 * width if family == "swift" else round_up(8 * width / 3, 64)


def tokens_for(model: Model) -> int:
    return TOKENS_PER_PARAM * scaling_params(model)


def batch_for_tokens(num_tokens: float, context: int, vocab_size: int) -> int:
    share = num_tokens / _reference_tokens(vocab_size)
    best = REFERENCE_BATCH * share ** (SHORT_BATCH_EXPONENT if share < 1 else BATCH_EXPONENT)
    return _whole_rows(min(best, num_tokens / LEAST_STEPS), context)


def batch_for_steps(num_steps: int, context: int, vocab_size: int) -> int:
    """Return the batch size if only the number of steps is known: solve the rule for tokens = batch x steps."""
    per_token = num_steps / _reference_tokens(vocab_size)
    exponent = SHORT_BATCH_EXPONENT if per_token * REFERENCE_BATCH < 1 else BATCH_EXPONENT
    return _whole_rows((REFERENCE_BATCH * per_token**exponent) ** (1 / (1 - exponent)), context)


def batch_within(batch_tokens: int, num_steps: int, num_train_tokens: int, context: int) -> int:
    """Reduce the batch so that `num_steps` steps use each token at most DATA_CONSTRAINED_EPOCHS times on average.

    The batch keeps at least one row. Return the batch unchanged if the amount of text is unknown.
    """
    most = DATA_CONSTRAINED_EPOCHS * num_train_tokens / num_steps
    if not num_train_tokens or batch_tokens <= most:
        return batch_tokens
    return context * int(2 ** math.floor(math.log2(max(1.0, most / context))))


def batch_scale(batch_tokens: int) -> float:
    """Return the learning-rate factor for this batch size: sqrt(batch / 2^19), clamped to 0.5..2.

    The minimum is 0.5 because, at 16,384 tokens, half the learning rate was better than a quarter of it.
    """
    return min(2.0, max(0.5, math.sqrt(batch_tokens / REFERENCE_BATCH)))


def width_scale(width: int) -> float:
    return math.sqrt(REFERENCE_WIDTH / width)


def muon_rates(model: Model, kind: str, batch_tokens: int, num_steps: int) -> dict[str, float]:
    """Return `lr` and the AdamW learning rates of a phase that uses Muon.

    If `num_steps` is 0 (unknown), assume REFERENCE_STEPS.
    """
    by_width = width_scale(model.width)
    if kind != "pretrain":
        share = batch_scale(batch_tokens) * PHASE_RATE[kind]
        rates = {name: rate * share for name, rate in ({"lr": MUON_LR} | LATER_RATES[model.family]).items()}
        return {name: rate * by_width if name in BY_WIDTH else rate for name, rate in rates.items()}
    by_batch = (batch_tokens / REFERENCE_BATCH) ** MUON_BATCH_EXPONENT
    by_steps = (REFERENCE_STEPS / (num_steps or REFERENCE_STEPS)) ** MUON_STEPS_EXPONENT
    if model.family == "stock":
        # With the rate that is best for six layers in a short run, a 20-layer model's loss rose again after its initial
        # drop, and smaller proxy models ended with a worse loss (docs/development/log.md). Long runs were not measured,
        # so their rate is unchanged.
        by_steps = min(by_steps, max(1.0, by_steps * REFERENCE_DEPTH / model.num_layers))
    least, most = MUON_LR_BOUNDS
    rates = {"lr": min(most, max(least, MUON_LR * by_batch * by_steps))} | PRETRAIN_RATES[model.family]
    if model.family == "stock":
        rates["lr_embedding"] *= min(1.0, math.sqrt(batch_tokens / SMALL_BATCH))
    # Models narrower than 768 use the rates without scaling, because the rates were tuned at width 384.
    return {name: rate * min(1.0, by_width) if name in BY_WIDTH else rate for name, rate in rates.items()}


def adamw_rate(width: int, batch_tokens: int) -> float:
    return ADAMW_LR * width_scale(width) * batch_scale(batch_tokens)


def _reference_tokens(vocab_size: int) -> int:
    shape = shape_of_depth(REFERENCE_DEPTH)
    model = Model(
        family="stock",
        arch="qwen3",
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_heads,
        head_size=shape.head_size,
        ffn_width=shape.ffn_width,
        context=CONTEXT,
        vocab_size=vocab_size,
        is_tied=False,
    )
    return tokens_for(model)


def _whole_rows(batch_tokens: float, context: int) -> int:
    """Round to the nearest batch with a power-of-two number of rows, at least one."""
    rows = max(1.0, batch_tokens / context)
    return context * int(2 ** round(math.log2(rows)))
