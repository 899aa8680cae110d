"""AdamW: the base class of its parameter groups, and the group with fp32 moments (for 8-bit moments see `adamw_8bit`).

gradient -> first and second moment -> decoupled weight decay -> step by first moment / root of second

The update is element-wise, so a group can be split in any way: it is stepped whole on the GPU, or in small chunks if
the optimizer state is in host memory (`offload`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from homing.lm.model.decoder import Decoder
from homing.lm.train.optim.offload import AT_A_TIME, Load, Now, Place, Span, cut

__all__ = ["AdamBase", "AdamGroup", "Named"]

Named = Sequence[tuple[str, nn.Parameter]]


class AdamBase(ABC):
    """A group of parameters with the same learning rate, betas and weight decay. Subclasses store the moments."""

    def __init__(
        self, named: Named, *, lr: float, betas: tuple[float, float], eps: float, decay: float,
        place: Place | None = None,
    ) -> None:  # fmt: skip
        self.names = [name for name, _ in named]
        self.parameters: list[Tensor] = [parameter for _, parameter in named]
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.place = place or Place(self.parameters[0].device)

    @abstractmethod
    def loads(self) -> list[Load]:
        """Return the chunks of the group's state, which the optimizer steps one at a time.

        Stepping a chunk does not make the host wait for the device, unless torch has no fused kernel for the device.
        """

    @abstractmethod
    def state(self, model: Decoder) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (name on disk, parameter name, live tensor) for each state tensor.

        The parameter name is "" if the tensor has no padding rows to cut.
        """

    def grads(self, part: Sequence[Span]) -> list[Tensor]:
        made = []
        for span in part:
            grad = self.parameters[span.index].grad
            assert grad is not None, f"no gradient for {self.names[span.index]}; call backward() before step()"
            made.append(span.cut(grad))
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

    def state(self, model: Decoder) -> Iterator[tuple[str, str, Tensor]]:
        for name, mean, square in zip(self.names, self.means, self.squares, strict=True):
            yield f"{name}.exp_avg", name, mean
            yield f"{name}.exp_avg_sq", name, square
