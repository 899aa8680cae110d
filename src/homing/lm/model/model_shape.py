"""The shape of a model: validation, parameter counts, and conversion to and from Hugging Face's config.json.

    check_shape(model)        report all invalid values together, before any tensor is created
    count_params(model)       part -> number of parameters, by arithmetic; must agree with the decoder's own count
    config_json(model)        wire Model  -> Hugging Face config.json (`homing.hf_config`)
    shape_from_config(config) Hugging Face config.json -> wire Model
    misfits(wanted, given)    list tensors that are missing, unknown or of the wrong shape, before any is copied

This module deals with the names and shapes of weights, not with their values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from homing.errors import DataError
from homing.hf_config import ARCHITECTURES, SWIFT, model_of
from homing.hf_config import config_of as config_json
from homing.wire.run_json import Model

__all__ = [
    "ARCHITECTURES",
    "SMEAR_GATE_CHANNELS",
    "VALUE_GATE_CHANNELS",
    "check_shape",
    "config_json",
    "count_params",
    "do_not_fit",
    "has_value_embedding",
    "misfits",
    "padded_vocab",
    "shape_from_config",
]

Shapes = Mapping[str, tuple[int, ...]]

FAMILIES = ("stock", SWIFT)
# Channels of the residual stream that swift's gates read: a few are enough to distinguish kinds of tokens.
VALUE_GATE_CHANNELS = 12
SMEAR_GATE_CHANNELS = 24

# The vocabulary is padded to a multiple of this, because tensor cores work on whole tiles. The padding rows exist only
# in memory: they are masked in the loss and the logits, and removed from everything that is written to disk.
VOCAB_MULTIPLE = 64
_MAX_LISTED = 12  # maximum number of problems listed in an error message
MAX_CONTEXT = 2**21  # twice the longest context that any open model claims to support


def padded_vocab(shape: Model) -> int:
    return -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def check_shape(shape: Model) -> None:
    problems = _problems(shape)
    if problems:
        raise DataError(
            what="A model of this shape cannot be built.",
            why="\n".join(problems),
            fix="Correct the invalid keys under model: in the run file,"
            " or set only model.depth and let homing derive the others.",
        )


def _problems(shape: Model) -> list[str]:
    problems = []
    if shape.family not in FAMILIES:
        problems.append(f"model.family: {shape.family!r} is not one of {', '.join(FAMILIES)}.")
    known = (SWIFT,) if shape.family == SWIFT else tuple(ARCHITECTURES)
    if shape.arch not in known:
        problems.append(f"model.arch: {shape.arch!r} is not one of {', '.join(known)}.")
    for key in (
        *("num_layers", "width", "num_heads", "num_kv_heads", "head_size", "ffn_width", "context", "vocab_size"),
        *("rope_base", "norm_eps"),
    ):
        if getattr(shape, key) <= 0:
            problems.append(f"model.{key} must be greater than 0, not {getattr(shape, key)}.")
        elif not math.isfinite(getattr(shape, key)):
            problems.append(f"model.{key} must be a finite number, not {getattr(shape, key)}.")
    if shape.context > MAX_CONTEXT:
        problems.append(f"model.context: {shape.context:,} exceeds {MAX_CONTEXT:,}; the RoPE table would be huge.")
    if problems:
        return problems
    if shape.num_heads % shape.num_kv_heads:
        problems.append(
            f"model.num_kv_heads: {shape.num_heads} query heads cannot share {shape.num_kv_heads} KV heads evenly."
        )
    if shape.head_size % 2:
        problems.append(f"model.head_size: {shape.head_size} is odd; RoPE rotates pairs of channels.")
    if shape.family == SWIFT and shape.is_tied:
        problems.append(
            "model.tied: swift needs a separate output head; its embedding is normalized and cannot be tied."
        )
    if shape.family == SWIFT and shape.width < SMEAR_GATE_CHANNELS:
        problems.append(
            f"model.width: {shape.width} is less than the {SMEAR_GATE_CHANNELS} channels that swift's gates read."
        )
    # Other implementations of Qwen2 derive the head size as width / heads and have no key to override it.
    if shape.arch == "qwen2" and shape.num_heads * shape.head_size != shape.width:
        problems.append(
            f"model.head_size: qwen2 needs heads x head_size = width, "
            f"but {shape.num_heads} x {shape.head_size} = {shape.num_heads * shape.head_size}, not {shape.width}."
        )
    return problems


def count_params(shape: Model) -> dict[str, int]:
    """Return part -> number of parameters, without padding rows. The count for a tied head is 0."""
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
    """Return whether a layer in `swift` has a value embedding: every second layer does, including the last."""
    return layer % 2 == (shape.num_layers - 1) % 2


def shape_from_config(config: Any) -> Model:
    """Return the model shape that a Hugging Face config.json describes.

    Raises an error for settings that this decoder does not support.
    """
    shape = model_of(config)
    check_shape(shape)
    return shape


def misfits(wanted: Shapes, given: Shapes) -> list[str]:
    """Return one sentence for each tensor that is missing, unknown or of the wrong shape."""
    problems = [f"{name} is missing." for name in wanted if name not in given]
    problems += [f"{name} is not a weight of this model." for name in given if name not in wanted]
    both = [name for name in wanted if name in given and wanted[name] != given[name]]
    return problems + [f"{name} has shape {given[name]} in the file but {wanted[name]} in the model." for name in both]


def do_not_fit(problems: Iterable[str]) -> DataError:
    listed = sorted(problems)
    more = [f"and {len(listed) - _MAX_LISTED} more."] if len(listed) > _MAX_LISTED else []
    return DataError(
        what="The weights do not fit the model.",
        why="\n".join(listed[:_MAX_LISTED] + more),
        fix="Use the run.json or config.json that is stored with these weights.",
    )
