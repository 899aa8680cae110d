"""Converts between a Hugging Face config.json and our Model, without torch, so that `config` can use it too.

    model_of(config)   Hugging Face config.json -> wire Model; the error names every feature that our decoder lacks
    config_of(model)   wire Model -> a config.json that transformers loads

If a key is absent, `model_of` uses the default that transformers has for that architecture.
"""

from __future__ import annotations

import math
from typing import Any

from homing.errors import DataError
from homing.wire.run_json import Model, RopeScaling

__all__ = ["ARCHITECTURES", "FAMILIES", "SWIFT", "SWIFT_CLASS", "SWIFT_TYPE", "config_of", "model_of"]

SWIFT = "swift"
# `model_type` and class name in the config.json of a swift model
SWIFT_TYPE, SWIFT_CLASS = "homing_swift", "HomingSwiftForCausalLM"
# Our architecture name -> the class with which transformers loads it.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FAMILIES = "Llama (llama), Qwen2 and Qwen2.5 (qwen2) and Qwen3 (qwen3)"

_NEEDED = (
    *("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"),
    *("max_position_embeddings", "vocab_size", "rms_norm_eps"),
)
# Llama 3.1 RoPE scaling: the name in transformers -> our name.
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}


def model_of(config: Any) -> Model:
    """Build a Model from a parsed config.json.

    Raises ValueError if the input is not a config.json, and DataError with all reasons if the model is not supported.
    """
    if not isinstance(config, dict):
        raise ValueError(f"it must be an object, not {type(config).__name__}")
    arch = SWIFT if config.get("model_type") == SWIFT_TYPE else str(config.get("model_type"))
    # transformers 5 writes rope_parameters; earlier versions wrote rope_scaling and rope_theta.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"its rope parameters must be an object, not {type(rope).__name__}")
    if arch != SWIFT and arch not in ARCHITECTURES:
        # Report only the unsupported architecture. The keys that it requires differ from ours, so a list of them would
        # be confusing.
        raise DataError(
            what=f"homing does not support the architecture {arch!r}.",
            why=f"Its model_type {arch!r} is not one of {', '.join((*ARCHITECTURES, SWIFT_TYPE))}.",
            fix=f"Use a model of a supported family: {FAMILIES}.",
        )
    problems = [*_refusals(config, arch), *_rope_refusals(rope, arch), *_theta_refusals(config, rope)]
    problems += [f"{key} is missing." for key in _NEEDED if key not in config]
    if problems:
        raise DataError(
            what="This config.json describes a model that homing does not support.",
            why="\n".join(problems),
            fix=f"Use an unmodified model of a supported family: {FAMILIES}.",
        )
    try:
        return _model(config, arch, rope)
    except (TypeError, OverflowError) as exc:  # raised for a list, null or infinity instead of a number
        raise ValueError(str(exc)) from exc


def _refusals(config: dict[str, Any], arch: str) -> list[str]:
    problems = []
    activation = "relu2" if arch == SWIFT else "silu"
    if config.get("hidden_act", activation) != activation:
        problems.append(f"hidden_act {config['hidden_act']!r} is not {activation}.")
    layer_types = config.get("layer_types")
    is_sliding = isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types)
    if config.get("use_sliding_window") or is_sliding:
        problems.append(
            "use_sliding_window: some layers use a sliding window; homing's decoder attends to all earlier tokens."
        )
    if config.get("mlp_bias") or (arch != "qwen2" and config.get("attention_bias")):
        problems.append("attention_bias or mlp_bias: the model uses bias terms that homing does not support.")
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", "unnamed") if isinstance(method, dict) else method
        problems.append(f"quantization_config: the weights are quantized ({method}); use the unquantized ones.")
    return problems


def _theta_refusals(config: dict[str, Any], rope: dict[str, Any]) -> list[str]:
    """Check partial_rotary_factor and rope_theta, at the top level (old format) and in the rope parameters (new)."""
    problems = []
    for place in (config, rope):
        factor = place.get("partial_rotary_factor")
        if factor is not None and factor != 1:
            problems.append(f"partial_rotary_factor {factor}: homing's decoder rotates all channels.")
    theta = _theta(config, rope)
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        problems.append(f"rope_theta must be a number greater than 0, not {theta!r}.")
    return problems


def _theta(config: dict[str, Any], rope: dict[str, Any]) -> Any:
    """Return rope_theta from the rope parameters or the top level, or 10000 if neither sets it."""
    found = [place["rope_theta"] for place in (rope, config) if place.get("rope_theta") is not None]
    return found[0] if found else 10000.0


def _rope_refusals(rope: dict[str, Any], arch: str) -> list[str]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return []
    if kind != "llama3" or arch == SWIFT:
        return [f"rope type {kind!r} is not supported. Use default, or llama3 (not in swift models)."]
    numbers = {name: rope.get(name) for name in _LLAMA3}
    wrong = [name for name, n in numbers.items() if not isinstance(n, (int, float)) or not 0 < n < math.inf]
    if wrong:
        return [f"rope type 'llama3' needs numbers greater than 0 for: {', '.join(wrong)}."]
    if not rope["low_freq_factor"] < rope["high_freq_factor"]:
        return ["rope type 'llama3': low_freq_factor must be below high_freq_factor."]
    return []


def _model(config: dict[str, Any], arch: str, rope: dict[str, Any]) -> Model:
    num_heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
    # In transformers, null and absent differ: null means one per attention head, absent means the class's default.
    kv_heads = config.get("num_key_value_heads", 32 if arch.startswith("qwen") else None)
    head_size = config.get("head_dim", 128 if arch == "qwen3" else None)
    scaling = None
    if rope.get("rope_type", rope.get("type")) == "llama3":
        numbers = {name: rope[hf_name] for hf_name, name in _LLAMA3.items()}
        scaling = RopeScaling(
            factor=float(numbers["factor"]),
            low_freq_factor=float(numbers["low_freq_factor"]),
            high_freq_factor=float(numbers["high_freq_factor"]),
            original_context=int(numbers["original_context"]),
        )
    return Model(
        family=SWIFT if arch == SWIFT else "stock",
        arch=arch,
        num_layers=int(config["num_hidden_layers"]),
        width=width,
        num_heads=num_heads,
        num_kv_heads=int(kv_heads or num_heads),
        head_size=int(head_size or width // num_heads),
        ffn_width=int(config["intermediate_size"]),
        context=int(config["max_position_embeddings"]),
        vocab_size=int(config["vocab_size"]),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        rope_base=float(_theta(config, rope)),
        norm_eps=float(config["rms_norm_eps"]),
        rope_scaling=scaling,
    )


def config_of(model: Model, *, end_of_text_id: int = 0, chat_end_id: int | None = None) -> dict[str, Any]:
    """Return the config.json to store next to the weights, so that transformers can load them."""
    is_swift = model.family == SWIFT
    config: dict[str, Any] = {
        "architectures": [SWIFT_CLASS if is_swift else ARCHITECTURES[model.arch]],
        "model_type": SWIFT_TYPE if is_swift else model.arch,
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "relu2" if is_swift else "silu",
        "max_position_embeddings": model.max_context or model.context,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.is_tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id if chat_end_id is None else chat_end_id,
        "torch_dtype": "float32",
        "use_cache": True,
        **_rope_keys(model),
    }
    if is_swift:
        return config
    if model.arch == "llama":
        config |= {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
    else:
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": model.num_layers}
    if model.arch == "qwen3":
        config["attention_bias"] = False
    return config


def _rope_keys(model: Model) -> dict[str, Any]:
    """Return the RoPE settings in both formats.

    transformers 5 reads rope_parameters; older versions and other tools read rope_theta and rope_scaling.
    """
    scaling: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling is not None:
        scaling = {"rope_type": "llama3"}
        scaling |= {hf_name: getattr(model.rope_scaling, name) for hf_name, name in _LLAMA3.items()}
    keys: dict[str, Any] = {"rope_theta": model.rope_base}
    keys["rope_parameters"] = {**scaling, "rope_theta": model.rope_base}
    return keys if model.rope_scaling is None else keys | {"rope_scaling": scaling}
