"""Fresh weights: one rule, the same numbers on every device.

    every matrix          normal, std = 0.5 / sqrt(numbers summed per output): 0.02 at width 640
    o_proj and down_proj  that / sqrt(2 layers), so that the stream does not grow with depth
    norms 1, biases 0, padding rows 0

At these sizes the first loss is within a few tenths of ln(vocabulary), tied or untied, and every parameter has a
gradient from the first step on, which zero-initialised projections would not give: `homing verify` checks both.

Each parameter draws from a generator of its own, seeded by (seed, name) and always on the CPU. So the same seed gives
the same model on CPU, CUDA and MPS, whatever the padding and whatever order parameters are made in.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from homing.wire.run import Model

__all__ = ["init_weights"]


@torch.no_grad()
def init_weights(model: nn.Module, shape: Model, seed: int) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif parameter.dim() == 1:
            parameter.zero_()
        else:
            _draw(name, parameter, shape, seed)


def _draw(name: str, parameter: Tensor, shape: Model, seed: int) -> None:
    std = 0.5 * parameter.shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std *= (2 * shape.num_layers) ** -0.5
    is_padded = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    num_rows = shape.vocab_size if is_padded else parameter.shape[0]
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    drawn = torch.empty(num_rows, parameter.shape[1], device="cpu").normal_(0.0, std, generator=generator)
    parameter.zero_()
    parameter[:num_rows].copy_(drawn)
