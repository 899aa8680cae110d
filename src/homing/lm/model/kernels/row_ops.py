"""Kernels that work on one row of a matrix at a time: residual add with RMSNorm, SwiGLU, and cross-entropy.

    sum_norm         x, y (N, D) -> sum = x + y, normed = sum / rms(sum) * weight
    swiglu           gate_up (N, 2F) -> silu(gate) * up (N, F)
    differentiate_   logits (N, V) -> losses (N), and (softmax - one hot) / count, which overwrites the logits

A separate norm kernel would have to read the sum that the addition has just written, and a third kernel would add the
gradients of norm and residual stream. Here every element is read and written once. The gradient of SwiGLU has the
layout that the joint projection before it needs, so nothing is concatenated. Cross-entropy is written for logits that a
matmul has just produced in bf16. One program per row reads its row twice, the second time from the cache, and computes
in fp32. Nothing as wide as the vocabulary is ever stored in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homing.lm.model.kernels import check, launching

__all__ = ["differentiate_", "sum_norm", "sum_norm_backward", "swiglu", "swiglu_backward"]

_PROGRAMS = 1024  # number of partial sums of the weight's gradient in the norm's backward pass
_SWIGLU_COLS = 1024  # number of columns that a program processes
_IGNORED = tl.constexpr(-100)  # target value for tokens that are excluded from the loss
_LOSS_COLS = 4096  # number of columns of logits that a program reads at a time
_LOSS_WARPS = 8


def sum_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    _check_rows(weight, x, y)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    with launching(x=x, y=y, weight=weight):
        _norm_forward[(num_rows,)](x, y, weight, total, normed, width, eps, BLOCK=block, num_warps=4)
    return total, normed


def sum_norm_backward(
    total: Tensor, dtotal: Tensor, dnormed: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    num_rows, width = total.shape
    _check_rows(weight, total, dtotal, dnormed)
    dx = torch.empty_like(total)
    num_programs = min(_PROGRAMS, num_rows)
    partial = torch.empty(num_programs, width, device=total.device, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    with launching(total=total, dtotal=dtotal, dnormed=dnormed, weight=weight):
        _norm_backward[(num_programs,)](
            total, dtotal, dnormed, weight, dx, partial, num_rows, width, eps, triton.cdiv(num_rows, num_programs),
            BLOCK=block, num_warps=8 if block >= 2048 else 4,
        )  # fmt: skip
    return dx, partial.sum(0)


def _check_rows(weight: Tensor, first: Tensor, *others: Tensor) -> None:
    is_right = all(other.shape == first.shape for other in others) and weight.shape == first.shape[1:]
    check(is_right, f"weight {tuple(weight.shape)}, rows {[tuple(rows.shape) for rows in (first, *others)]}")


@triton.jit
def _norm_forward(x_ptr, y_ptr, weight_ptr, total_ptr, normed_ptr, width, eps, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    is_there = cols < width
    at = tl.program_id(0).to(tl.int64) * width + cols
    total = tl.load(x_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    total += tl.load(y_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    # Round the sum to the stored dtype first, so that the forward pass uses the same values as the backward pass.
    total = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + at, total, mask=is_there)
    total = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    weight = tl.load(weight_ptr + cols, mask=is_there, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, total * inverse * weight, mask=is_there)


@triton.jit
def _norm_backward(
    total_ptr, dtotal_ptr, dnormed_ptr, weight_ptr, dx_ptr, partial_ptr, num_rows, width, eps, rows_each,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(rows_each):
        row = program * rows_each + number
        is_there = cols < tl.where(row < num_rows, width, 0)
        at = row * width + cols
        total = tl.load(total_ptr + at, mask=is_there, other=0.0).to(tl.float32)
        dnormed = tl.load(dnormed_ptr + at, mask=is_there, other=0.0).to(tl.float32)
        dx = tl.load(dtotal_ptr + at, mask=is_there, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
        total *= inverse
        dweight += dnormed * total
        dnormed *= weight
        along = tl.sum(dnormed * total, axis=0) / width
        tl.store(dx_ptr + at, dx + inverse * (dnormed - total * along), mask=is_there)
    tl.store(partial_ptr + program * width + cols, dweight, mask=cols < width)


def swiglu(gate_up: Tensor) -> Tensor:
    check(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"gate_up is {tuple(gate_up.shape)}, not (N, 2F)")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(num_rows, width, device=gate_up.device, dtype=gate_up.dtype)
    with launching(gate_up=gate_up):
        _swiglu_forward[(num_rows, triton.cdiv(width, _SWIGLU_COLS))](gate_up, y, width, BLOCK=_SWIGLU_COLS)
    return y


def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    num_rows, width = dy.shape
    check(gate_up.shape == (num_rows, 2 * width), f"gate_up is {tuple(gate_up.shape)}, dy {tuple(dy.shape)}")
    out = torch.empty_like(gate_up)
    with launching(gate_up=gate_up, dy=dy):
        _swiglu_backward[(num_rows, triton.cdiv(width, _SWIGLU_COLS))](gate_up, dy, out, width, BLOCK=_SWIGLU_COLS)
    return out


@triton.jit
def _swiglu_forward(gate_up_ptr, y_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(gate_up_ptr + row * 2 * width + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + cols, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def _swiglu_backward(gate_up_ptr, dy_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    at = row * 2 * width + cols
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + width, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(out_ptr + at, dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), mask=mask)
    tl.store(out_ptr + at + width, dy * gate * sigmoid, mask=mask)


def differentiate_(logits_nP: Tensor, targets_n: Tensor, count: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """Return the loss of each row; overwrite the logits with the gradient of the mean loss (0 in padding columns)."""
    num_rows, num_cols = logits_nP.shape
    check(logits_nP.stride(1) == 1, f"logits have strides {logits_nP.stride()}: a row must be contiguous")
    check(targets_n.shape == (num_rows,), f"{tuple(targets_n.shape)} targets for {num_rows} rows")
    check(not targets_n.dtype.is_floating_point and count.numel() == 1, "expected integer targets and a single count")
    check(vocab_size <= num_cols, f"{num_cols} columns for a vocabulary of {vocab_size}")
    check(logits_nP.device == targets_n.device, f"logits on {logits_nP.device}, targets on {targets_n.device}")
    losses_n = torch.empty(num_rows, device=logits_nP.device, dtype=torch.float32)
    with launching(targets=targets_n, count=count):
        _cross_entropy[(num_rows,)](
            logits_nP, targets_n, losses_n, count, logits_nP.stride(0), vocab_size, num_cols, softcap or 1.0,
            HAS_CAP=bool(softcap), BLOCK=_LOSS_COLS, num_warps=_LOSS_WARPS,
        )  # fmt: skip
    return losses_n


@triton.jit
def _softcapped(x, softcap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)  # tanh
    return x


@triton.jit
def _cross_entropy(
    logits_ptr, targets_ptr, losses_ptr, count_ptr, row_stride, vocab_size, num_cols, softcap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row)
    is_kept = target != _IGNORED
    # Read the target's logit before the first reduction: the reduction's barrier ensures that this read happens before
    # the writes below.
    at_target = _softcapped(tl.load(row_ptr + tl.where(is_kept, target, 0)).to(tl.float32), softcap, HAS_CAP)

    largest = -float("inf")
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _softcapped(tl.load(row_ptr + cols, mask=cols < vocab_size, other=0.0).to(tl.float32), softcap, HAS_CAP)
        x = tl.where(cols < vocab_size, x, -float("inf"))
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    log_sum = largest + tl.log(total)
    tl.store(losses_ptr + row, tl.where(is_kept, log_sum - at_target, 0.0))

    scale = tl.where(is_kept, 1.0 / tl.load(count_ptr), 0.0)
    for start in range(0, num_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _softcapped(tl.load(row_ptr + cols, mask=cols < vocab_size, other=0.0).to(tl.float32), softcap, HAS_CAP)
        gradient = (tl.exp(x - log_sum) - tl.where(cols == target, 1.0, 0.0)) * scale
        if HAS_CAP:
            gradient *= 1.0 - (x / softcap) * (x / softcap)
        gradient = tl.where(cols < vocab_size, gradient, 0.0)
        tl.store(row_ptr + cols, gradient.to(logits_ptr.dtype.element_ty), mask=cols < num_cols)
