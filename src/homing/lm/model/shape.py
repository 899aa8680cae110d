"""The shape of a model: checked, counted, and read from the config.json that lies beside open weights.

    check_shape(model)        every number that cannot work, at once, before any tensor is made
    count_params(model)       part -> number of parameters, by arithmetic; the decoder's own count must agree
    config_json(model)        wire Model  -> Hugging Face config.json (`homing.hf_config`)
    shape_from_config(config) Hugging Face config.json -> wire Model

Knows nothing of weights.
"""

from __future__ import annotations

import math
from typing import Any

from homing.errors import DataError
from homing.hf_config import ARCHITECTURES, SWIFT, model_of
from homing.hf_config import config_of as config_json
from homing.wire.run import Model

__all__ = [
    "ARCHITECTURES",
    "SMEAR_GATE_CHANNELS",
    "VALUE_GATE_CHANNELS",
    "check_shape",
    "config_json",
    "count_params",
    "has_value_embedding",
    "padded_vocab",
    "shape_from_config",
]

FAMILIES = ("stock", SWIFT)
# Channels of the stream from which swift's gates are computed: a few are enough to tell kinds of tokens apart.
VALUE_GATE_CHANNELS = 12
SMEAR_GATE_CHANNELS = 24

# Tensor cores want the vocabulary in whole tiles. The extra rows live in the trainer's memory only: they are masked in
# the loss and the logits and cut from everything that is written.
VOCAB_MULTIPLE = 64
MAX_CONTEXT = 2**21  # twice what the longest open models claim


def padded_vocab(shape: Model) -> int:
    return -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def check_shape(shape: Model) -> None:
    problems = _problems(shape)
    if problems:
        raise DataError(
            what="A model of this shape cannot be built.",
            why="\n".join(problems),
            fix="Change these keys under model: in the run file, or set only model.depth and let homing derive them.",
        )


def _problems(shape: Model) -> list[str]:
    problems = []
    if shape.family not in FAMILIES:
        problems.append(f"model.family: {shape.family!r} is none of {', '.join(FAMILIES)}.")
    known = (SWIFT,) if shape.family == SWIFT else tuple(ARCHITECTURES)
    if shape.arch not in known:
        problems.append(f"model.arch: {shape.arch!r} is none of {', '.join(known)}.")
    for key in (
        *("num_layers", "width", "num_heads", "num_kv_heads", "head_size", "ffn_width", "context", "vocab_size"),
        *("rope_base", "norm_eps"),
    ):
        if getattr(shape, key) <= 0:
            problems.append(f"model.{key}: {getattr(shape, key)} must be above 0.")
        elif not math.isfinite(getattr(shape, key)):
            problems.append(f"model.{key}: {getattr(shape, key)} is not a number that can be computed with.")
    if shape.context > MAX_CONTEXT:
        problems.append(f"model.context: {shape.context:,} is over {MAX_CONTEXT:,}; the table of angles would be huge.")
    if problems:
        return problems
    if shape.num_heads % shape.num_kv_heads:
        problems.append(
            f"model.num_kv_heads: {shape.num_heads} query heads cannot share {shape.num_kv_heads} KV heads evenly."
        )
    if shape.head_size % 2:
        problems.append(f"model.head_size: {shape.head_size} is odd; rotary positions turn pairs of channels.")
    if shape.family == SWIFT and shape.is_tied:
        problems.append("model.tied: swift has a head of its own; its embedding is normed and cannot be one.")
    if shape.family == SWIFT and shape.width < SMEAR_GATE_CHANNELS:
        problems.append(f"model.width: {shape.width} is under {SMEAR_GATE_CHANNELS}, which swift's gates look at.")
    # Qwen2's readers outside transformers take width / heads for the head size and have no key to say otherwise.
    if shape.arch == "qwen2" and shape.num_heads * shape.head_size != shape.width:
        problems.append(
            f"model.head_size: qwen2 needs heads x head_size = width, "
            f"but {shape.num_heads} x {shape.head_size} = {shape.num_heads * shape.head_size}, not {shape.width}."
        )
    return problems


def count_params(shape: Model) -> dict[str, int]:
    """Part -> parameters, each counted once: a tied head is 0, padding rows are not counted."""
    q_width, kv_width = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    if shape.family == SWIFT:
        return _count_swift(shape, q_width, kv_width)
    attention = 2 * shape.width * q_width + 2 * shape.width * kv_width
    attention += q_width + 2 * kv_width if shape.arch == "qwen2" else 0
    norms = 2 * shape.width + (2 * shape.head_size if shape.arch == "qwen3" else 0)
    return {
        "embedding": shape.vocab_size * shape.width,
        "attention": shape.num_layers * attention,
        "feed-forward": shape.num_layers * 3 * shape.width * shape.ffn_width,
        "norms": shape.num_layers * norms + shape.width,
        "head": 0 if shape.is_tied else shape.vocab_size * shape.width,
    }


def _count_swift(shape: Model, q_width: int, kv_width: int) -> dict[str, int]:
    num_embedded = sum(has_value_embedding(shape, layer) for layer in range(shape.num_layers))
    return {
        "embedding": shape.vocab_size * shape.width,
        "value embeddings": num_embedded * shape.vocab_size * kv_width,
        "attention": shape.num_layers * 2 * shape.width * (q_width + kv_width),
        "feed-forward": shape.num_layers * 2 * shape.width * shape.ffn_width,
        "gates and scales": num_embedded * shape.num_kv_heads * VALUE_GATE_CHANNELS
        + SMEAR_GATE_CHANNELS
        + 2 * shape.num_layers
        + 2,
        "head": shape.vocab_size * shape.width,
    }


def has_value_embedding(shape: Model, layer: int) -> bool:
    """Every second layer of `swift`, counted so that the last one has it."""
    return layer % 2 == (shape.num_layers - 1) % 2


def shape_from_config(config: Any) -> Model:
    """The shape in a Hugging Face config.json; what this decoder would compute otherwise is refused, not ignored."""
    shape = model_of(config)
    check_shape(shape)
    return shape
