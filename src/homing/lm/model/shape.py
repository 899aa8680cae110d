"""The shape of a model: checked, counted, and written as the config.json that transformers reads.

    check_shape(model)        every number that cannot work, at once, before any tensor is made
    count_params(model)       part -> number of parameters, by arithmetic; the decoder's own count must agree
    config_json(model)        wire Model  -> Hugging Face config.json
    shape_from_config(config) Hugging Face config.json -> wire Model

Knows nothing of weights.
"""

from __future__ import annotations

import math
from typing import Any

from homing.errors import DataError
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

SWIFT = "swift"
SWIFT_TYPE, SWIFT_CLASS = "homing_swift", "HomingSwiftForCausalLM"  # what its config.json says it is
FAMILIES = ("stock", SWIFT)
# Channels of the stream from which swift's gates are computed: a few are enough to tell kinds of tokens apart.
VALUE_GATE_CHANNELS = 12
SMEAR_GATE_CHANNELS = 24

# arch -> the class that transformers opens it with.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

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


def config_json(shape: Model, *, end_of_text_id: int = 0, chat_end_id: int | None = None) -> dict[str, Any]:
    """What lies as config.json beside model.safetensors, so that a stock folder opens in transformers as it is."""
    is_swift = shape.family == SWIFT
    config: dict[str, Any] = {
        "architectures": [SWIFT_CLASS if is_swift else ARCHITECTURES[shape.arch]],
        "model_type": SWIFT_TYPE if is_swift else shape.arch,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "relu2" if is_swift else "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        # Both spellings: transformers 5 reads the second, everything older and everything else the first.
        "rope_theta": shape.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "tie_word_embeddings": shape.is_tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id if chat_end_id is None else chat_end_id,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if is_swift:
        return config
    if shape.arch == "llama":
        config |= {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
    else:
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": shape.num_layers}
    if shape.arch == "qwen3":
        config["attention_bias"] = False
    return config


def shape_from_config(config: Any) -> Model:
    """The shape in a Hugging Face config.json; what this decoder would compute otherwise is refused, not ignored."""
    if not isinstance(config, dict):
        raise ValueError(f"it is not an object but {type(config).__name__}")
    arch = SWIFT if config.get("model_type") == SWIFT_TYPE else str(config.get("model_type"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"its rope parameters are not an object but {type(rope).__name__}")
    problems = []
    if arch != SWIFT and arch not in ARCHITECTURES:
        problems.append(f"model_type {arch!r} is none of {', '.join((*ARCHITECTURES, SWIFT_TYPE))}.")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        problems.append(f"rope of type {rope.get('rope_type', rope.get('type'))!r} is not known here.")
    activation = "relu2" if arch == SWIFT else "silu"
    if config.get("hidden_act", activation) != activation:
        problems.append(f"hidden_act {config['hidden_act']!r} is not {activation}.")
    if config.get("use_sliding_window"):
        problems.append("use_sliding_window is true; this decoder attends to everything before.")
    if config.get("mlp_bias") or (arch != "qwen2" and config.get("attention_bias")):
        problems.append("biases that this decoder does not have (attention_bias or mlp_bias).")
    missing = [key for key in _NEEDED if key not in config]
    problems += [f"{key} is missing." for key in missing]
    if problems:
        raise DataError(
            what="This config.json describes a model that homing cannot build.",
            why="\n".join(problems),
            fix="Use plain Llama, Qwen2 or Qwen3 weights.",
        )
    try:
        shape = _shape(config, arch, rope)
    except (TypeError, OverflowError) as exc:  # a list, null or infinity where a number belongs
        raise ValueError(str(exc)) from exc
    check_shape(shape)
    return shape


def _shape(config: dict[str, Any], arch: str, rope: dict[str, Any]) -> Model:
    num_heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
    return Model(
        family=SWIFT if arch == SWIFT else "stock",
        arch=arch,
        num_layers=int(config["num_hidden_layers"]),
        width=width,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_size=int(config.get("head_dim") or width // num_heads),
        ffn_width=int(config["intermediate_size"]),
        context=int(config["max_position_embeddings"]),
        vocab_size=int(config["vocab_size"]),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        norm_eps=float(config["rms_norm_eps"]),
    )


_NEEDED = (
    *("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"),
    *("max_position_embeddings", "vocab_size", "rms_norm_eps"),
)
