"""Autograd functions around the Triton kernels that compute parts of a block on CUDA.

    swiglu(gate_up)      silu(gate) * up                      rotate(qkv, ...) norm and RoPE of queries and keys
    sum_norm(x, y, ...)  x + y, and the norm of this sum

Each op is opaque to torch.compile, which optimizes everything around it and calls the op unchanged. `has_kernels`
returns whether the ops can be used. If not, callers use an equivalent in plain torch.

Shapes: N tokens, H query heads, G KV heads, K head size, F feed-forward width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["HAS_TRITON", "has_kernels", "opaque", "rotate", "sum_norm", "swiglu"]

_LIBRARY = torch.library.Library("homing", "DEF")


def opaque(name: str, *, like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an op that torch.compile treats as opaque. `like` returns empty outputs of the right shape and dtype.

    At every call, torch's own decorator checks gradients, mutated arguments and aliasing on the host, which slows down
    small batches. Our ops are called from autograd functions that make these checks unnecessary, so they are registered
    directly. An op must not mutate its arguments or return one of them.
    """

    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        schema = name + torch.library.infer_schema(compute, mutates_args=())
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"homing::{name}", like, lib=_LIBRARY)
        op: Callable[..., Any] = getattr(torch.ops.homing, name).default
        return op

    return register


HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_kernels(x: Tensor, head_size: int = 2) -> bool:
    """Return whether the kernels can be used for `x`: they need CUDA, bf16 and a head size that is a power of two."""
    return x.is_cuda and x.dtype == torch.bfloat16 and head_size & (head_size - 1) == 0 and HAS_TRITON


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up: (..., 2F) -> (..., F)."""
    return _SwiGLU.apply(gate_up)


def sum_norm(x: Tensor, y: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + y and its RMS norm times the weight, both (..., D)."""
    return _SumNorm.apply(x, y, weight_D, eps)


def rotate(
    qkv_BTC: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights_2K: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    has_norm: bool,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the joint projection into (B, H, T, K) queries and (B, G, T, K) keys and values, with RoPE applied.

    With `has_norm`, queries and keys are normalized per head, and multiplied by the norm weights if there are any.
    """
    return _Rotate.apply(qkv_BTC, cos, sin, weights_2K, num_heads, num_kv_heads, has_norm, scale, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _swiglu_backward(gate_up, dy)


def _swiglu_like(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@opaque("swiglu", like=_swiglu_like)
def _swiglu(gate_up: Tensor) -> Tensor:
    from homing.lm.model.kernels import row_ops as kernel  # Triton is installed only with CUDA

    y = kernel.swiglu(_rows(gate_up))
    return y.view(*gate_up.shape[:-1], -1)


def _swiglu_backward_like(gate_up: Tensor, dy: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


@opaque("swiglu_backward", like=_swiglu_backward_like)
def _swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    from homing.lm.model.kernels import row_ops as kernel

    return kernel.swiglu_backward(_rows(gate_up), _rows(dy)).view(gate_up.shape)


class _SumNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, normed = _sum_norm(x, y, weight_D, eps)
        ctx.save_for_backward(total, weight_D)
        ctx.eps = eps
        return total, normed

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, dnormed: Tensor) -> tuple[Tensor | None, ...]:
        total, weight_D = ctx.saved_tensors
        dx, dweight_D = _sum_norm_backward(total, dtotal, dnormed, weight_D, ctx.eps)
        dweight = dweight_D.to(weight_D.dtype) if ctx.needs_input_grad[2] else None
        return dx, dx, dweight, None


def _sum_norm_like(x: Tensor, y: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@opaque("sum_norm", like=_sum_norm_like)
def _sum_norm(x: Tensor, y: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from homing.lm.model.kernels import row_ops as kernel

    total, normed = kernel.sum_norm(_rows(x), _rows(y), weight_D.contiguous(), eps)
    return total.view(x.shape), normed.view(x.shape)


def _sum_norm_backward_like(
    total: Tensor, dtotal: Tensor, dnormed: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight_D.new_empty(weight_D.shape, dtype=torch.float32)


@opaque("sum_norm_backward", like=_sum_norm_backward_like)
def _sum_norm_backward(
    total: Tensor, dtotal: Tensor, dnormed: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    from homing.lm.model.kernels import row_ops as kernel

    dx, dweight_D = kernel.sum_norm_backward(_rows(total), _rows(dtotal), _rows(dnormed), weight_D.contiguous(), eps)
    return dx.view(total.shape), dweight_D


class _Rotate(torch.autograd.Function):
    """Applies norm and RoPE to queries and keys.

    Values pass through unchanged; they are included so that the backward pass writes all three gradients to one buffer.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv_BTC: Tensor, cos: Tensor, sin: Tensor, weights_2K: Tensor | None, num_heads: int,
        num_kv_heads: int, has_norm: bool, scale: float, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        B, T, _ = qkv_BTC.shape
        size = 2 * cos.shape[-1]
        q, k = _rotate(qkv_BTC, cos, sin, weights_2K, num_heads, num_kv_heads, has_norm, scale, eps)
        v = qkv_BTC[..., (num_heads + num_kv_heads) * size :].view(B, T, num_kv_heads, size)
        # The backward pass needs the values of qkv only for the norm.
        ctx.save_for_backward(qkv_BTC, cos, sin, weights_2K)
        ctx.norm = (has_norm, scale, eps)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv_BTC, cos, sin, weights_2K = ctx.saved_tensors
        dqkv, dweights = _rotate_backward(
            qkv_BTC, dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), cos, sin, weights_2K, *ctx.norm
        )
        dweights = None if weights_2K is None else dweights.to(weights_2K.dtype)
        return dqkv, None, None, dweights, None, None, None, None, None


def _rotate_like(
    qkv_BTC: Tensor, cos: Tensor, sin: Tensor, weights_2K: Tensor | None, num_heads: int, num_kv_heads: int,
    has_norm: bool, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, T, size = qkv_BTC.shape[0], qkv_BTC.shape[1], 2 * cos.shape[-1]
    return qkv_BTC.new_empty(B, T, num_heads, size), qkv_BTC.new_empty(B, T, num_kv_heads, size)


@opaque("rotate", like=_rotate_like)
def _rotate(
    qkv_BTC: Tensor, cos: Tensor, sin: Tensor, weights_2K: Tensor | None, num_heads: int, num_kv_heads: int,
    has_norm: bool, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from homing.lm.model.kernels import rope as kernel

    B, T, _ = qkv_BTC.shape
    weights = None if weights_2K is None else weights_2K.contiguous()
    q, k = kernel.rotate(_rows(qkv_BTC), _rows(cos), _rows(sin), weights, num_heads, num_kv_heads, has_norm, scale, eps)
    return q.view(B, T, *q.shape[1:]), k.view(B, T, *k.shape[1:])


def _rotate_backward_like(
    qkv_BTC: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, weights_2K: Tensor | None,
    has_norm: bool, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return qkv_BTC.new_empty(qkv_BTC.shape), cos.new_empty(2, 2 * cos.shape[-1])


@opaque("rotate_backward", like=_rotate_backward_like)
def _rotate_backward(
    qkv_BTC: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, weights_2K: Tensor | None,
    has_norm: bool, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from homing.lm.model.kernels import rope as kernel

    # Attention may return gradients head by head, but the kernel needs all heads of a token to be adjacent.
    dq, dk, dv = (d.flatten(0, 1).contiguous() for d in (dq, dk, dv))
    weights = None if weights_2K is None else weights_2K.contiguous()
    dqkv, dweights = kernel.rotate_backward(
        _rows(qkv_BTC), dq, dk, dv, _rows(cos), _rows(sin), weights, has_norm, scale, eps
    )
    return dqkv.view(qkv_BTC.shape), dweights


def _rows(x: Tensor) -> Tensor:
    """Reshape to contiguous (N, D).

    `reshape` alone may return a view with a different memory order, which a kernel would misread.
    """
    return x.reshape(-1, x.shape[-1]).contiguous()
