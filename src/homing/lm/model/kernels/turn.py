"""Queries and keys out of the joined projection: normed per head where the model does so, and turned by position.

    qkv (N, (H + 2G) K) -> q (N, H, K), k (N, G, K)        v is a view of qkv and needs no kernel
    backward: dq, dk, dv -> dqkv, in one buffer, with the gradients of the two norms' weights

One program takes some tokens with all their heads. The norm is x / rms(x) * weight * `scale`; without weights these are
ones. Shapes: N tokens, H query heads, G KV heads, K head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["turn", "turn_backward"]

_TOKENS = 16  # of one program, in backward: so many share one row of partial sums
_WARPS = 4


def turn(
    qkv: Tensor, cos: Tensor, sin: Tensor, weights: Tensor | None, num_heads: int, num_kv_heads: int,
    has_norm: bool, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`weights` (2, K): of the queries' norm and the keys'. `cos`, `sin` (R, K/2): token n has position n mod R."""
    num_tokens, size = qkv.shape[0], 2 * cos.shape[-1]
    q = torch.empty(num_tokens, num_heads, size, device=qkv.device, dtype=qkv.dtype)
    k = torch.empty(num_tokens, num_kv_heads, size, device=qkv.device, dtype=qkv.dtype)
    _forward[(num_tokens,)](
        qkv, cos, sin, weights if weights is not None else cos, q, k, qkv.shape[1], cos.shape[0],
        num_heads, num_kv_heads, scale, eps, HALF=size // 2, HEADS=triton.next_power_of_2(num_heads + num_kv_heads),
        HAS_NORM=has_norm, HAS_WEIGHTS=weights is not None, num_warps=_WARPS,
    )  # fmt: skip
    return q, k


def turn_backward(
    qkv: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, weights: Tensor | None,
    has_norm: bool, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dqkv, and (2, K) gradients of the norms' weights in fp32 (zeros without weights)."""
    num_tokens, num_heads, size = dq.shape
    num_kv_heads = dk.shape[1]
    dqkv = torch.empty_like(qkv)
    num_programs = triton.cdiv(num_tokens, _TOKENS)
    partial = torch.zeros(num_programs if weights is not None else 1, 2, size, device=qkv.device, dtype=torch.float32)
    _backward[(num_programs,)](
        qkv, dq, dk, dv, cos, sin, weights if weights is not None else cos, dqkv, partial, num_tokens, qkv.shape[1],
        cos.shape[0], num_heads, num_kv_heads, scale, eps, HALF=size // 2,
        HEADS=triton.next_power_of_2(num_heads + num_kv_heads), VALUES=triton.next_power_of_2(num_kv_heads * size),
        HAS_NORM=has_norm, HAS_WEIGHTS=weights is not None, TOKENS=_TOKENS, num_warps=_WARPS,
    )  # fmt: skip
    return dqkv, partial.sum(0)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, weights_ptr, q_ptr, k_ptr, row_width, num_positions, num_heads, num_kv_heads, scale, eps,
    HALF: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    is_query, is_key = heads < num_heads, (heads >= num_heads) & (heads < num_heads + num_kv_heads)
    is_there = heads < num_heads + num_kv_heads
    at = qkv_ptr + token * row_width + heads * 2 * HALF + half
    left = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean_square = tl.sum(left * left + right * right, axis=1)[:, None] / (2 * HALF)
        factor = scale * tl.rsqrt(mean_square + eps)
        left *= factor
        right *= factor
        if HAS_WEIGHTS:
            of = tl.where(is_query, 0, 1) * 2 * HALF + half
            left *= tl.load(weights_ptr + of).to(tl.float32)
            right *= tl.load(weights_ptr + of + HALF).to(tl.float32)
    position = (token % num_positions) * HALF + half
    cos, sin = tl.load(cos_ptr + position), tl.load(sin_ptr + position)
    turned_left, turned_right = left * cos - right * sin, right * cos + left * sin
    to_q = q_ptr + (token * num_heads + heads) * 2 * HALF + half
    tl.store(to_q, turned_left, mask=is_query)
    tl.store(to_q + HALF, turned_right, mask=is_query)
    to_k = k_ptr + (token * num_kv_heads + heads - num_heads) * 2 * HALF + half
    tl.store(to_k, turned_left, mask=is_key)
    tl.store(to_k + HALF, turned_right, mask=is_key)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    qkv_ptr, dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, weights_ptr, dqkv_ptr, partial_ptr, num_tokens, row_width,
    num_positions, num_heads, num_kv_heads, scale, eps,
    HALF: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    is_query, is_key = heads < num_heads, (heads >= num_heads) & (heads < num_heads + num_kv_heads)
    is_there = heads < num_heads + num_kv_heads
    value = tl.arange(0, VALUES)
    num_values = num_kv_heads * 2 * HALF
    if HAS_WEIGHTS:
        of = tl.where(is_query, 0, 1) * 2 * HALF + half
        weight_left = tl.load(weights_ptr + of).to(tl.float32)
        weight_right = tl.load(weights_ptr + of + HALF).to(tl.float32)
        sum_left = tl.zeros([HEADS, HALF], dtype=tl.float32)
        sum_right = tl.zeros([HEADS, HALF], dtype=tl.float32)
    for number in range(TOKENS):
        token = program * TOKENS + number
        if token < num_tokens:
            from_q = dq_ptr + (token * num_heads + heads) * 2 * HALF + half
            from_k = dk_ptr + (token * num_kv_heads + heads - num_heads) * 2 * HALF + half
            dy_left = tl.load(from_q, mask=is_query, other=0.0).to(tl.float32)
            dy_left += tl.load(from_k, mask=is_key, other=0.0).to(tl.float32)
            dy_right = tl.load(from_q + HALF, mask=is_query, other=0.0).to(tl.float32)
            dy_right += tl.load(from_k + HALF, mask=is_key, other=0.0).to(tl.float32)
            position = (token % num_positions) * HALF + half
            cos, sin = tl.load(cos_ptr + position), tl.load(sin_ptr + position)
            d_left, d_right = dy_left * cos + dy_right * sin, dy_right * cos - dy_left * sin
            at = token * row_width + heads * 2 * HALF + half
            if HAS_NORM:
                left = tl.load(qkv_ptr + at, mask=is_there, other=0.0).to(tl.float32)
                right = tl.load(qkv_ptr + at + HALF, mask=is_there, other=0.0).to(tl.float32)
                inverse = tl.rsqrt(tl.sum(left * left + right * right, axis=1)[:, None] / (2 * HALF) + eps)
                left *= inverse
                right *= inverse
                if HAS_WEIGHTS:
                    sum_left += d_left * left
                    sum_right += d_right * right
                    d_left *= weight_left
                    d_right *= weight_right
                along = tl.sum(d_left * left + d_right * right, axis=1)[:, None] / (2 * HALF)
                d_left = scale * inverse * (d_left - left * along)
                d_right = scale * inverse * (d_right - right * along)
            tl.store(dqkv_ptr + at, d_left, mask=is_there)
            tl.store(dqkv_ptr + at + HALF, d_right, mask=is_there)
            dv = tl.load(dv_ptr + token * num_values + value, mask=value < num_values, other=0.0)
            to_v = dqkv_ptr + token * row_width + (num_heads + num_kv_heads) * 2 * HALF + value
            tl.store(to_v, dv, mask=value < num_values)
    if HAS_WEIGHTS:
        to = partial_ptr + program * 4 * HALF + tl.arange(0, HALF)
        tl.store(to, scale * tl.sum(tl.where(is_query, sum_left, 0.0), axis=0))
        tl.store(to + HALF, scale * tl.sum(tl.where(is_query, sum_right, 0.0), axis=0))
        tl.store(to + 2 * HALF, scale * tl.sum(tl.where(is_key, sum_left, 0.0), axis=0))
        tl.store(to + 3 * HALF, scale * tl.sum(tl.where(is_key, sum_right, 0.0), axis=0))
