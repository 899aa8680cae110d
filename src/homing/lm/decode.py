"""One new token of every row: ids -> logits -> what is made of them, as plain calls or as a captured CUDA graph.

A step of a small model is a few hundred short kernels, and launching them takes longer than running them; a graph is
launched at once. It needs the same buffers each time, so all inputs live here and are written into. One graph for each
`reach`, of which there are few. Captured or not, a step is the same kernels on the same shapes: the same numbers.

It does not know who asks: `generate` takes the logits as they are, `rl.decode` picks a token of each row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from homing.lm.graphs import Graphs
from homing.lm.model import Decoder
from homing.lm.model.row_cache import RowCache

__all__ = ["REACH", "Steps", "room_for"]

REACH = 128  # places are looked at in multiples of this many
Made = TypeVar("Made")


def room_for(num_places: int) -> int:
    """The capacity of a cache for so many places: then what is looked at hangs on a row's place alone."""
    return -(-num_places // REACH) * REACH


class Steps(Generic[Made]):
    """`make(logits_BV)` gives what a step returns: buffers that the next one may write over. `tell(problem)` is called
    when capturing fails; then a step is slower, and never a wrong answer."""

    def __init__(
        self, model: Decoder, cache: RowCache, make: Callable[[Tensor], Made], *, is_captured: bool,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._model, self.cache, self._make = model, cache, make
        self.is_captured, self._tell = is_captured, tell
        self._ids_B = torch.zeros(len(cache.places_B), dtype=torch.int64, device=model.device)
        self._captures = Graphs(model.device)
        self._graphs: dict[int, tuple[Callable[[], None], Made]] = {}

    def step(self, ids_B: Tensor, places_B: Tensor, *, furthest: int, is_worth: bool = True) -> Made:
        """Reads `ids_B` at `places_B`, none of which is past `furthest`. `is_worth`: whether to capture what is not
        captured yet."""
        self._ids_B.copy_(ids_B, non_blocking=True)
        self.cache.places_B.copy_(places_B, non_blocking=True)
        reach = min(self.cache.capacity, room_for(furthest + 1))
        if self.is_captured and is_worth and reach not in self._graphs:
            self._capture(reach)
        if reach in self._graphs:
            replay, made = self._graphs[reach]
            replay()
            return made
        self.cache.reach = reach
        return self._compute()

    def close(self) -> None:
        """Gives back what the graphs hold: nobody else could have it."""
        if self._graphs:
            self._graphs.clear()
            self._captures.forget()

    def _compute(self) -> Made:
        self.cache.look()
        positions_B1 = self.cache.places_B.unsqueeze(1)
        return self._make(self._model(self._ids_B.unsqueeze(1), cache=self.cache, positions=positions_B1)[:, 0])

    def _capture(self, reach: int) -> None:
        self.cache.reach = reach
        kept, problem = self.cache.embedded_B1D, ""
        made: list[Made] = []  # that of the last time, which is the one that is captured

        def compute() -> None:
            made[:] = [self._compute()]

        try:
            self._graphs[reach] = (self._captures.capture(compute), made[0])
        except RuntimeError as error:
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        self.cache.embedded_B1D = kept  # reading the same token at the same place again changes nothing else
        # Out of the `except`, so that what the failed step holds is no longer held by the exception.
        if problem:
            self.is_captured = False
            made.clear()
            self._graphs.clear()
            self._captures.forget()
            self._tell(problem)
