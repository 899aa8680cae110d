"""Building blocks of a layer: Linear, Embedding, RMSNorm, RoPE, SwiGLU, and activation checkpointing.

Shapes: B batch, T positions, N tokens or any leading dimensions, D width, H heads, K head size, F feed-forward width.

Master weights stay fp32. A matmul is computed in the dtype of its input, so casting the embedding output sets the
precision of the whole model; there is no autocast.

For training on a CPU, RMSNorm and RoPE have hand-written gradients: memory traffic dominates there, and autograd's
gradients cause twice as much traffic. Other devices and the compiler use autograd. Tests compare the two.

Activation checkpointing recomputes a block's activations in the backward pass instead of keeping them:

    none   every block keeps what its backward pass needs
    half   every second block keeps only its input: about half of the memory, a sixth more compute
    all    every block keeps only its input: least memory, a third more compute (half more if weights are frozen)

The second forward pass is bit-identical to the first, so gradients do not change. No random generator needs to be
rewound, because blocks use only stateless generators (see `frozen_linear` on dropout).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from homing.lm.model.fp8 import fp8_product
from homing.lm.model.frozen_linear import FrozenLinear, adapted_product
from homing.lm.model.fused_ops import has_kernels, sum_norm, swiglu
from homing.wire.run_json import RopeScaling

__all__ = [
    "RECOMPUTES",
    "Embedding",
    "Linear",
    "RMSNorm",
    "Rope",
    "SwiGLU",
    "has_manual_backward",
    "is_recomputed",
    "joined",
    "look_up",
    "normed",
    "recomputed",
    "rope_divisors",
    "rotated",
]


class Linear(nn.Module):
    """Computes y = x W^T (+ b), with W cast to the dtype of x.

    W is uninitialized until `init_weights` or `load_weights` fills it.
    """

    def __init__(self, num_in: int, num_out: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out)) if has_bias else None
        self.is_fp8 = False  # whether to compute in FP8; set by Decoder.set_precision

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fp8:
            return fp8_product(x, self.weight)
        bias = self.bias.to(x.dtype) if self.bias is not None else None
        return F.linear(x, self.weight.to(x.dtype), bias)


def joined(x: Tensor, *layers: Linear | FrozenLinear) -> Tensor:
    """Apply several layers to x; return their outputs concatenated.

    In training the cast weights are concatenated too, because one wide matmul uses a GPU better than several narrow
    ones. Frozen weights are never copied for this, because they may take up most of the GPU's memory.
    """
    if isinstance(layers[0], FrozenLinear):
        frozen = [layer for layer in layers if isinstance(layer, FrozenLinear)]
        return adapted_product(x, [f.weight for f in frozen], [f.bias for f in frozen], [f.adapter for f in frozen])
    trained = [layer for layer in layers if isinstance(layer, Linear)]
    # In FP8, always compute the layers jointly: if computed separately, each layer would have its own scale and be
    # rounded differently.
    if all(layer.is_fp8 for layer in trained):
        return fp8_product(x, torch.cat([layer.weight for layer in trained]))
    # `_side_by_side` writes into columns of a tensor with `out=`, which would break a compiled graph.
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _side_by_side(x, trained)
    biases = [layer.bias.to(x.dtype) for layer in trained if layer.bias is not None]
    bias = torch.cat(biases) if biases else None  # either all layers have a bias, or none of them does
    return F.linear(x, torch.cat([layer.weight.to(x.dtype) for layer in trained]), bias)


def _side_by_side(x: Tensor, layers: Sequence[Linear]) -> Tensor:
    """Compute the result of `joined` without gradients: one matmul per layer, each writing its columns of the result.

    The weights are not concatenated first. Concatenating would read and write all of them, whereas the matmuls for a
    single new token only need to read each weight once.
    """
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

    def forward(self, ids_BT: Tensor, dtype: torch.dtype, look: Callable[..., Tensor] | None = None) -> Tensor:
        """Return the rows of these ids in `dtype`. `look` is `look_up` or its compiled version."""
        return (look or look_up)(ids_BT, self.weight, dtype)


def look_up(ids_BT: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    return F.embedding(ids_BT, weight_VD).to(dtype)


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight, with the mean square in fp32, because bf16 is too imprecise for it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if has_manual_backward(x):
            return normed(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def of_sum(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + y and the norm of this sum, in one fused kernel if possible, so that memory is read once."""
        if y is not None and has_kernels(x):
            return sum_norm(x, y, self.weight, self.eps)
        total = x if y is None else x + y
        return total, self(total)


class Rope(nn.Module):
    """Rotary position embedding, half-split as in Hugging Face: channel i is rotated with channel i + K/2."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, context: int, base: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        # Compute the angles in float64 and round them once, because long contexts need the precision.
        frequency_K2 = base ** -(torch.arange(0, head_size, 2, dtype=torch.float64, device="cpu") / head_size)
        if scaling is not None:
            frequency_K2 = frequency_K2 / rope_divisors(frequency_K2, scaling)
        angle_TK2 = torch.outer(torch.arange(context, dtype=torch.float64, device="cpu"), frequency_K2)
        # cos and sin are not stored in the state dict, because they can be computed from the model's shape.
        self.register_buffer("cos", angle_TK2.cos().float(), persistent=False)
        self.register_buffer("sin", angle_TK2.sin().float(), persistent=False)

    def at(self, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return cos and sin for these positions, broadcastable to (B, H, T, K/2). All layers use the same values."""
        cos, sin = self.cos[positions], self.sin[positions]
        return (cos, sin) if cos.dim() == 2 else (cos.unsqueeze(1), sin.unsqueeze(1))

    @staticmethod
    def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if has_manual_backward(x_BHTK):
            return rotated(x_BHTK, cos, sin)
        left, right = x_BHTK.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_BHTK.dtype)


def rope_divisors(frequency_K2: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the numbers by which Llama 3.1 divides the RoPE frequencies to extend the context.

    The divisor is 1 for frequencies that complete many rotations within the original context, and `factor` for those
    that hardly rotate. In between, the frequencies are interpolated.
    """
    rotations_K2 = scaling.original_context * frequency_K2 / (2 * math.pi)
    fast = (rotations_K2 - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
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


# -- hand-written gradients --------------------------------------------------------------------------------------------


def has_manual_backward(x: Tensor) -> bool:
    """Return whether to use the hand-written gradients, as in fp32 training on a CPU without the compiler.

    With the compiler they are unnecessary, because the code it generates avoids the extra memory traffic anyway.
    """
    is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and torch.is_grad_enabled()
    return is_plain and not torch.compiler.is_compiling()


def normed(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _Normed.apply(x, weight_D, eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Rotated.apply(x, cos, sin)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        inverse_N1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, inverse_N1)
        return torch.mul(x, inverse_N1).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx = (g - u mean(g u)) / rms, where u = x / rms and g = dy * weight."""
        x, weight_D, inverse_N1 = ctx.saved_tensors
        along = torch.mul(x, inverse_N1)
        product = dy * along
        dweight_D = product.flatten(0, -2).sum(0)
        mean_N1 = (product.flatten(0, -2) @ weight_D).view(inverse_N1.shape).div_(-x.shape[-1])
        dx = torch.mul(dy, weight_D, out=product).addcmul_(along, mean_N1).mul_(inverse_N1)
        return dx, dweight_D, None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, -sin), None, None  # the inverse rotation


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x cos + swap_halves(x) (-sin, sin).

    The operations work on whole heads, because half of a small head is too short to vectorize.
    """
    left, right = x.chunk(2, dim=-1)
    swapped = torch.cat((right, left), dim=-1)
    return swapped.mul_(torch.cat((-sin, sin), dim=-1)).addcmul_(x, torch.cat((cos, cos), dim=-1))


# name of the mode -> n, where every n-th block is recomputed (0: no block)
RECOMPUTES = {"none": 0, "half": 2, "all": 1}


def is_recomputed(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def recomputed(run: Callable[..., Any], number: int, every: int) -> Callable[..., Any]:
    """Return `run`; if block `number` is to be recomputed, wrap it so that the backward pass runs it a second time."""
    if not is_recomputed(number, every):
        return run
    return functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
