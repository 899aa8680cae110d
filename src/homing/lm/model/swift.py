"""The `swift` family: the best quality per dollar in short runs, but outside homing only transformers can load it.

    ids -> embedding -> norm -> + a part of the previous token's embedding ("smear") = x0
        -> [ a x + b x0 -> x + attention(norm x) -> x + relu(up(norm x))^2 down ] per layer, a and b learned
        -> - a part of the middle layer's x ("backout") -> norm -> head, with logits soft-capped to +-15

Differences from the `stock` family: norms have no weights; queries and keys are normalized and scaled up; in every
second layer, a gated vector that is learned for each vocabulary token ("value embedding") is added to the values. The
ideas are from modded-nanogpt and nanochat.

Shapes: B batch, T positions, D width, H query heads, G KV heads, K head size, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from homing.lm.model.attention import KVCache, attend
from homing.lm.model.fused_ops import has_kernels, rotate
from homing.lm.model.layers import Embedding, Linear, Rope, joined, look_up, recomputed
from homing.lm.model.model_shape import SMEAR_GATE_CHANNELS, VALUE_GATE_CHANNELS, has_value_embedding, padded_vocab
from homing.lm.model.sdpa import Isolation
from homing.wire.run_json import Model

__all__ = ["SHARPNESS", "SOFTCAP", "SwiftStack"]

SOFTCAP = 15.0
SHARPNESS = 1.2  # factor by which queries and keys are scaled after their norm
MOST_VALUE = 3.0  # maximum of the value embeddings' gate; the minimum is 0


class SwiftAttention(nn.Module):
    def __init__(self, shape: Model, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_size, self.eps = shape.head_size, shape.norm_eps
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        q_width, kv_width = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = Linear(shape.width, q_width)
        self.k_proj = Linear(shape.width, kv_width)
        self.v_proj = Linear(shape.width, kv_width)
        self.o_proj = Linear(q_width, shape.width)
        self.has_values = has_value_embedding(shape, layer)
        if self.has_values:
            self.value_embed = Embedding(padded_vocab(shape), kv_width)
            self.value_gate = Linear(VALUE_GATE_CHANNELS, shape.num_kv_heads)

    def forward(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, values_BTC: Tensor | None, cache: KVCache | None,
        mask: Any = None,
    ) -> Tensor:  # fmt: skip
        B, T, _ = x_BTD.shape
        q_BHTK, k_BGTK, v_BGTK = self._heads(x_BTD, cos, sin)
        if values_BTC is not None:
            gate_BTG = MOST_VALUE * torch.sigmoid(self.value_gate(x_BTD[..., :VALUE_GATE_CHANNELS]))
            learned = values_BTC.view(B, T, self.num_kv_heads, self.head_size) * gate_BTG.unsqueeze(-1)
            v_BGTK = v_BGTK + learned.transpose(1, 2)
        y_BHTK = attend(q_BHTK, k_BGTK, v_BGTK, self.layer, cache, mask)
        return self.o_proj(y_BHTK.transpose(1, 2).reshape(B, T, -1))

    def _heads(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if has_kernels(x_BTD, self.head_size):
            return rotate(
                joined(x_BTD, self.q_proj, self.k_proj, self.v_proj), cos, sin, None, num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads, has_norm=True, scale=SHARPNESS, eps=self.eps,
            )  # fmt: skip
        B, T, _ = x_BTD.shape
        heads = (B, T, -1, self.head_size)
        q, k, v = (proj(x_BTD).view(heads).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (F.rms_norm(part, (self.head_size,), eps=self.eps) * SHARPNESS for part in (q, k))
        return Rope.rotate(q, cos, sin), Rope.rotate(k, cos, sin), v


class ReluSquared(nn.Module):
    def __init__(self, width: int, ffn_width: int) -> None:
        super().__init__()
        self.up_proj = Linear(width, ffn_width)
        self.down_proj = Linear(ffn_width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x_BTD)).square())


class SwiftBlock(nn.Module):
    def __init__(self, shape: Model, layer: int) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.self_attn = SwiftAttention(shape, layer)
        self.mlp = ReluSquared(shape.width, shape.ffn_width)

    def forward(
        self, run: Callable[..., Tensor], look: Callable[..., Tensor], ids_BT: Tensor, x_BTD: Tensor, *given: Any
    ) -> Tensor:
        """Return `compute(x, *given)` with this layer's value embeddings; `run` and `look` may be compiled.

        Only calling the module runs its hooks, with which FSDP gathers the block's weights (see decoder.Block).
        """
        values = self.self_attn.value_embed(ids_BT, x_BTD.dtype, look) if self.self_attn.has_values else None
        return run(self, x_BTD, values, *given)

    def compute(
        self, x_BTD: Tensor, values_BTC: Tensor | None, first_BTD: Tensor, keep: Tensor, add: Tensor,
        cos: Tensor, sin: Tensor, cache: KVCache | None, mask: Any = None,
    ) -> Tensor:  # fmt: skip
        x_BTD = keep.to(x_BTD.dtype) * x_BTD + add.to(x_BTD.dtype) * first_BTD
        x_BTD = x_BTD + self.self_attn(_norm(x_BTD, self.eps), cos, sin, values_BTC, cache, mask)
        return x_BTD + self.mlp(_norm(x_BTD, self.eps))


class SwiftStack(nn.Module):
    """The `swift` decoder without its output head."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = Embedding(padded_vocab(shape), shape.width)
        self.smear_gate = Linear(SMEAR_GATE_CHANNELS, 1)
        self.smear_scale = nn.Parameter(torch.empty(1))
        self.keep_scales = nn.Parameter(torch.empty(shape.num_layers))
        self.first_scales = nn.Parameter(torch.empty(shape.num_layers))
        self.backout_scale = nn.Parameter(torch.empty(1))
        self.layers = nn.ModuleList(SwiftBlock(shape, layer) for layer in range(shape.num_layers))
        self.rope = Rope(shape.head_size, shape.context, shape.rope_base)
        # name -> compiled function, used only in training (see Decoder.compile_blocks)
        self.compiled: dict[str, Callable[..., Tensor]] = {}
        self.recompute_every = 0  # every n-th block is recomputed, in training only (see Decoder.set_recompute)

    def forward(
        self, ids_BT: Tensor, positions: Tensor | slice, cache: KVCache | None, compute_dtype: torch.dtype,
        isolation: Isolation | None = None,
    ) -> Tensor:  # fmt: skip
        compiled = self.compiled if torch.is_grad_enabled() and cache is None else {}
        run, look = compiled.get("block", SwiftBlock.compute), compiled.get("look_up", look_up)
        begin, end = compiled.get("begin", SwiftStack.begin), compiled.get("end", SwiftStack.end)
        is_start_BT, mask = (isolation.is_start_BT, isolation.mask) if isolation else (None, None)
        first = begin(self, self.embed_tokens(ids_BT, compute_dtype, look), cache, is_start_BT)
        cos, sin = self.rope.at(positions)
        x_BTD = middle = first
        every = self.recompute_every if torch.is_grad_enabled() and cache is None else 0
        scales = zip(self.keep_scales.unbind(), self.first_scales.unbind(), strict=True)
        for layer, (block, (keep, add)) in enumerate(zip(self.blocks(), scales, strict=True)):
            run_this = recomputed(run, layer, every)
            x_BTD = block(run_this, look, ids_BT, x_BTD, first, keep, add, cos, sin, cache, mask)
            if layer == self.shape.num_layers // 2:
                middle = x_BTD
        return end(self, x_BTD, middle)

    def blocks(self) -> list[SwiftBlock]:
        return [block for block in self.layers if isinstance(block, SwiftBlock)]

    def begin(self, x_BTD: Tensor, cache: KVCache | None, is_start_BT: Tensor | None = None) -> Tensor:
        """Return each token's normalized embedding, plus part of the previous token's if both are in one segment."""
        x_BTD = _norm(x_BTD, self.shape.norm_eps)
        before = cache.embedded_B1D if cache is not None else None
        if before is None:
            before = torch.zeros_like(x_BTD[:, :1])
        if cache is not None:
            cache.embedded_B1D = x_BTD[:, -1:]
        shifted = torch.cat((before, x_BTD[:, :-1]), dim=1)
        if is_start_BT is not None:
            shifted = shifted.masked_fill(is_start_BT.unsqueeze(-1), 0.0)
        gate_BT1 = self.smear_scale.to(x_BTD.dtype) * torch.sigmoid(self.smear_gate(x_BTD[..., :SMEAR_GATE_CHANNELS]))
        return x_BTD + gate_BT1 * shifted

    def end(self, x_BTD: Tensor, middle_BTD: Tensor) -> Tensor:
        return _norm(x_BTD - self.backout_scale.to(x_BTD.dtype) * middle_BTD, self.shape.norm_eps)


def _norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=eps)
