"""One decoder that is exactly Llama, Qwen2 or Qwen3, depending on its configuration.

shape    checks a wire Model; lists its parameters; writes config.json, so that transformers can load the weights
layers   Linear (fp32 master weights, cast to the compute dtype), RMSNorm, RoPE, SwiGLU
attend   grouped-query attention, with or without a KV cache
loss     mean cross-entropy without ever holding all logits
init     weight initialization, the same on every device
decoder  the complete model
lora     adapters on top of frozen weights: `frozen` computes with these, `nf4` stores them in four bits
recompute  activation checkpointing
"""

from homing.lm.model.attention import KVCache
from homing.lm.model.decoder import Decoder
from homing.lm.model.model_shape import check_shape, config_json, count_params, shape_from_config

__all__ = ["Decoder", "KVCache", "check_shape", "config_json", "count_params", "shape_from_config"]
