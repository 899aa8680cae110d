"""AdamW: parameter groups with moments in fp32 (`AdamGroup`) or in 8 bits (`Adam8Group`), and their base class.

gradient -> first and second moment -> decoupled weight decay -> step by first moment / root of second

The update is element-wise, so a group can be split in any way: it is stepped whole on the GPU, or in small chunks if
the optimizer state is in host memory (`offload`).

8-bit moments take a quarter of the memory. They follow "8-bit Optimizers via Block-wise Quantization"
(arXiv:2110.02861), with the same constants as bitsandbytes.

    uint8 and one magnitude per block of 256 -> fp32 -> AdamW step -> uint8 and magnitudes again

The first moment can be negative and the second cannot, so each has its own quantization map (model.nf4.dynamic_map),
finest near zero. Small tensors stay in fp32: they cost almost nothing, and norms are sensitive to rounding. A large
tensor is stepped in chunks, so that its fp32 moments are never in memory as a whole; with state in host memory each
chunk is one `Load` (`offload`). Checkpoints store the quantized bytes, so resuming restores them exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from homing.lm.model.decoder import Decoder
from homing.lm.model.nf4 import dequantize_blocks, quantize_blocks
from homing.lm.model.row_shards import Part, local
from homing.lm.train.optim.offload import AT_A_TIME, Load, Now, Place, Span, cut

__all__ = ["BLOCK", "LEAST_SIZE", "Adam8Group", "AdamBase", "AdamGroup", "Named"]

Named = Sequence[tuple[str, nn.Parameter]]


class AdamBase(ABC):
    """A group of parameters with the same learning rate, betas and weight decay. Subclasses store the moments."""

    def __init__(
        self, named: Named, *, lr: float, betas: tuple[float, float], eps: float, decay: float,
        place: Place | None = None,
    ) -> None:  # fmt: skip
        self.names = [name for name, _ in named]
        self._owners = [parameter for _, parameter in named]
        self.parameters: list[Tensor] = [local(parameter) for parameter in self._owners]  # the rows of this rank
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.place = place or Place(self.parameters[0].device)

    @abstractmethod
    def loads(self) -> list[Load]:
        """Return the chunks of the group's state, which the optimizer steps one at a time.

        Stepping a chunk does not make the host wait for the device, unless torch has no fused kernel for the device.
        """

    @abstractmethod
    def state(self, model: Decoder) -> Iterator[tuple[str, Part]]:
        """Yield (name on disk, live tensor without padding rows and its place) for each state tensor."""

    def grads(self, part: Sequence[Span]) -> list[Tensor]:
        made = []
        for span in part:
            owner = self._owners[span.index]
            assert owner.grad is not None, f"no gradient for {self.names[span.index]}; call backward() before step()"
            is_same = local(owner).data_ptr() == self.parameters[span.index].data_ptr()
            assert is_same, "the model was moved after its optimizer was created"
            made.append(span.cut(local(owner.grad)))
        return made


class AdamGroup(AdamBase):
    """AdamW with decoupled weight decay and fp32 moments. Uses one fused kernel if torch has one for the device."""

    def __init__(
        self, named: Named, *, lr: float, betas: tuple[float, float], eps: float, decay: float,
        place: Place | None = None,
    ) -> None:  # fmt: skip
        super().__init__(named, lr=lr, betas=betas, eps=eps, decay=decay, place=place)
        self.means = [self.place.full(p.shape, 0.0, torch.float32) for p in self.parameters]
        self.squares = [self.place.full(p.shape, 0.0, torch.float32) for p in self.parameters]
        device = self.parameters[0].device
        # `_fused_adamw_` is a private op of torch, so it may be missing. `_plain` below does the same arithmetic, and a
        # test compares the two.
        self.is_fused = device.type in ("cpu", "cuda") and hasattr(torch, "_fused_adamw_")

    def loads(self) -> list[Load]:
        whole = [Span(index) for index in range(len(self.parameters))]
        parts = cut(self.parameters, AT_A_TIME) if self.place.is_away else [whole]
        return [
            Load([span.of(kind) for kind in (self.means, self.squares) for span in part], partial(self._step, part),
                 self.place.is_away)
            for part in parts
        ]  # fmt: skip

    @torch.no_grad()
    def _step(self, part: Sequence[Span], states: Sequence[Tensor], now: Now) -> None:
        parameters, grads = [span.of(self.parameters) for span in part], self.grads(part)
        means, squares = list(states[: len(part)]), list(states[len(part) :])
        lr = self.lr * now.lr_scale
        if self.is_fused:
            self._fused(parameters, grads, means, squares, lr, now)
        elif bool(now.is_good > 0):
            self._plain(parameters, grads, means, squares, lr, int(now.step_count))

    def _fused(
        self, parameters: list[Tensor], grads: list[Tensor], means: list[Tensor], squares: list[Tensor], lr: float,
        now: Now,
    ) -> None:  # fmt: skip
        torch._fused_adamw_(
            parameters, grads, means, squares, [], [now.step_count] * len(grads),
            lr=lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=self.decay, eps=self.eps,
            amsgrad=False, maximize=False, grad_scale=None, found_inf=1.0 - now.is_good,
        )  # fmt: skip

    def _plain(
        self, parameters: list[Tensor], grads: list[Tensor], means: list[Tensor], squares: list[Tensor], lr: float,
        num_steps: int,
    ) -> None:  # fmt: skip
        beta1, beta2 = self.betas
        torch._foreach_mul_(parameters, 1.0 - lr * self.decay)
        torch._foreach_lerp_(means, grads, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1.0 - beta2)
        spread = torch._foreach_sqrt(squares)
        torch._foreach_div_(spread, (1.0 - beta2**num_steps) ** 0.5)
        torch._foreach_add_(spread, self.eps)
        torch._foreach_addcdiv_(parameters, means, spread, -lr / (1.0 - beta1**num_steps))

    def state(self, model: Decoder) -> Iterator[tuple[str, Part]]:
        for name, owner, mean, square in zip(self.names, self._owners, self.means, self.squares, strict=True):
            yield f"{name}.exp_avg", model.part(name, mean, owner.shape[0])
            yield f"{name}.exp_avg_sq", model.part(name, square, owner.shape[0])


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

    def state(self, model: Decoder) -> Iterator[tuple[str, Part]]:
        """Yield the state without padding rows.

        The caller could not remove them, because each magnitude belongs to a block, and the padding may begin in the
        middle of a block.
        """
        for name, mean, square in zip(self.names, self.means, self.squares, strict=True):
            for kind, moment in (("exp_avg", mean), ("exp_avg_sq", square)):
                indices = model.cut_padding(name, moment.indices)
                magnitudes = moment.magnitudes[: -(-indices.numel() // BLOCK)]
                yield f"{name}.{kind}.uint8", Part(tuple(indices.shape), 0, indices)
                yield f"{name}.{kind}.magnitudes", Part(tuple(magnitudes.shape), 0, magnitudes)
