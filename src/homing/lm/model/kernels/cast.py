"""Casts a matrix to FP8, both as it is and transposed, in one pass: FP8 matmuls need both operands contiguous along K.

x (N, D) -> largest magnitude -> x8 (N, D), x8 transposed (D, N), and the factor that restores x
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homing.lm.model.kernels.layout_checks import check, launching

__all__ = ["cast_both_ways"]

_TILE = 64
_CHUNK = 4096


def cast_both_ways(x_ND: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    check(x_ND.dim() == 2, f"x is {tuple(x_ND.shape)}, not (N, D)")
    check(kind in (torch.float8_e4m3fn, torch.float8_e5m2), f"{kind} is not FP8")
    num_rows, num_cols = x_ND.shape
    largest = torch.zeros(1, device=x_ND.device, dtype=torch.float32)
    most = torch.finfo(kind).max
    x8 = torch.empty_like(x_ND, dtype=kind)
    x8_t = torch.empty(num_cols, num_rows, device=x_ND.device, dtype=kind)
    inverse = torch.empty(1, device=x_ND.device, dtype=torch.float32)
    grid = (triton.cdiv(num_rows, _TILE), triton.cdiv(num_cols, _TILE))
    with launching(x=x_ND):
        _largest[(triton.cdiv(x_ND.numel(), _CHUNK * 8),)](x_ND, largest, x_ND.numel(), CHUNK=_CHUNK, num_warps=8)
        _cast[grid](x_ND, largest, x8, x8_t, inverse, num_rows, num_cols, most, TILE=_TILE, num_warps=4)
    return x8, x8_t, inverse.squeeze(0)


@triton.jit
def _largest(x_ptr, largest_ptr, num, CHUNK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * CHUNK * 8
    most = tl.zeros([CHUNK], dtype=tl.float32)
    for part in range(8):
        at = start + part * CHUNK + tl.arange(0, CHUNK)
        most = tl.maximum(most, tl.abs(tl.load(x_ptr + at, mask=at < num, other=0.0).to(tl.float32)))
    # A maximum does not depend on the order in which programs run.
    tl.atomic_max(largest_ptr, tl.max(most, axis=0))


@triton.jit
def _cast(x_ptr, largest_ptr, x8_ptr, x8_t_ptr, inverse_ptr, num_rows, num_cols, most, TILE: tl.constexpr):
    largest = tl.maximum(tl.load(largest_ptr), 1e-12)
    scale = most / largest
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (rows[:, None] < num_rows) & (cols[None, :] < num_cols)
    x = tl.load(x_ptr + rows[:, None] * num_cols + cols[None, :], mask=mask, other=0.0).to(tl.float32) * scale
    # The largest value rounds to the largest that fits. NaN must survive, and not every conversion keeps it; 0x7F is
    # NaN in both types.
    bits = tl.where(x != x, 0x7F, x.to(x8_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)).to(tl.uint8)
    x8 = bits.to(x8_ptr.dtype.element_ty, bitcast=True)
    tl.store(x8_ptr + rows[:, None] * num_cols + cols[None, :], x8, mask=mask)
    mask_t = (cols[:, None] < num_cols) & (rows[None, :] < num_rows)
    tl.store(x8_t_ptr + cols[:, None] * num_rows + rows[None, :], tl.trans(x8), mask=mask_t)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse_ptr, largest / most)
