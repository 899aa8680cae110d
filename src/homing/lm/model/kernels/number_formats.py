"""Conversions to and from small number formats, each in one pass over memory.

cast_both_ways   x (N, D) -> largest magnitude -> FP8: x8 (N, D), x8 transposed (D, N), and the factor that
                 restores x; FP8 matmuls need both operands contiguous along K
dequantize_nf4   packed byte -> two of the 16 quantiles, each times (quantized scale of the block * scale of
                 the super-block + offset); reads 4 bits per weight and writes 16 or 32
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homing.lm.model.kernels import check, launching

__all__ = ["cast_both_ways", "dequantize_nf4"]

_TILE = 64
_CHUNK = 4096
_BYTES = 1024  # number of bytes of NF4 weights that one Triton program handles


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
    # The atomic maximum is deterministic, because the result does not depend on the order in which programs run.
    tl.atomic_max(largest_ptr, tl.max(most, axis=0))


@triton.jit
def _cast(x_ptr, largest_ptr, x8_ptr, x8_t_ptr, inverse_ptr, num_rows, num_cols, most, TILE: tl.constexpr):
    largest = tl.maximum(tl.load(largest_ptr), 1e-12)
    scale = most / largest
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (rows[:, None] < num_rows) & (cols[None, :] < num_cols)
    x = tl.load(x_ptr + rows[:, None] * num_cols + cols[None, :], mask=mask, other=0.0).to(tl.float32) * scale
    # After scaling, the largest input becomes the largest FP8 number. NaN is written explicitly (0x7F in both FP8
    # types), because not every conversion preserves it.
    bits = tl.where(x != x, 0x7F, x.to(x8_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)).to(tl.uint8)
    x8 = bits.to(x8_ptr.dtype.element_ty, bitcast=True)
    tl.store(x8_ptr + rows[:, None] * num_cols + cols[None, :], x8, mask=mask)
    mask_t = (cols[:, None] < num_cols) & (rows[None, :] < num_rows)
    tl.store(x8_t_ptr + cols[:, None] * num_rows + rows[None, :], tl.trans(x8), mask=mask_t)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse_ptr, largest / most)


def dequantize_nf4(
    packed: Tensor, scales: Tensor, super_scales: Tensor, offset: Tensor, code: Tensor, steps: Tensor,
    dtype: torch.dtype, *, block: int, super_block: int,
) -> Tensor:  # fmt: skip
    num_bytes = packed.numel()
    is_right = (packed.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    is_right &= all(table.dtype == torch.float32 for table in (super_scales, offset, code, steps))
    check(is_right, "packed weights and scales are not uint8, or the tables are not fp32")
    check(scales.numel() * block >= 2 * num_bytes, f"{scales.numel()} scales for {2 * num_bytes} weights")
    check(super_scales.numel() * super_block >= scales.numel(), f"{super_scales.numel()} scales of scales")
    out = torch.empty(2 * num_bytes, device=packed.device, dtype=dtype)
    parts = {"packed": packed, "scales": scales, "super_scales": super_scales, "offset": offset}
    with launching(**parts, code=code, steps=steps):
        _dequantize[(triton.cdiv(num_bytes, _BYTES),)](
            packed, scales, super_scales, offset, code, steps, out, num_bytes,
            BLOCK=block, SUPER_BLOCK=super_block, BYTES=_BYTES, num_warps=4,
            # Round after the multiplication and after the addition, as plain torch does: a fused multiply-add would
            # differ in the last bit.
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _dequantize(
    packed_ptr, scales_ptr, super_scales_ptr, offset_ptr, code_ptr, steps_ptr, out_ptr, num_bytes,
    BLOCK: tl.constexpr, SUPER_BLOCK: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    mask = at < num_bytes
    byte = tl.load(packed_ptr + at, mask=mask, other=0).to(tl.int32)
    block = (2 * at) // BLOCK
    step = tl.load(scales_ptr + block, mask=mask, other=0).to(tl.int32)
    magnitude = tl.load(steps_ptr + step) * tl.load(super_scales_ptr + block // SUPER_BLOCK, mask=mask, other=0.0)
    magnitude += tl.load(offset_ptr)
    # Table lookups are cheap here: the tables are small and stay in the L1 cache.
    first = tl.load(code_ptr + (byte >> 4)) * magnitude
    second = tl.load(code_ptr + (byte & 15)) * magnitude
    # Interleave the results in the order they have in memory, so that a warp writes a contiguous range.
    pair = tl.interleave(first, second)
    to = tl.program_id(0).to(tl.int64) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + to, pair.to(out_ptr.dtype.element_ty), mask=to < 2 * num_bytes)
