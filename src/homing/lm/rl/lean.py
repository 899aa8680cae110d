"""A second copy of the weights, for reading only: in the type that products are computed in.

A step of sampling reads every weight for one token of each row; fp32 ones would be read at twice the size and cast each
time. The numbers are the same, for each weight would be cast as it is used.
"""

from __future__ import annotations

import torch
from torch import nn

from homing.lm.model import Decoder

__all__ = ["copy_weights", "lean_copy"]


def lean_copy(model: Decoder, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):  # fp32 weights that nobody reads would take twice the memory
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
    for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        mine.copy_(theirs)
