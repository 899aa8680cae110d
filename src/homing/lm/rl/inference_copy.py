"""A read-only second copy of the weights, in the compute dtype, for sampling.

A sampling step reads every weight for one token per row; fp32 weights would be twice as much to read, and cast each
time. The numbers are the same, because each weight would be cast when it is used.
"""

from __future__ import annotations

import torch
from torch import nn

from homing.lm.model import Decoder

__all__ = ["copy_weights", "lean_copy"]


def lean_copy(model: Decoder, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):  # unused fp32 weights would take twice the memory
        copy = Decoder(model.shape)
    for module in copy.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty_like(parameter, device=model.device, dtype=dtype)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
    copy.model.rope.to(model.device)
    copy.compute_dtype = dtype
    copy_weights(model, copy)
    return copy.eval()


@torch.no_grad()
def copy_weights(model: Decoder, copy: Decoder) -> None:
    for mine, source in zip(copy.parameters(), model.parameters(), strict=True):
        mine.copy_(source)
