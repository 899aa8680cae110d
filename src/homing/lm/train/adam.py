"""AdamW: what its groups share, and the one that keeps its moments in fp32. The other is `adam8`.

gradient -> mean and mean square -> decay of the weight itself, then a step of the mean over the root of the square
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from homing.lm.model.decoder import Decoder

__all__ = ["AdamBase", "AdamGroup", "Named"]

Named = Sequence[tuple[str, nn.Parameter]]


class AdamBase(ABC):
    """Parameters that share rate, betas and decay. How their moments are kept is the subclass's own."""

    def __init__(self, named: Named, *, lr: float, betas: tuple[float, float], eps: float, decay: float) -> None:
        self.names = [name for name, _ in named]
        self.parameters: list[Tensor] = [parameter for _, parameter in named]
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay

    @abstractmethod
    def step(self, lr_scale: float, step_count: Tensor, is_good: Tensor) -> None:
        """`step_count` counts this step, if it `is_good`; with 0 nothing changes. The host waits for neither, unless
        the device has no fused kernel."""

    @abstractmethod
    def state(self, model: Decoder) -> Iterator[tuple[str, str, Tensor]]:
        """(name on disk, the parameter whose padding rows are to be cut or "", live tensor)"""


class AdamGroup(AdamBase):
    """AdamW, with the decay applied to the weight itself. One fused kernel where torch has one for the device."""

    def __init__(self, named: Named, *, lr: float, betas: tuple[float, float], eps: float, decay: float) -> None:
        super().__init__(named, lr=lr, betas=betas, eps=eps, decay=decay)
        self.means = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
        self.squares = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
        device = self.parameters[0].device
        # The op is torch's own but not public; the plain form below is the same arithmetic, and a test keeps it so.
        self.is_fused = device.type in ("cpu", "cuda") and hasattr(torch, "_fused_adamw_")

    @torch.no_grad()
    def step(self, lr_scale: float, step_count: Tensor, is_good: Tensor) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        assert len(grads) == len(self.parameters), f"no gradient for some of {self.names}; backward before step"
        if self.is_fused:
            self._fused(grads, self.lr * lr_scale, step_count, is_good)
        elif bool(is_good > 0):
            self._plain(grads, self.lr * lr_scale, int(step_count))

    def _fused(self, grads: list[Tensor], lr: float, step_count: Tensor, is_good: Tensor) -> None:
        torch._fused_adamw_(
            self.parameters, grads, self.means, self.squares, [], [step_count] * len(grads),
            lr=lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=self.decay, eps=self.eps,
            amsgrad=False, maximize=False, grad_scale=None, found_inf=1.0 - is_good,
        )  # fmt: skip

    def _plain(self, grads: list[Tensor], lr: float, num_steps: int) -> None:
        beta1, beta2 = self.betas
        torch._foreach_mul_(self.parameters, 1.0 - lr * self.decay)
        torch._foreach_lerp_(self.means, grads, 1.0 - beta1)
        torch._foreach_mul_(self.squares, beta2)
        torch._foreach_addcmul_(self.squares, grads, grads, 1.0 - beta2)
        spread = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(spread, (1.0 - beta2**num_steps) ** 0.5)
        torch._foreach_add_(spread, self.eps)
        torch._foreach_addcdiv_(self.parameters, self.means, spread, -lr / (1.0 - beta1**num_steps))

    def state(self, model: Decoder) -> Iterator[tuple[str, str, Tensor]]:
        for name, mean, square in zip(self.names, self.means, self.squares, strict=True):
            yield f"{name}.exp_avg", name, mean
            yield f"{name}.exp_avg_sq", name, square
