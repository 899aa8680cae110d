"""SwiGLU: silu(gate) * up from one buffer that holds both halves, and its gradient into one such buffer.

    gate_up (N, 2F) -> (N, F)          backward: gate_up, dy (N, F) -> (N, 2F)

The gradient has the layout that the joint projection before it needs, so nothing is concatenated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homing.lm.model.kernels.layout_checks import check, launching

__all__ = ["swiglu", "swiglu_backward"]

_BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    check(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"gate_up is {tuple(gate_up.shape)}, not (N, 2F)")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(num_rows, width, device=gate_up.device, dtype=gate_up.dtype)
    with launching(gate_up=gate_up):
        _forward[(num_rows, triton.cdiv(width, _BLOCK))](gate_up, y, width, BLOCK=_BLOCK)
    return y


def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    num_rows, width = dy.shape
    check(gate_up.shape == (num_rows, 2 * width), f"gate_up is {tuple(gate_up.shape)}, dy {tuple(dy.shape)}")
    out = torch.empty_like(gate_up)
    with launching(gate_up=gate_up, dy=dy):
        _backward[(num_rows, triton.cdiv(width, _BLOCK))](gate_up, dy, out, width, BLOCK=_BLOCK)
    return out


@triton.jit
def _forward(gate_up_ptr, y_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(gate_up_ptr + row * 2 * width + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + cols, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def _backward(gate_up_ptr, dy_ptr, out_ptr, width, BLOCK: tl.constexpr):
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
