"""Folders with random weights as transformers writes them, of each family that homing opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["FAMILIES", "LLAMA3_ROPE", "write_theirs"]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_SMALL: dict[str, Any] = {
    "vocab_size": 100,  # not a multiple of 64: the decoder pads, the files do not
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
# name -> (class of the config, what it has of its own)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama-3.1": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


def write_theirs(
    folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **own: Any
) -> Any:
    """The model as transformers opens it again, in fp32."""
    import transformers

    name, more = FAMILIES[family]
    config = getattr(transformers, name)(**{**_SMALL, **more, **own})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms of 1 and biases of 0 would hide a forgotten one; small matrices would hide everything.
            noise = torch.randn(parameter.shape)
            parameter.copy_(parameter + 0.3 * noise if parameter.dim() == 1 else noise * parameter.shape[1] ** -0.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    # Opened anew: `to` has rounded its table of angles as well.
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
