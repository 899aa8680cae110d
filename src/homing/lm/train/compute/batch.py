"""The batch of one optimizer step, and the interface through which the training loop gets the next one.

Shapes: R rows of a step, T positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from torch import Tensor

from homing.lm.model import Decoder

__all__ = ["Batch", "Batches"]


@dataclass(frozen=True)
class Batch:
    ids_RT: Tensor  # int64
    targets_RT: Tensor  # int64; loss.IGNORED where the loss mask excludes the position
    num_targets: int  # unmasked targets in the whole step, over all ranks
    segments_RT: Tensor | None = None  # int32: index of the token's conversation within its row, -1 for padding
    weights_RT: Tensor | None = None  # float32: loss weight of each target
    figures: dict[str, float] = field(default_factory=dict)  # logged with the step's metrics
    notices: tuple[tuple[str, str], ...] = ()  # (kind, text) of events to emit with the step

    @property
    def num_rows(self) -> int:
        return len(self.ids_RT)

    def micro_batches(self, micro_batch: int) -> Iterator[Batch]:
        """Yield micro-batches of at most `micro_batch` rows.

        `num_targets` stays that of the whole step, so the losses of all micro-batches add up to the mean over the step,
        however the rows are split.
        """
        for start in range(0, self.num_rows, micro_batch):
            rows = slice(start, start + micro_batch)
            yield dataclasses.replace(
                self,
                ids_RT=self.ids_RT[rows],
                targets_RT=self.targets_RT[rows],
                segments_RT=None if self.segments_RT is None else self.segments_RT[rows],
                weights_RT=None if self.weights_RT is None else self.weights_RT[rows],
            )

    def loss(self, model: Decoder, count: Tensor | None = None) -> Tensor:
        """Return the loss of these rows. `count` replaces `num_targets` where that must be a tensor on the device."""
        return model.loss(
            self.ids_RT, self.targets_RT, segments=self.segments_RT, weights_BT=self.weights_RT,
            num_targets=self.num_targets if count is None else count,
        )  # fmt: skip


class Batches(Protocol):
    """The batches of consecutive steps, as a context manager; identical on every machine and after every resume."""

    def __enter__(self) -> Batches: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def next(self) -> Batch: ...
