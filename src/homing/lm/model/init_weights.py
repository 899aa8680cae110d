"""Weight initialization: one rule per family, the same numbers on every device.

    stock   every matrix          normal, std = 0.5 / sqrt(fan-in): 0.02 at width 640
            o_proj and down_proj  that / sqrt(2 layers), so that the residual stream does not grow with depth
            norms 1, biases 0
            for Muon              0.7 times that for gate_proj and up_proj, 0.04 times for an untied head, so that all
                                  tokens are equally likely at first; worse with AdamW, which is slower to leave it
    swift   embedding             normal, std 0.8: it is normalized at once, so only its direction counts
            head                  normal, std 0.001: all tokens are equally likely at first
            q, k, v, values       normal, std = 1 / sqrt(width); up_proj 0.4 times that
            o_proj and down_proj  0: a new block passes its input through
            scales                see _scales; gates nearly 0

Padding rows are 0. With these values the first loss is within a few tenths of ln(vocabulary). In `stock` every
parameter has a gradient from the first step on; in `swift` from the second, when the zeros have changed.

Each parameter has its own random generator, seeded by (seed, name) and always on the CPU. So the same seed gives the
same model on CPU, CUDA and MPS, whatever the padding and the order in which parameters are created.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from homing.wire.run_json import Model

__all__ = ["init_weights"]

MUON_SHARES = {"gate_proj.weight": 0.7, "up_proj.weight": 0.7, "lm_head.weight": 0.04}


@torch.no_grad()
def init_weights(model: nn.Module, shape: Model, seed: int, optimizer: str) -> None:
    """Initialize all parameters in place, for training with `optimizer`: muon or adamw."""
    for name, parameter in model.named_parameters():
        if shape.family == "swift" and parameter.dim() == 1:
            parameter.copy_(_scales(name, shape.num_layers))
        elif name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif parameter.dim() == 1:
            parameter.zero_()
        else:
            std = _swift_std(name, shape) if shape.family == "swift" else _stock_std(name, parameter, shape, optimizer)
            _draw(name, parameter, shape, seed, std)


def _scales(name: str, num_layers: int) -> Tensor:
    if name.endswith("keep_scales"):
        return torch.linspace(1.15, 1.05, num_layers)
    if name.endswith("first_scales"):
        return torch.linspace(0.20, 0.05, num_layers)
    return torch.full((1,), 0.2 if name.endswith("backout_scale") else 0.0)


def _draw(name: str, parameter: Tensor, shape: Model, seed: int, std: float) -> None:
    is_padded = name.endswith(("embed_tokens.weight", "lm_head.weight", "value_embed.weight"))
    num_rows = shape.vocab_size if is_padded else parameter.shape[0]
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    drawn = torch.empty(num_rows, parameter.shape[1], device="cpu").normal_(0.0, std, generator=generator)
    parameter.zero_()
    parameter[:num_rows].copy_(drawn)


def _stock_std(name: str, parameter: Tensor, shape: Model, optimizer: str) -> float:
    std = 0.5 * parameter.shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return std * (2 * shape.num_layers) ** -0.5
    if optimizer == "muon":
        for ending, share in MUON_SHARES.items():
            if name.endswith(ending):
                return share * std
    return std


def _swift_std(name: str, shape: Model) -> float:
    std = shape.width**-0.5
    for ending, own in (
        ("embed_tokens.weight", 0.8),
        ("lm_head.weight", 0.001),
        ("o_proj.weight", 0.0),
        ("down_proj.weight", 0.0),
        ("up_proj.weight", 0.4 * std),
        ("gate.weight", 0.01),
    ):
        if name.endswith(ending):
            return own
    return std
