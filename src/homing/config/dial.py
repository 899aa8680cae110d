"""The one dial and the rates: a depth to a shape, tokens to a batch, and all of it to learning rates.

    depth -> width = 64 x depth in steps of 128, heads of 128 -> tokens = 12 per scaling parameter
          -> batch, a power of two, grows with tokens^0.383; below the point of reference it falls with tokens^0.62
          -> Muon's rate grows with batch^0.15 and falls with steps^0.32; rates of embedding and head with 1/sqrt(width)
          -> what fewer steps add to Muon's rate is taken back above 12 layers, by 12/depth

The point of reference is nanochat's (karpathy/nanochat, scripts/base_train.py): depth 12, 2,520 steps of 2^19 tokens,
where Muon's rate is 0.02. What is said of shorter runs comes from sweeps at 6 layers (docs/log.md): 0.028 was best in
320 steps of 65,536 tokens, and 0.020 better than it in 1,281.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from homing.config.derive import DATA_CONSTRAINED_EPOCHS, round_up, scaling_params
from homing.wire.run import Model

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
# Short runs want many steps more than they want calm ones: 640 steps of 32,768 tokens were better than 320 of 65,536.
SHORT_BATCH_EXPONENT = 0.62
# Fewer steps than this and warm-up and decay have nothing to work with; a smaller batch is then the better deal.
LEAST_STEPS = 500
# Rows in a step of sft where only the steps are given: the rule for text would take one, whose answers say too little.
SFT_ROWS = 8

MUON_LR = 0.02
MUON_LR_BOUNDS = (0.01, 0.03)
MUON_BATCH_EXPONENT = 0.15
MUON_STEPS_EXPONENT = 0.32
ADAMW_LR = 6e-4
# Beside Muon, by AdamW. swift norms its embedding, so only the direction of a row counts there.
PRETRAIN_RATES = {
    "stock": {"lr_embedding": 0.15, "lr_head": 0.008, "lr_norm": 0.008},
    "swift": {"lr_embedding": 0.3, "lr_head": 0.008, "lr_norm": 0.008, "lr_scalar": 0.15},
}
# Of later phases, before their share and the batch's.
LATER_RATES = {
    "stock": {"lr_embedding": 0.05, "lr_head": 0.008, "lr_norm": 0.008},
    "swift": {"lr_embedding": 0.3, "lr_head": 0.008, "lr_norm": 0.008, "lr_scalar": 0.5},
}
# Below it an embedding that is not normed wants less: 0.05 was better than 0.37 by 0.04 bits at 2,048 tokens a step.
SMALL_BATCH = 2**16
BY_WIDTH = ("lr_embedding", "lr_head")
# What goes with Muon instead of the run file's usual numbers: AdamW beside it, and in pretraining the rest.
MUON_BESIDE = {"beta1": 0.8, "eps": 1e-10}
MUON_PRETRAIN = {"clip": 0.3, "weight_decay": 0.28}
SWIFT_ROPE_BASE = 100_000.0


# What is learned already is not to be unlearned: rates of later phases as a share of pretraining's.
PHASE_RATE = {"pretrain": 1.0, "mid": 0.3, "sft": 0.1, "rl": 0.05}
LOADED_LR = {"full": 2e-5, "lora": 2e-4}  # of AdamW on open weights, and of adapters


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
    """Three SwiGLU matrices of 8/3 width cost what swift's two of 4 width cost."""
    return 4 * width if family == "swift" else round_up(8 * width / 3, 64)


def tokens_for(model: Model) -> int:
    return TOKENS_PER_PARAM * scaling_params(model)


def batch_for_tokens(num_tokens: float, context: int, vocab_size: int) -> int:
    share = num_tokens / _reference_tokens(vocab_size)
    best = REFERENCE_BATCH * share ** (SHORT_BATCH_EXPONENT if share < 1 else BATCH_EXPONENT)
    return _whole_rows(min(best, num_tokens / LEAST_STEPS), context)


def batch_for_steps(num_steps: int, context: int, vocab_size: int) -> int:
    """The same rule where only the steps are known: batch x steps tokens, solved for the batch."""
    per_token = num_steps / _reference_tokens(vocab_size)
    exponent = SHORT_BATCH_EXPONENT if per_token * REFERENCE_BATCH < 1 else BATCH_EXPONENT
    return _whole_rows((REFERENCE_BATCH * per_token**exponent) ** (1 / (1 - exponent)), context)


def batch_within(batch_tokens: int, num_steps: int, num_train_tokens: int, context: int) -> int:
    """At most so large that so many steps do not read the text more often than it teaches; at least one row. Where
    nobody knows how much text there is, as it was."""
    most = DATA_CONSTRAINED_EPOCHS * num_train_tokens / num_steps
    if not num_train_tokens or batch_tokens <= most:
        return batch_tokens
    return context * int(2 ** math.floor(math.log2(max(1.0, most / context))))


def batch_scale(batch_tokens: int) -> float:
    """sqrt(batch / 2^19), between a half and two: at 16,384 tokens half the rate was better than a quarter."""
    return min(2.0, max(0.5, math.sqrt(batch_tokens / REFERENCE_BATCH)))


def width_scale(width: int) -> float:
    return math.sqrt(REFERENCE_WIDTH / width)


def muon_rates(model: Model, kind: str, batch_tokens: int, num_steps: int) -> dict[str, float]:
    """Of a phase whose matrices Muon trains: `lr` and those beside it. Where no steps are known yet, as of 2,520."""
    by_width = width_scale(model.width)
    if kind != "pretrain":
        share = batch_scale(batch_tokens) * PHASE_RATE[kind]
        rates = {name: rate * share for name, rate in ({"lr": MUON_LR} | LATER_RATES[model.family]).items()}
        return {name: rate * by_width if name in BY_WIDTH else rate for name, rate in rates.items()}
    by_batch = (batch_tokens / REFERENCE_BATCH) ** MUON_BATCH_EXPONENT
    by_steps = (REFERENCE_STEPS / (num_steps or REFERENCE_STEPS)) ** MUON_STEPS_EXPONENT
    if model.family == "stock":
        # At the rate that suits six layers in so few steps, the loss of twenty rose again after its first fall, and
        # stand-ins ended worse (docs/log.md). Long runs, of which nothing is known, stay as they are.
        by_steps = min(by_steps, max(1.0, by_steps * REFERENCE_DEPTH / model.num_layers))
    least, most = MUON_LR_BOUNDS
    rates = {"lr": min(most, max(least, MUON_LR * by_batch * by_steps))} | PRETRAIN_RATES[model.family]
    if model.family == "stock":
        rates["lr_embedding"] *= min(1.0, math.sqrt(batch_tokens / SMALL_BATCH))
    # A narrow model takes them as one of width 768 does: so they were found at width 384.
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
    """The nearest power of two of rows, at least one."""
    rows = max(1.0, batch_tokens / context)
    return context * int(2 ** round(math.log2(rows)))
