"""One decoder that is exactly Llama, Qwen2 or Qwen3, depending on its configuration.

model_shape     checks a wire Model; lists its parameters; writes config.json, so that transformers can load the weights
layers          Linear (fp32 master weights, cast to the compute dtype), RMSNorm, RoPE, SwiGLU, activation checkpointing
attention       grouped-query attention, with or without a KV cache
loss            mean cross-entropy that never holds all logits in memory
decoder         the complete model, and its weight initialization, the same on every device
lora            adapters on frozen weights: `frozen_linear` multiplies by such weights, `nf4` stores them in four bits
"""

from homing.lm.model.attention import KVCache
from homing.lm.model.decoder import Decoder
from homing.lm.model.model_shape import check_shape, config_json, count_params, shape_from_config

__all__ = ["Decoder", "KVCache", "check_shape", "config_json", "count_params", "shape_from_config"]
