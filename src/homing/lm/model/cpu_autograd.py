"""RMSNorm and RoPE with hand-written gradients, for training on a CPU.

On a CPU memory traffic dominates, and autograd's own version causes twice as much.

    normed(x, weight, eps)   x / rms(x) * weight            rotated(x, cos, sin) rotary position embedding

Each equals the plain form next to its caller, which is used when compiling and on every other device; tests compare the
two.

Shapes: N any leading dimensions, D width, K head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["has_manual_backward", "normed", "rotated"]


def has_manual_backward(x: Tensor) -> bool:
    """Return whether to use these: training on a CPU in fp32, not compiling.

    A compiler finds the same savings itself.
    """
    is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and torch.is_grad_enabled()
    return is_plain and not torch.compiler.is_compiling()


def normed(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _Normed.apply(x, weight_D, eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Turned.apply(x, cos, sin)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        inverse_N1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, inverse_N1)
        return torch.mul(x, inverse_N1).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """With u = x / rms: dx = (g - u mean(g u)) / rms, where g = dy * weight."""
        x, weight_D, inverse_N1 = ctx.saved_tensors
        along = torch.mul(x, inverse_N1)
        product = dy * along
        dweight_D = product.flatten(0, -2).sum(0)
        mean_N1 = (product.flatten(0, -2) @ weight_D).view(inverse_N1.shape).div_(-x.shape[-1])
        dx = torch.mul(dy, weight_D, out=product).addcmul_(along, mean_N1).mul_(inverse_N1)
        return dx, dweight_D, None


class _Turned(torch.autograd.Function):
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

    Operates on whole heads, because half of a small head is too short to vectorize.
    """
    left, right = x.chunk(2, dim=-1)
    swapped = torch.cat((right, left), dim=-1)
    return swapped.mul_(torch.cat((-sin, sin), dim=-1)).addcmul_(x, torch.cat((cos, cos), dim=-1))
