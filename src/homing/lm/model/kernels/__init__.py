"""Triton kernels for CUDA. They are not imported on other devices.

Each kernel has an equivalent in plain torch next to its caller, for use on other devices. Tests marked `gpu` compare
the two. A kernel receives only memory addresses. If a tensor's memory order or GPU differs from what the kernel
assumes, the kernel reads wrong numbers without raising an error. Therefore every launch checks its tensors:

    with launching(x=x, y=y):  _kernel[grid](x, y, ...)
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["check", "launching"]


def launching(**tensors: Tensor | None) -> contextlib.AbstractContextManager[Any]:
    """Raise ValueError unless all tensors are contiguous and on one device; return a context that selects it.

    This is necessary because Triton launches on the current GPU, even if the tensors are on another one.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    device = next(iter(given.values())).device
    for name, tensor in given.items():
        check(tensor.is_contiguous(), f"{name} is not contiguous: shape {tuple(tensor.shape)}, {tensor.stride()}")
        check(tensor.device == device, f"{name} is on {tensor.device} and not on {device}")
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check(is_right: bool, problem: str) -> None:
    """Raise ValueError if `is_right` is False.

    An `assert` is not enough: `python -O` removes it, and the kernel would silently compute wrong numbers.
    """
    if not is_right:
        raise ValueError(problem)
