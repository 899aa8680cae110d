"""The `swift` decoder for transformers, in one file. Written by homing, https://pypi.org/project/homing; Apache-2.0.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

    ids -> embedding -> norm -> + a part of the previous token ("smear") = x0
        -> [ a x + b x0 -> x + attention(norm x) -> x + relu(up(norm x))^2 down ] per layer
        -> - a part of the middle layer's x ("backout") -> norm -> head, with logits soft-capped to +-15

Computes the same logits as homing's trainer. There is no KV cache: generation reads the whole text again for each new
token. Rows of different lengths must be padded on the right; padding on the left would shift positions and is rejected.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_homing_swift import HomingSwiftConfig

SOFTCAP = 15.0
SHARPNESS = 1.2
MOST_VALUE = 3.0
VALUE_GATE_CHANNELS = 12
SMEAR_GATE_CHANNELS = 24


def norm(x, eps):
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class SwiftAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=False)
        # Every second layer has value embeddings, counted so that the last layer has them.
        self.has_values = layer % 2 == (config.num_hidden_layers - 1) % 2
        if self.has_values:
            self.value_embed = nn.Embedding(config.vocab_size, kv_width)
            self.value_gate = nn.Linear(VALUE_GATE_CHANNELS, self.num_kv_heads, bias=False)

    def forward(self, x, ids, cos, sin):
        B, T, _ = x.shape
        heads = (B, T, -1, self.head_dim)
        q, k, v = (proj(x).view(heads).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate(norm(part, self.eps) * SHARPNESS, cos, sin) for part in (q, k))
        if self.has_values:
            gate = MOST_VALUE * torch.sigmoid(self.value_gate(x[..., :VALUE_GATE_CHANNELS]))
            learned = self.value_embed(ids).view(B, T, self.num_kv_heads, self.head_dim) * gate.unsqueeze(-1)
            v = v + learned.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class ReluSquared(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.relu(self.up_proj(x)).square())


class SwiftBlock(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.self_attn = SwiftAttention(config, layer)
        self.mlp = ReluSquared(config)

    def forward(self, x, first, keep, add, ids, cos, sin):
        x = keep * x + add * first
        x = x + self.self_attn(norm(x, self.eps), ids, cos, sin)
        return x + self.mlp(norm(x, self.eps))


class SwiftStack(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.smear_gate = nn.Linear(SMEAR_GATE_CHANNELS, 1, bias=False)
        self.smear_scale = nn.Parameter(torch.empty(1))
        self.keep_scales = nn.Parameter(torch.empty(config.num_hidden_layers))
        self.first_scales = nn.Parameter(torch.empty(config.num_hidden_layers))
        self.backout_scale = nn.Parameter(torch.empty(1))
        self.layers = nn.ModuleList(SwiftBlock(config, layer) for layer in range(config.num_hidden_layers))

    def forward(self, ids):
        eps = self.config.rms_norm_eps
        x = norm(self.embed_tokens(ids), eps)
        before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
        x = x + self.smear_scale * torch.sigmoid(self.smear_gate(x[..., :SMEAR_GATE_CHANNELS])) * before
        cos, sin = self.angles(ids.shape[1], x.device)
        first = middle = x
        for number, block in enumerate(self.layers):
            x = block(x, first, self.keep_scales[number], self.first_scales[number], ids, cos, sin)
            if number == len(self.layers) // 2:
                middle = x
        return norm(x - self.backout_scale * middle, eps)

    def angles(self, length, device):
        # Compute the angles on each call, because loading would discard a buffer that is not in the file. Use float64
        # on the CPU, because not every device supports float64.
        size = self.config.head_dim
        frequency = self.config.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size)
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequency)
        return angle.cos().float().to(device), angle.sin().float().to(device)


class HomingSwiftForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = HomingSwiftConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.model = SwiftStack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.lm_head

    def _init_weights(self, module):
        """Do nothing: only homing initializes new models, and transformers loads the weights of existing ones."""

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
            raise ValueError("This model supports padding on the right only: set tokenizer.padding_side = 'right'.")
        logits = self.lm_head(self.model(input_ids)).float()
        logits = SOFTCAP * torch.tanh(logits / SOFTCAP)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
