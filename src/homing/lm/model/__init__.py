"""One decoder that is exactly Llama, Qwen2 or Qwen3, by switches.

shape    a wire Model checked; the table of its parameters; config.json, so that transformers opens the weights
layers   Linear (fp32 master, cast to the compute type), RMSNorm, RoPE, SwiGLU
attend   grouped-query attention, with or without a KV cache
loss     mean cross-entropy without ever holding all logits
init     fresh weights, the same on every device
decoder  the pieces put together
lora     adapters beside weights that stand still: `frozen` computes with them, `nf4` stores them in four bits
recompute  activations computed again instead of kept
"""

from homing.lm.model.attend import KVCache
from homing.lm.model.decoder import Decoder
from homing.lm.model.shape import check_shape, config_json, count_params, shape_from_config

__all__ = ["Decoder", "KVCache", "check_shape", "config_json", "count_params", "shape_from_config"]
