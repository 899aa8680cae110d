"""Norm and turn with gradients written by hand, for training on a CPU: there memory is what takes time, and autograd's
own way goes over it twice as often.

    normed(x, weight, eps)   x / rms(x) * weight            turned(x, cos, sin)   rotary positions

Each equals the plain form beside its caller, which compilers and everything but the CPU use; tests compare the two.

Shapes: N any leading sides, D width, K head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["is_by_hand", "normed", "turned"]


def is_by_hand(x: Tensor) -> bool:
    """In training on a CPU, in fp32; a compiler finds the same savings by itself."""
    is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and torch.is_grad_enabled()
    return is_plain and not torch.compiler.is_compiling()


def normed(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _Normed.apply(x, weight_D, eps)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(dy, cos, -sin), None, None  # what was turned is turned back


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (its halves changed over) (-sin, sin): over whole heads, as half of a small one is too short a row."""
    left, right = x.chunk(2, dim=-1)
    swapped = torch.cat((right, left), dim=-1)
    return swapped.mul_(torch.cat((-sin, sin), dim=-1)).addcmul_(x, torch.cat((cos, cos), dim=-1))
