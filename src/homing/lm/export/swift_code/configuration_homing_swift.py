"""Configuration of a `swift` model, for transformers.

Written by homing, https://pypi.org/project/homing; Apache-2.0.
"""

from transformers import PretrainedConfig


class HomingSwiftConfig(PretrainedConfig):
    model_type = "homing_swift"

    def __init__(
        self,
        vocab_size=32768,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=128,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        kwargs.pop("rope_parameters", None)
        kwargs["tie_word_embeddings"] = False  # swift normalizes embeddings, so the head needs its own weights
        super().__init__(**kwargs)
