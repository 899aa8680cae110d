"""AdamW with its two moments in eight bits: a quarter of their memory ("8-bit Optimizers via Block-wise Quantization",
arXiv:2110.02861, and bitsandbytes' numbers).

    uint8 and one magnitude per 256 -> fp32 -> a step of AdamW -> uint8 and magnitudes again

The mean may be negative and the mean square may not, so each has a map of its own (model.nf4.dynamic_map), finest near
zero. Small tensors stay with fp32 (`AdamGroup`): they cost nothing, and norms are sensitive. A large one is stepped in
stretches, so that fp32 moments are never whole in memory. State on disk is what is in memory, so it comes back exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from homing.lm.model.decoder import Decoder
from homing.lm.model.nf4 import dequantize_blocks, quantize_blocks
from homing.lm.train.adam import AdamBase, Named

__all__ = ["BLOCK", "LEAST_SIZE", "Adam8Group"]

BLOCK = 256
LEAST_SIZE = 4096  # numbers in a tensor that is worth it
STRETCH = 2**24  # numbers stepped at a time; whole blocks


@dataclass
class _Moment:
    """As many bytes as the parameter has numbers, and a magnitude for each block of them."""

    indices: Tensor  # uint8, shaped as the parameter
    magnitudes: Tensor  # fp32 (blocks)
    is_signed: bool

    @classmethod
    def zeros(cls, parameter: Tensor, *, is_signed: bool) -> _Moment:
        num_blocks = -(-parameter.numel() // BLOCK)
        # The step that is zero, and not step 0: padding rows share a block with real ones, and are cut on disk.
        zero = quantize_blocks(torch.zeros(1, device=parameter.device), BLOCK, is_signed=is_signed)[0]
        indices = zero.expand(parameter.numel()).clone().view(parameter.shape)
        return cls(indices, torch.zeros(num_blocks, device=parameter.device), is_signed)

    def read(self, stretch: slice) -> Tensor:
        return dequantize_blocks(self.indices.view(-1)[stretch], self._blocks(stretch), BLOCK, is_signed=self.is_signed)

    def write(self, stretch: slice, values: Tensor, is_good: Tensor) -> None:
        """Where `is_good` is 0 the bytes stay as they are: read and quantised again they might not."""
        indices, magnitudes = quantize_blocks(values, BLOCK, is_signed=self.is_signed)
        old_indices, old_magnitudes = self.indices.view(-1)[stretch], self._blocks(stretch)
        old_indices.copy_(torch.where(is_good > 0, indices, old_indices))
        old_magnitudes.copy_(torch.where(is_good > 0, magnitudes, old_magnitudes))

    def _blocks(self, stretch: slice) -> Tensor:
        return self.magnitudes[stretch.start // BLOCK : -(-stretch.stop // BLOCK)]


class Adam8Group(AdamBase):
    """The same parameters, rates and step as `adam.AdamGroup`."""

    def __init__(self, named: Named, *, lr: float, betas: tuple[float, float], eps: float, decay: float) -> None:
        super().__init__(named, lr=lr, betas=betas, eps=eps, decay=decay)
        self.means = [_Moment.zeros(p, is_signed=True) for p in self.parameters]
        self.squares = [_Moment.zeros(p, is_signed=False) for p in self.parameters]

    @torch.no_grad()
    def step(self, lr_scale: float, step_count: Tensor, is_good: Tensor) -> None:
        for name, parameter, mean, square in zip(self.names, self.parameters, self.means, self.squares, strict=True):
            assert parameter.grad is not None, f"no gradient for {name}; backward before step"
            assert parameter.is_contiguous(), f"{name} does not lie in one piece"
            for start in range(0, parameter.numel(), STRETCH):
                stretch = slice(start, min(start + STRETCH, parameter.numel()))
                self._step(parameter, parameter.grad, mean, square, stretch, self.lr * lr_scale, step_count, is_good)

    def _step(
        self, parameter: Tensor, grad: Tensor, mean: _Moment, square: _Moment, stretch: slice, lr: float,
        step_count: Tensor, is_good: Tensor,
    ) -> None:  # fmt: skip
        beta1, beta2 = self.betas
        weight, g = parameter.view(-1)[stretch], grad.reshape(-1)[stretch].float()
        first = mean.read(stretch).lerp_(g, 1.0 - beta1)
        second = square.read(stretch).mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        num_steps = step_count.clamp(min=1.0)  # 0 where the first step of all is skipped
        spread = second.sqrt().div_((1.0 - beta2**num_steps).sqrt()).add_(self.eps)
        moved = weight * (1.0 - lr * self.decay) - lr / (1.0 - beta1**num_steps) * (first / spread)
        weight.copy_(torch.where(is_good > 0, moved, weight))
        mean.write(stretch, first, is_good)
        square.write(stretch, second, is_good)

    def state(self, model: Decoder) -> Iterator[tuple[str, str, Tensor]]:
        """Cut here: magnitudes go by blocks, and the padding rows end somewhere in one."""
        for name, mean, square in zip(self.names, self.means, self.squares, strict=True):
            for kind, moment in (("exp_avg", mean), ("exp_avg_sq", square)):
                indices = model.cut_padding(name, moment.indices)
                yield f"{name}.{kind}.uint8", "", indices
                yield f"{name}.{kind}.magnitudes", "", moment.magnitudes[: -(-indices.numel() // BLOCK)]
