"""Matrix products in FP8. Each operand has one scale, chosen so that the operand's largest value just fits.

    y = x W^T        x and W in e4m3 (finer), with fast accumulation
    dx, dW           the gradient in e5m2 (wider range), the other operand in e4m3, with exact accumulation

The kernels need multiples of 16 in all dimensions, so rows are padded with zeros where necessary, and the padding is
cut off again. Tensors saved for the backward pass are FP8 too, half the size of bf16. Scales are recomputed for every
tensor. So no state carries over between steps, and a resumed run gives the same results as an uninterrupted one.

Shapes: N rows, D inputs, F outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from homing.lm.model.fused_ops import opaque

__all__ = ["fp8_product", "takes_fp8"]

_LEAST_SIZE = 128  # minimum size of a dimension; smaller matrix products are no faster in FP8
_MULTIPLE = 16  # FP8 matmul kernels require every dimension to be a multiple of this number
_FINE, _WIDE = torch.float8_e4m3fn, torch.float8_e5m2


def takes_fp8(num_in: int, num_out: int) -> bool:
    """Return whether a matmul with these dimensions is possible in FP8, and large enough to be faster."""
    return min(num_in, num_out) >= _LEAST_SIZE and num_in % _MULTIPLE == 0 and num_out % _MULTIPLE == 0


def fp8_product(x: Tensor, weight_FD: Tensor) -> Tensor:
    """Return x W^T in the dtype of x. The last dimension of x is D; W may be fp32 master weights."""
    return _Fp8Product.apply(x, weight_FD)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FD: Tensor) -> Tensor:
        y, *saved = _product(x, weight_FD)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return _product_backward(dy, *ctx.saved_tensors)


def _fp8_product_like(x: Tensor, weight_FD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    F, D = weight_FD.shape
    N = x.numel() // D
    N += -N % _MULTIPLE
    scale = torch.empty((), device=x.device, dtype=torch.float32)
    x8_DN, w8_DF = x.new_empty(D, N, dtype=_FINE), x.new_empty(D, F, dtype=_FINE)
    return x.new_empty(*x.shape[:-1], F), x8_DN, scale, w8_DF, torch.empty_like(scale)


@opaque("fp8_product", like=_fp8_product_like)
def _product(x: Tensor, weight_FD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y and, for the backward pass, x and W in FP8, transposed, each with its scale."""
    from homing.lm.model.kernels.number_formats import cast_both_ways  # Triton is installed only with CUDA

    x8_ND, x8_DN, x_scale = cast_both_ways(_padded_rows(x), _FINE)
    w8_FD, w8_DF, w_scale = cast_both_ways(weight_FD.contiguous(), _FINE)
    y_NF = torch._scaled_mm(x8_ND, w8_FD.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=x.dtype, use_fast_accum=True)
    return _cut_rows(y_NF, x), x8_DN, x_scale, w8_DF, w_scale


def _fp8_product_backward_like(
    dy: Tensor, x8_DN: Tensor, x_scale: Tensor, w8_DF: Tensor, w_scale: Tensor
) -> tuple[Tensor, Tensor]:
    D, F = w8_DF.shape
    return dy.new_empty(*dy.shape[:-1], D), dy.new_empty(F, D, dtype=torch.float32)


@opaque("fp8_product_backward", like=_fp8_product_backward_like)
def _product_backward(
    dy: Tensor, x8_DN: Tensor, x_scale: Tensor, w8_DF: Tensor, w_scale: Tensor
) -> tuple[Tensor, Tensor]:
    from homing.lm.model.kernels.number_formats import cast_both_ways

    dy8_NF, dy8_FN, dy_scale = cast_both_ways(_padded_rows(dy), _WIDE)
    dx_ND = torch._scaled_mm(
        dy8_NF, w8_DF.t(), scale_a=dy_scale, scale_b=w_scale, out_dtype=dy.dtype, use_fast_accum=False
    )
    dw_FD = torch._scaled_mm(
        dy8_FN, x8_DN.t(), scale_a=dy_scale, scale_b=x_scale, out_dtype=torch.float32, use_fast_accum=False
    )
    return _cut_rows(dx_ND, dy), dw_FD


def _padded_rows(x: Tensor) -> Tensor:
    """Reshape (..., D) to contiguous (N, D) with N padded to a multiple of 16."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    padding = -len(rows) % _MULTIPLE
    return torch.nn.functional.pad(rows, (0, 0, 0, padding)) if padding else rows


def _cut_rows(y_NF: Tensor, like: Tensor) -> Tensor:
    num_rows = like.numel() // like.shape[-1]
    return y_NF[:num_rows].view(*like.shape[:-1], -1)
