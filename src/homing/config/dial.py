"""The one dial and the rates: a depth to a shape, tokens to a batch, width and batch to learning rates.

    depth -> width = 64 x depth in steps of 128, heads of 128 -> tokens = 12 per scaling parameter
          -> batch grows with tokens^0.383, a power of two -> rates scale with sqrt(batch) and 1/sqrt(width)

The rules are nanochat's (karpathy/nanochat, scripts/base_train.py), measured around a model of depth 12 with a batch of
2^19 tokens, which is the point all of them start from.
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
    "shape_of_depth",
    "tokens_for",
]

HEAD_SIZE = 128
CONTEXT = 2048
TOKENS_PER_PARAM = 12
REFERENCE_DEPTH = 12
REFERENCE_WIDTH = 768
REFERENCE_BATCH = 2**19
BATCH_EXPONENT = 0.383
# Fewer steps than this and warm-up and decay have nothing to work with; a smaller batch is then the better deal.
LEAST_STEPS = 500

MUON_LR = 0.02
# nanochat takes 0.3, but norms the embedding before the first block. These families do not, and there 0.3 was worse
# than the sixth of it by 0.12 nats (6 layers, width 384, 350 steps of 16,384 tokens).
MUON_LR_EMBEDDING = 0.05
MUON_LR_HEAD = 0.008
MUON_LR_NORM = 0.008
ADAMW_LR = 6e-4
# swift norms its embedding, and nanochat's rates fit it.
SWIFT_LR_EMBEDDING = 0.3
SWIFT_LR_SCALAR = 0.5
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
    best = REFERENCE_BATCH * (num_tokens / _reference_tokens(vocab_size)) ** BATCH_EXPONENT
    return _whole_rows(min(best, num_tokens / LEAST_STEPS), context)


def batch_for_steps(num_steps: int, context: int, vocab_size: int) -> int:
    """The same rule where only the steps are known: batch x steps tokens, solved for the batch."""
    power = (num_steps / _reference_tokens(vocab_size)) ** BATCH_EXPONENT
    return _whole_rows((REFERENCE_BATCH * power) ** (1 / (1 - BATCH_EXPONENT)), context)


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
