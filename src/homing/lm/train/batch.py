"""What one step learns from, and the one question that the loop asks of a phase's data: the next one.

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
    targets_RT: Tensor  # int64; loss.IGNORED where nothing is learned
    num_targets: int  # that are learned from in the whole step, on all ranks
    segments_RT: Tensor | None = None  # int32: which conversation of its row a token is of, -1 for padding
    weights_RT: Tensor | None = None  # float32: what each target counts
    figures: dict[str, float] = field(default_factory=dict)  # to be logged with the step
    notices: tuple[tuple[str, str], ...] = ()  # (kind, text) of events to be told with it

    @property
    def num_rows(self) -> int:
        return len(self.ids_RT)

    def pieces(self, micro_batch: int) -> Iterator[Batch]:
        """Its rows, so many at a time. `num_targets` stays that of the whole: the losses of all pieces add up to its
        mean, however the rows are cut."""
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
        """`count`: `num_targets`, where that is to be read on the device."""
        return model.loss(
            self.ids_RT, self.targets_RT, segments=self.segments_RT, weights_BT=self.weights_RT,
            num_targets=self.num_targets if count is None else count,
        )  # fmt: skip


class Batches(Protocol):
    """Consecutive steps from some row on. Opened with `with`; the same ones on every machine and after every resume."""

    def __enter__(self) -> Batches: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def next(self) -> Batch: ...
