"""Dequantizes NF4 to bf16 or fp32 in one pass: reads 4 bits per weight and writes 16, without intermediate results.

packed byte -> two of 16 quantiles, times (quantized scale of the block * scale of the super-block + offset)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homing.lm.model.kernels.layout_checks import check, launching

__all__ = ["dequantize"]

_BYTES = 1024  # per program


def dequantize(
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
            # Multiply and add are rounded separately: a fused multiply-add would differ in the last bit.
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
    # The tables are small and stay in the L1 cache.
    first = tl.load(code_ptr + (byte >> 4)) * magnitude
    second = tl.load(code_ptr + (byte & 15)) * magnitude
    # Interleaved as in memory, so that a warp writes a contiguous range.
    pair = tl.interleave(first, second)
    to = tl.program_id(0).to(tl.int64) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + to, pair.to(out_ptr.dtype.element_ty), mask=to < 2 * num_bytes)
