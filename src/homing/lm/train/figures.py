"""The figures of one step, loss and gradient norm: they leave the device by themselves and are read when they are in.

Reading a number at once makes the host wait for the device, and then the device for the host; read one step late, it is
there already, and the device has been given its next step before.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

__all__ = ["Figures"]


class Figures:
    """`loss` and `norm` are there after `read`."""

    def __init__(
        self, step: int, loss_and_norm: Tensor, begun_at: float = 0.0, more: dict[str, float] | None = None
    ) -> None:
        self.step = step
        self.more = more or {}  # what the phase's own data says of the step
        self.begun_at = begun_at  # when the host began to give the step to the device
        self.read_at = 0.0
        self.loss = self.norm = math.nan
        self._host, self._event = loss_and_norm, None
        if loss_and_norm.is_cuda:
            self._host = torch.empty(2, pin_memory=True)
            self._host.copy_(loss_and_norm, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @classmethod
    def none(cls) -> Figures:
        """Of no step: before the first."""
        return cls(0, torch.full((2,), math.nan))

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def read(self) -> None:
        """Waits for the device where it has not come so far."""
        if self.read_at:
            return
        if self._event is not None:
            self._event.synchronize()
        self.loss, self.norm = self._host.tolist()
        self.read_at = time.monotonic()
