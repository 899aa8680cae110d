"""Fused per-head RMSNorm and RoPE of queries and keys, reading the joint qkv projection.

    qkv (N, (H + 2G) K) -> q (N, H, K), k (N, G, K)        v is a view of qkv and needs no kernel
    backward: dq, dk, dv -> dqkv in one buffer, and the gradients of the weights of both norms

In the forward pass, one program handles one token with all its heads. In the backward pass, it handles some heads of
one kind (query, key or value), so that no lane is idle if the number of heads is not a power of two. The forward pass
would not be faster that way (docs/development/log.md).

The norm, if the model has one, is x / rms(x) * weight * `scale`. If it has no weights, they are treated as ones.

Shapes: N tokens, H query heads, G KV heads, K head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homing.lm.model.kernels import check, launching

__all__ = ["rotate", "rotate_backward"]

_WARPS = 4
# In the backward pass, each program runs _TURNS iterations and processes _ROWS heads in each.
_ROWS, _TURNS = 32, 8


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, weights: Tensor | None, num_heads: int, num_kv_heads: int,
    has_norm: bool, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and k.

    `weights` (2, K) are the norm weights of queries and keys. In `cos` and `sin` (R, K/2), token n has position n mod
    R.
    """
    num_tokens, size = qkv.shape[0], 2 * cos.shape[-1]
    _check_shapes(qkv, cos, sin, weights, num_heads, num_kv_heads)
    q = torch.empty(num_tokens, num_heads, size, device=qkv.device, dtype=qkv.dtype)
    k = torch.empty(num_tokens, num_kv_heads, size, device=qkv.device, dtype=qkv.dtype)
    with launching(qkv=qkv, cos=cos, sin=sin, weights=weights):
        _forward[(num_tokens,)](
            qkv, cos, sin, weights if weights is not None else cos, q, k, qkv.shape[1], cos.shape[0],
            num_heads, num_kv_heads, scale, eps, HALF=size // 2, HEADS=triton.next_power_of_2(num_heads + num_kv_heads),
            HAS_NORM=has_norm, HAS_WEIGHTS=weights is not None, num_warps=_WARPS,
        )  # fmt: skip
    return q, k


def rotate_backward(
    qkv: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, weights: Tensor | None,
    has_norm: bool, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dqkv, and the (2, K) gradients of the norm weights in fp32 (zeros if there are no weights)."""
    num_tokens, num_heads, size = dq.shape
    num_kv_heads = dk.shape[1]
    _check_shapes(qkv, cos, sin, weights, num_heads, num_kv_heads)
    is_right = dq.shape == (len(qkv), num_heads, 2 * cos.shape[-1]) and dk.shape == dv.shape == (
        *dq.shape[:1],
        num_kv_heads,
        size,
    )
    check(is_right, f"gradients of {[tuple(part.shape) for part in (dq, dk, dv)]} for {tuple(qkv.shape)}")
    dqkv = torch.empty_like(qkv)
    # The programs for the queries come first, then those for the keys, then those for the values.
    num_q, num_k = (triton.cdiv(num_tokens * heads, _ROWS * _TURNS) for heads in (num_heads, num_kv_heads))
    num_partial = num_q + num_k if weights is not None else 1
    partial = torch.empty(num_partial, size, device=qkv.device, dtype=torch.float32)
    with launching(qkv=qkv, dq=dq, dk=dk, dv=dv, cos=cos, sin=sin, weights=weights):
        _backward[(num_q + 2 * num_k,)](
            qkv, dq, dk, dv, cos, sin, weights if weights is not None else cos, dqkv, partial, num_tokens, qkv.shape[1],
            cos.shape[0], num_heads, num_kv_heads, num_q, num_k, scale, eps, HALF=size // 2, ROWS=_ROWS, TURNS=_TURNS,
            HAS_NORM=has_norm, HAS_WEIGHTS=weights is not None, num_warps=_WARPS,
        )  # fmt: skip
    if weights is None:
        return dqkv, torch.zeros(2, size, device=qkv.device)
    return dqkv, torch.stack((partial[:num_q].sum(0), partial[num_q:].sum(0)))


def _check_shapes(
    qkv: Tensor, cos: Tensor, sin: Tensor, weights: Tensor | None, num_heads: int, num_kv_heads: int
) -> None:
    size = 2 * cos.shape[-1]
    wanted = (len(qkv), (num_heads + 2 * num_kv_heads) * size)
    check(qkv.shape == wanted, f"qkv is {tuple(qkv.shape)}, not {wanted}")
    check(size & (size - 1) == 0, f"a head size of {size} is not a power of two")
    check(cos.dim() == 2 and cos.shape == sin.shape, f"cos is {tuple(cos.shape)}, sin {tuple(sin.shape)}")
    check(cos.dtype == sin.dtype == torch.float32, f"cos is {cos.dtype}, sin {sin.dtype}, not fp32")
    check(weights is None or weights.shape == (2, size), "weights are not (2, head size)")


@triton.jit
def _forward(
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
    rotated_left, rotated_right = left * cos - right * sin, right * cos + left * sin
    to_q = q_ptr + (token * num_heads + heads) * 2 * HALF + half
    tl.store(to_q, rotated_left, mask=is_query)
    tl.store(to_q + HALF, rotated_right, mask=is_query)
    to_k = k_ptr + (token * num_kv_heads + heads - num_heads) * 2 * HALF + half
    tl.store(to_k, rotated_left, mask=is_key)
    tl.store(to_k + HALF, rotated_right, mask=is_key)


@triton.jit
def _backward(
    qkv_ptr, dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, weights_ptr, dqkv_ptr, partial_ptr, num_tokens, row_width,
    num_positions, num_heads, num_kv_heads, num_q, num_k, scale, eps,
    HALF: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF)[None, :]
    if program < num_q + num_k:
        is_key = program >= num_q
        first_row = tl.where(is_key, program - num_q, program) * (ROWS * TURNS)
        heads = tl.where(is_key, num_kv_heads, num_heads)
        first_head = tl.where(is_key, num_heads, 0)
        if HAS_WEIGHTS:
            of = is_key.to(tl.int32) * 2 * HALF + half
            weight_left = tl.load(weights_ptr + of).to(tl.float32)
            weight_right = tl.load(weights_ptr + of + HALF).to(tl.float32)
            sum_left = tl.zeros([ROWS, HALF], dtype=tl.float32)
            sum_right = tl.zeros([ROWS, HALF], dtype=tl.float32)
        for number in range(TURNS):
            row = first_row + number * ROWS + tl.arange(0, ROWS)[:, None]
            token, head = row // heads, row % heads
            is_there = token < num_tokens
            from_dy = row * 2 * HALF + half
            if is_key:
                dy_left = tl.load(dk_ptr + from_dy, mask=is_there, other=0.0).to(tl.float32)
                dy_right = tl.load(dk_ptr + from_dy + HALF, mask=is_there, other=0.0).to(tl.float32)
            else:
                dy_left = tl.load(dq_ptr + from_dy, mask=is_there, other=0.0).to(tl.float32)
                dy_right = tl.load(dq_ptr + from_dy + HALF, mask=is_there, other=0.0).to(tl.float32)
            position = (token % num_positions) * HALF + half
            cos, sin = tl.load(cos_ptr + position), tl.load(sin_ptr + position)
            d_left, d_right = dy_left * cos + dy_right * sin, dy_right * cos - dy_left * sin
            at = token * row_width + (first_head + head) * 2 * HALF + half
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
        if HAS_WEIGHTS:
            to = partial_ptr + program * 2 * HALF + tl.arange(0, HALF)
            tl.store(to, scale * tl.sum(sum_left, axis=0))
            tl.store(to + HALF, scale * tl.sum(sum_right, axis=0))
    else:
        first_row = (program - num_q - num_k) * (ROWS * TURNS)
        for number in range(TURNS):
            row = first_row + number * ROWS + tl.arange(0, ROWS)[:, None]
            token, head = row // num_kv_heads, row % num_kv_heads
            is_there = token < num_tokens
            from_dy = dv_ptr + row * 2 * HALF + half
            to = dqkv_ptr + token * row_width + (num_heads + num_kv_heads + head) * 2 * HALF + half
            tl.store(to, tl.load(from_dy, mask=is_there, other=0.0), mask=is_there)
            tl.store(to + HALF, tl.load(from_dy + HALF, mask=is_there, other=0.0), mask=is_there)
