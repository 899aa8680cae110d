"""Copies a step's loss and gradient norm from the device asynchronously, so that they can be read one step later.

Reading a number immediately would make the host wait for the device, and then the device wait for the host. One step
later the number has already arrived on the host, and the device already has its next step.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

__all__ = ["Figures"]


class Figures:
    """The metrics of one step. `loss` and `norm` are valid only after `read` has been called."""

    def __init__(
        self, step: int, loss_and_norm: Tensor, begun_at: float = 0.0, more: dict[str, float] | None = None
    ) -> None:
        self.step = step
        self.more = more or {}  # extra metrics from the phase's data
        self.begun_at = begun_at  # when the host began to queue the step on the device
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
        """Return placeholder metrics, to be used before the first step."""
        return cls(0, torch.full((2,), math.nan))

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def read(self) -> None:
        """Block until the GPU has finished this step, then set `loss` and `norm`."""
        if self.read_at:
            return
        if self._event is not None:
            self._event.synchronize()
        self.loss, self.norm = self._host.tolist()
        self.read_at = time.monotonic()
