"""Cross-entropy as one Triton kernel: replaces a row of logits by its gradient and returns its loss.

    row of logits -> maximum and sum of exponentials -> loss -> (softmax - one hot) / count over the same memory

Written for logits that a matmul has just produced in bf16: one program per row reads it twice, the second time from the
cache, and computes in fp32. Nothing as wide as the vocabulary is ever stored in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homing.lm.model.kernels.layout_checks import check, launching

__all__ = ["differentiate_"]

_IGNORED = tl.constexpr(-100)
_BLOCK = 4096
_WARPS = 8


def differentiate_(logits_nP: Tensor, targets_n: Tensor, count: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """Return the loss of each row, and overwrite `logits_nP` with d mean loss / d logits, zero in padding columns."""
    num_rows, num_cols = logits_nP.shape
    check(logits_nP.stride(1) == 1, f"logits have strides {logits_nP.stride()}: a row must be contiguous")
    check(targets_n.shape == (num_rows,), f"{tuple(targets_n.shape)} targets for {num_rows} rows")
    check(not targets_n.dtype.is_floating_point and count.numel() == 1, "targets are no integers, or not one count")
    check(vocab_size <= num_cols, f"{num_cols} columns for a vocabulary of {vocab_size}")
    check(logits_nP.device == targets_n.device, f"logits on {logits_nP.device}, targets on {targets_n.device}")
    losses_n = torch.empty(num_rows, device=logits_nP.device, dtype=torch.float32)
    with launching(targets=targets_n, count=count):
        _kernel[(num_rows,)](
            logits_nP, targets_n, losses_n, count, logits_nP.stride(0), vocab_size, num_cols, softcap or 1.0,
            HAS_CAP=bool(softcap), BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return losses_n


@triton.jit
def _capped(x, softcap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)  # tanh
    return x


@triton.jit
def _kernel(
    logits_ptr, targets_ptr, losses_ptr, count_ptr, row_stride, vocab_size, num_cols, softcap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row)
    is_kept = target != _IGNORED
    # Read before the first reduction: its barrier orders this read before the writes below.
    at_target = _capped(tl.load(row_ptr + tl.where(is_kept, target, 0)).to(tl.float32), softcap, HAS_CAP)

    largest = -float("inf")
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _capped(tl.load(row_ptr + cols, mask=cols < vocab_size, other=0.0).to(tl.float32), softcap, HAS_CAP)
        x = tl.where(cols < vocab_size, x, -float("inf"))
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    log_sum = largest + tl.log(total)
    tl.store(losses_ptr + row, tl.where(is_kept, log_sum - at_target, 0.0))

    scale = tl.where(is_kept, 1.0 / tl.load(count_ptr), 0.0)
    for start in range(0, num_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _capped(tl.load(row_ptr + cols, mask=cols < vocab_size, other=0.0).to(tl.float32), softcap, HAS_CAP)
        gradient = (tl.exp(x - log_sum) - tl.where(cols == target, 1.0, 0.0)) * scale
        if HAS_CAP:
            gradient *= 1.0 - (x / softcap) * (x / softcap)
        gradient = tl.where(cols < vocab_size, gradient, 0.0)
        tl.store(row_ptr + cols, gradient.to(logits_ptr.dtype.element_ty), mask=cols < num_cols)
