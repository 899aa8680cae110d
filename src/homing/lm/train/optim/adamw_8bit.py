"""AdamW with 8-bit moments, which take a quarter of the memory of fp32 moments.

From "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), with the same constants as bitsandbytes.

    uint8 and one magnitude per block of 256 -> fp32 -> AdamW step -> uint8 and magnitudes again

The first moment can be negative and the second cannot, so each has its own quantization map (model.nf4.dynamic_map),
finest near zero. Small tensors stay in fp32 (`AdamGroup`): they cost almost nothing, and norms are sensitive to
rounding. A large tensor is stepped in chunks, so that its fp32 moments are never in memory as a whole; with state in
host memory each chunk is one `Load` (`offload`). Checkpoints store the quantized bytes, so resuming restores them
exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from homing.lm.model.decoder import Decoder
from homing.lm.model.nf4 import dequantize_blocks, quantize_blocks
from homing.lm.train.optim.adamw import AdamBase, Named
from homing.lm.train.optim.offload import AT_A_TIME, Load, Now, Place, Span, cut

__all__ = ["BLOCK", "LEAST_SIZE", "Adam8Group"]

BLOCK = 256
LEAST_SIZE = 4096  # moments are quantized only for tensors with at least this many elements; smaller ones gain little
STRETCH = AT_A_TIME  # number of elements that are updated at a time; a multiple of BLOCK


@dataclass
class _Moment:
    """A quantized AdamW moment of one parameter: a uint8 index per element and a magnitude per block."""

    indices: Tensor  # uint8, same shape as the parameter
    magnitudes: Tensor  # fp32, one per block
    is_signed: bool

    @classmethod
    def zeros(cls, parameter: Tensor, place: Place, *, is_signed: bool) -> _Moment:
        num_blocks = -(-parameter.numel() // BLOCK)
        # Fill with the index that stands for the value 0.0, which is not index 0. Padding rows, which are not saved,
        # must be zero too, because they may share a block with real rows.
        zero = int(quantize_blocks(torch.zeros(1, device="cpu"), BLOCK, is_signed=is_signed)[0])
        indices = place.full(parameter.shape, zero, torch.uint8)
        return cls(indices, place.full([num_blocks], 0.0, torch.float32), is_signed)

    def states(self, stretch: slice) -> list[Tensor]:
        blocks = slice(stretch.start // BLOCK, -(-stretch.stop // BLOCK))
        return [self.indices.view(-1)[stretch], self.magnitudes[blocks]]


def _read(states: Sequence[Tensor], *, is_signed: bool) -> Tensor:
    return dequantize_blocks(states[0], states[1], BLOCK, is_signed=is_signed)


def _write(states: Sequence[Tensor], values: Tensor, is_good: Tensor, *, is_signed: bool) -> None:
    """Quantize `values` into `states`, unless `is_good` is 0.

    If it is 0, the stored bytes are left unchanged, because requantizing could change them.
    """
    for old, new in zip(states, quantize_blocks(values, BLOCK, is_signed=is_signed), strict=True):
        old.copy_(torch.where(is_good > 0, new, old))


class Adam8Group(AdamBase):
    """A parameter group for AdamW with 8-bit moments, with the same arguments and update rule as `adamw.AdamGroup`."""

    def __init__(
        self, named: Named, *, lr: float, betas: tuple[float, float], eps: float, decay: float,
        place: Place | None = None,
    ) -> None:  # fmt: skip
        super().__init__(named, lr=lr, betas=betas, eps=eps, decay=decay, place=place)
        self.means = [_Moment.zeros(p, self.place, is_signed=True) for p in self.parameters]
        self.squares = [_Moment.zeros(p, self.place, is_signed=False) for p in self.parameters]

    def loads(self) -> list[Load]:
        return [Load(self._states(part), partial(self._step, part), self.place.is_away)
                for part in cut(self.parameters, STRETCH)]  # fmt: skip

    def _states(self, part: Sequence[Span]) -> list[Tensor]:
        """Return four tensors per span: indices and magnitudes of the first moment, then those of the second."""
        found: list[Tensor] = []
        for span in part:
            assert span.stretch is not None
            found += self.means[span.index].states(span.stretch) + self.squares[span.index].states(span.stretch)
        return found

    @torch.no_grad()
    def _step(self, part: Sequence[Span], states: Sequence[Tensor], now: Now) -> None:
        for number, (span, grad) in enumerate(zip(part, self.grads(part), strict=True)):
            own = states[4 * number : 4 * number + 4]
            self._step_one(span.of(self.parameters), grad.float(), own[:2], own[2:], now)

    def _step_one(self, weight: Tensor, g: Tensor, mean: Sequence[Tensor], square: Sequence[Tensor], now: Now) -> None:
        (beta1, beta2), lr = self.betas, self.lr * now.lr_scale
        first = _read(mean, is_signed=True).lerp_(g, 1.0 - beta1)
        second = _read(square, is_signed=False).mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        num_steps = now.step_count.clamp(min=1.0)  # `step_count` is 0 if the very first step is skipped
        spread = second.sqrt().div_((1.0 - beta2**num_steps).sqrt()).add_(self.eps)
        moved = weight * (1.0 - lr * self.decay) - lr / (1.0 - beta1**num_steps) * (first / spread)
        weight.copy_(torch.where(now.is_good > 0, moved, weight))
        _write(mean, first, now.is_good, is_signed=True)
        _write(square, second, now.is_good, is_signed=False)

    def state(self, model: Decoder) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the state without padding rows.

        The caller could not remove them, because each magnitude belongs to a block, and the padding may begin in the
        middle of a block.
        """
        for name, mean, square in zip(self.names, self.means, self.squares, strict=True):
            for kind, moment in (("exp_avg", mean), ("exp_avg_sq", square)):
                indices = model.cut_padding(name, moment.indices)
                yield f"{name}.{kind}.uint8", "", indices
                yield f"{name}.{kind}.magnitudes", "", moment.magnitudes[: -(-indices.numel() // BLOCK)]
