"""Fused residual add and RMSNorm, forward and backward.

    x, y (N, D) -> sum = x + y, normed = sum / rms(sum) * weight
    backward: sum, the gradients of both -> the one gradient of x and of y, and the weight's

A separate norm would read again what the addition has just written, and a third pass would add its gradient to that of
the residual stream. Here every element is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homing.lm.model.kernels.layout_checks import check, launching

__all__ = ["sum_norm", "sum_norm_backward"]

_PROGRAMS = 1024  # in backward: rows of partial sums of the weight's gradient


def sum_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    _check_shapes(weight, x, y)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    with launching(x=x, y=y, weight=weight):
        _forward[(num_rows,)](x, y, weight, total, normed, width, eps, BLOCK=block, num_warps=4)
    return total, normed


def sum_norm_backward(
    total: Tensor, dtotal: Tensor, dnormed: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    num_rows, width = total.shape
    _check_shapes(weight, total, dtotal, dnormed)
    dx = torch.empty_like(total)
    num_programs = min(_PROGRAMS, num_rows)
    partial = torch.empty(num_programs, width, device=total.device, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    with launching(total=total, dtotal=dtotal, dnormed=dnormed, weight=weight):
        _backward[(num_programs,)](
            total, dtotal, dnormed, weight, dx, partial, num_rows, width, eps, triton.cdiv(num_rows, num_programs),
            BLOCK=block, num_warps=8 if block >= 2048 else 4,
        )  # fmt: skip
    return dx, partial.sum(0)


def _check_shapes(weight: Tensor, first: Tensor, *others: Tensor) -> None:
    is_right = all(other.shape == first.shape for other in others) and weight.shape == first.shape[1:]
    check(is_right, f"weight {tuple(weight.shape)}, rows {[tuple(rows.shape) for rows in (first, *others)]}")


@triton.jit
def _forward(x_ptr, y_ptr, weight_ptr, total_ptr, normed_ptr, width, eps, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    is_there = cols < width
    at = tl.program_id(0).to(tl.int64) * width + cols
    total = tl.load(x_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    total += tl.load(y_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    total = total.to(total_ptr.dtype.element_ty)  # rounded as it is stored, so that backward sees the same values
    tl.store(total_ptr + at, total, mask=is_there)
    total = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    weight = tl.load(weight_ptr + cols, mask=is_there, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, total * inverse * weight, mask=is_there)


@triton.jit
def _backward(
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
