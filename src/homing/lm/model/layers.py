"""The small pieces of a block: Linear, RMSNorm, RoPE, SwiGLU.

Shapes: B batch, T positions, N tokens, D width, H heads, K head size, F feed-forward width.

Master weights stay fp32. A product is computed in the type of its input, so one cast of the embedding at the bottom
decides the precision of the whole model; there is no autocast to guess with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from homing.lm.model.by_hand import is_by_hand, normed, turned
from homing.lm.model.fp8 import fp8_product
from homing.lm.model.frozen import FrozenLinear, adapted_product
from homing.lm.model.fused import has_kernels, sum_norm, swiglu
from homing.wire.run import RopeScaling

__all__ = ["Embedding", "Linear", "RMSNorm", "Rope", "SwiGLU", "joined", "look_up", "rope_divisors"]


class Linear(nn.Module):
    """y = x W^T (+ b), with W cast to the type of x. Weights are left empty: `init` or `load_weights` fills them."""

    def __init__(self, num_in: int, num_out: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out)) if has_bias else None
        self.is_fp8 = False  # set by the decoder's set_precision

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fp8:
            return fp8_product(x, self.weight)
        bias = self.bias.to(x.dtype) if self.bias is not None else None
        return F.linear(x, self.weight.to(x.dtype), bias)


def joined(x: Tensor, *layers: Linear | FrozenLinear) -> Tensor:
    """x through several layers, their outputs side by side. In training the casts of the weights lie side by side too:
    a wide product fills a card better than narrow ones. Frozen weights are not copied for it: they may be most of what
    the card holds."""
    if isinstance(layers[0], FrozenLinear):
        frozen = [layer for layer in layers if isinstance(layer, FrozenLinear)]
        return adapted_product(x, [f.weight for f in frozen], [f.bias for f in frozen], [f.adapter for f in frozen])
    trained = [layer for layer in layers if isinstance(layer, Linear)]
    if all(layer.is_fp8 for layer in trained):  # together always: apart, each with a scale of its own, they round anew
        return fp8_product(x, torch.cat([layer.weight for layer in trained]))
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():  # `out` in columns breaks a compiled graph
        return _side_by_side(x, trained)
    biases = [layer.bias.to(x.dtype) for layer in trained if layer.bias is not None]
    bias = torch.cat(biases) if biases else None  # all of them have one, or none
    return F.linear(x, torch.cat([layer.weight.to(x.dtype) for layer in trained]), bias)


def _side_by_side(x: Tensor, layers: Sequence[Linear]) -> Tensor:
    """`joined` without gradients: each product writes its columns of one result. Copying the weights together would
    read and write all of them, and for a single new token the product itself does no more than read them."""
    x_ND, widths = x.reshape(-1, x.shape[-1]), [len(layer.weight) for layer in layers]
    y_NF = x.new_empty(len(x_ND), sum(widths))
    for layer, y_Nf in zip(layers, y_NF.split(widths, dim=1), strict=True):
        weight_Df = layer.weight.to(x.dtype).t()
        if layer.bias is None:
            torch.mm(x_ND, weight_Df, out=y_Nf)
        else:
            torch.addmm(layer.bias.to(x.dtype), x_ND, weight_Df, out=y_Nf)
    return y_NF.view(*x.shape[:-1], -1)


class Embedding(nn.Module):
    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))


def look_up(ids_BT: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    return F.embedding(ids_BT, weight_VD).to(dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight. The mean square is taken in fp32: squares of bf16 numbers lose what the norm is for."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if is_by_hand(x):
            return normed(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def of_sum(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y, and that normed: together they go over memory once."""
        if y is not None and has_kernels(x):
            return sum_norm(x, y, self.weight, self.eps)
        total = x if y is None else x + y
        return total, self(total)


class Rope(nn.Module):
    """Rotary positions, half-split as in Hugging Face: channel i turns with channel i + K/2."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, context: int, base: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        # In float64, then rounded once: at long contexts the angle needs the digits.
        frequency_K2 = base ** -(torch.arange(0, head_size, 2, dtype=torch.float64, device="cpu") / head_size)
        if scaling is not None:
            frequency_K2 = frequency_K2 / rope_divisors(frequency_K2, scaling)
        angle_TK2 = torch.outer(torch.arange(context, dtype=torch.float64, device="cpu"), frequency_K2)
        # Not in the state dict: they follow from the shape.
        self.register_buffer("cos", angle_TK2.cos().float(), persistent=False)
        self.register_buffer("sin", angle_TK2.sin().float(), persistent=False)

    def at(self, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        """cos and sin for these positions, shaped to meet (B, H, T, K/2); made once and used by every layer."""
        cos, sin = self.cos[positions], self.sin[positions]
        return (cos, sin) if cos.dim() == 2 else (cos.unsqueeze(1), sin.unsqueeze(1))

    @staticmethod
    def turn(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if is_by_hand(x_BHTK):
            return turned(x_BHTK, cos, sin)
        left, right = x_BHTK.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_BHTK.dtype)


def rope_divisors(frequency_K2: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: 1 for turns that come round often in the original context, `factor` for those that hardly do, and
    between the two borders a line from one frequency to the other."""
    turns_K2 = scaling.original_context * frequency_K2 / (2 * math.pi)
    fast = (turns_K2 - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    fast = fast.clamp(0.0, 1.0)
    return 1.0 / (fast + (1.0 - fast) / scaling.factor)


class SwiGLU(nn.Module):
    def __init__(self, width: int, ffn_width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, ffn_width)
        self.up_proj = Linear(width, ffn_width)
        self.down_proj = Linear(ffn_width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if has_kernels(x_BTD):
            return self.down_proj(swiglu(joined(x_BTD, self.gate_proj, self.up_proj)))
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
