"""NF4: a matrix in four bits per weight, compatible with bitsandbytes (QLoRA, arXiv:2305.14314).

    64 weights -> their largest magnitude, and each as the nearest of 16 quantiles of a normal distribution
    256 of those magnitudes, minus the mean of all -> their own largest magnitude, and each as one of 256 levels
    together 4 + 8/64 + 32/(64 * 256) = 4.127 bits per weight

`quantize` uses plain torch on any device. It runs once, matrix by matrix, so that a bf16 model is never in memory as a
whole. `dequantize` runs in every matmul, as one Triton kernel on CUDA and elsewhere in plain torch, with the same
results. `dequantize_path` returns the name of the one in use, for the log.

Shapes: n weights, b = n / 64 blocks, s = b / 256 super-blocks, both rounded up.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from homing.errors import DataError
from homing.lm.model.fused_ops import HAS_TRITON

__all__ = ["BLOCK", "NF4_CODE", "SUPER_BLOCK", "Nf4", "dequantize", "dequantize_path", "dynamic_map", "quantize"]

BLOCK = 64
SUPER_BLOCK = 256
# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
NF4_CODE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_LEAST = 1e-38  # minimum divisor of a block, so that a block of zeros stays zero


class Nf4(NamedTuple):
    packed: Tensor  # uint8 (n / 2): two weights per byte, the first one in the upper four bits
    scales: Tensor  # uint8 (b): magnitude of each block, as an index into the dynamic map
    super_scales: Tensor  # fp32 (s)
    offset: Tensor  # fp32 (): the mean magnitude of all blocks

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self)


@torch.no_grad()
def quantize(weight: Tensor) -> Nf4:
    """Quantize a matrix of any float type.

    Raises DataError for NaN or infinity, which would corrupt its whole block.
    """
    flat_n = weight.reshape(-1).float()
    assert len(flat_n) % 2 == 0, f"two weights share a byte, and there are {len(flat_n)}"
    scaled_n, magnitudes_b = _scale(flat_n, BLOCK)
    if not torch.isfinite(magnitudes_b).all():
        raise DataError(
            what="Weights with NaN or infinite values cannot be quantized.",
            why=f"A matrix of shape {tuple(weight.shape)} contains such values.",
            fix="Use other weights, or set method: lora, which does not quantize them.",
        )
    indices_n = torch.bucketize(scaled_n, _midpoints(code(flat_n.device)), out_int32=True).to(torch.uint8)
    packed = (indices_n[::2] << 4) | indices_n[1::2]
    offset = magnitudes_b.mean()
    scales, super_scales = quantize_blocks(magnitudes_b - offset, SUPER_BLOCK, is_signed=True)
    return Nf4(packed, scales, super_scales, offset)


def dequantize(parts: Nf4, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if parts.packed.is_cuda and HAS_TRITON:
        from homing.lm.model.kernels.number_formats import dequantize_nf4  # Triton is installed only with CUDA

        step, table = dynamic_map(is_signed=True, device=parts.packed.device), code(parts.packed.device)
        held = Nf4(*(part.contiguous() for part in parts))
        return dequantize_nf4(*held, table, step, dtype, block=BLOCK, super_block=SUPER_BLOCK).view(shape)
    magnitudes_b = dequantize_blocks(parts.scales, parts.super_scales, SUPER_BLOCK, is_signed=True) + parts.offset
    indices_n = torch.stack([parts.packed >> 4, parts.packed & 15], dim=1).view(-1).int()
    values_n = code(parts.packed.device)[indices_n]
    return _times(values_n, magnitudes_b, BLOCK).to(dtype).view(shape)


def dequantize_path(device: torch.device) -> str:
    if device.type == "cuda":
        return "a Triton kernel" if HAS_TRITON else "plain torch (slower; Triton is not installed)"
    return "plain torch"


# -- 8-bit block-wise quantization, for the magnitudes here and for AdamW's moments ------------------------------------


def quantize_blocks(flat_n: Tensor, block: int, *, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize fp32 numbers to uint8; return the uint8 numbers and the largest magnitude of each block."""
    scaled_n, magnitudes_b = _scale(flat_n, block)
    table = dynamic_map(is_signed=is_signed, device=flat_n.device)
    return torch.bucketize(scaled_n, _midpoints(table), out_int32=True).to(torch.uint8), magnitudes_b


def dequantize_blocks(indices_n: Tensor, magnitudes_b: Tensor, block: int, *, is_signed: bool) -> Tensor:
    table = dynamic_map(is_signed=is_signed, device=indices_n.device)
    return _times(table[indices_n.int()], magnitudes_b, block)


@functools.cache
def dynamic_map(*, is_signed: bool, device: torch.device) -> Tensor:
    """Return the 256 quantization levels from -1 (or 0) to 1, finer towards zero.

    The levels span seven decades, each with twice as many levels as the one below it ("8-Bit Approximations for
    Parallelism in Deep Learning", arXiv:1511.04561). 0 and 1 are included exactly.
    """
    steps = [0.0, 1.0]
    for decade in range(7):
        num = 2**decade if is_signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, num + 1, dtype=torch.float32, device="cpu")
        # Compute the midpoints in fp32, to match bitsandbytes exactly.
        middles = (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        steps += [*middles, *(-middle for middle in middles)] if is_signed else middles
    return torch.tensor(sorted(steps), dtype=torch.float32, device="cpu").to(device)


@functools.cache
def code(device: torch.device) -> Tensor:
    return torch.tensor(NF4_CODE, dtype=torch.float32, device="cpu").to(device)


def _midpoints(table: Tensor) -> Tensor:
    return (table[:-1] + table[1:]) / 2


def _scale(flat_n: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Divide every number by the largest magnitude of its block; return the quotients and these magnitudes.

    The last block may be shorter than the others.
    """
    padding = -len(flat_n) % block
    blocks = torch.nn.functional.pad(flat_n, (0, padding)).view(-1, block)
    magnitudes_b = blocks.abs().amax(dim=1)
    # Multiply by the inverse instead of dividing, to get the same rounding as bitsandbytes even halfway between levels.
    inverse = 1.0 / magnitudes_b.clamp(min=_LEAST)
    return (blocks * inverse.unsqueeze(1)).clamp(-1.0, 1.0).view(-1)[: len(flat_n)], magnitudes_b


def _times(values_n: Tensor, magnitudes_b: Tensor, block: int) -> Tensor:
    padding = -len(values_n) % block
    if padding:
        return values_n * magnitudes_b.repeat_interleave(block)[: len(values_n)]
    return (values_n.view(-1, block) * magnitudes_b.unsqueeze(1)).view(-1)
