"""One new token for every row: ids -> logits -> picked ids, as plain calls or as a captured CUDA graph.

A step of a small model is a few hundred short kernels, and launching them takes longer than running them; a graph is
launched at once. It needs the same buffers each time, so all inputs live here and are written into. One graph for each
`reach`, of which there are few.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from homing.lm.graphs import Graphs
from homing.lm.model import Decoder
from homing.lm.model.row_cache import RowCache
from homing.lm.rl.draws import pick_rows

__all__ = ["REACH", "Decoding"]

REACH = 128  # places are looked at in multiples of this many


class Decoding:
    """`tell(problem)` is called when capturing fails; what it returns is never a wrong answer, only a slower one."""

    def __init__(
        self, model: Decoder, cache: RowCache, *, temperature: float, top_k: int, is_captured: bool,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._model, self.cache = model, cache
        self._temperature, self._top_k = temperature, top_k
        self.is_captured, self._tell = is_captured, tell
        rows = len(cache.places_B)
        self._ids_B = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self._draws_B = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self._captures = Graphs(model.device)
        self._graphs: dict[int, tuple[Callable[[], None], tuple[Tensor, Tensor]]] = {}

    def step(self, ids_B: Tensor, places_B: Tensor, draws_B: Tensor, *, furthest: int) -> tuple[Tensor, Tensor]:
        """Reads `ids_B` at `places_B`, none of which is past `furthest`; the picked ids, and the entropy in nats of
        what they were picked from. Both are buffers that the next step may write over."""
        self._ids_B.copy_(ids_B, non_blocking=True)
        self.cache.places_B.copy_(places_B, non_blocking=True)
        self._draws_B.copy_(draws_B, non_blocking=True)
        reach = min(self.cache.capacity, -(-(furthest + 1) // REACH) * REACH)
        if self.is_captured and reach not in self._graphs:
            self._capture(reach)
        if reach in self._graphs:
            replay, results = self._graphs[reach]
            replay()
            return results
        self.cache.reach = reach
        return self._compute()

    def _compute(self) -> tuple[Tensor, Tensor]:
        self.cache.look()
        positions_B1 = self.cache.places_B.unsqueeze(1)
        logits_BV = self._model(self._ids_B.unsqueeze(1), cache=self.cache, positions=positions_B1)[:, 0]
        logs_BV = torch.log_softmax(logits_BV, dim=-1)
        # A probability of 0 has an infinite logarithm; it adds nothing.
        entropy_B = -(logs_BV.exp() * logs_BV.clamp(min=-1e4)).sum(dim=-1)
        return pick_rows(logits_BV, self._draws_B, temperature=self._temperature, top_k=self._top_k), entropy_B

    def _capture(self, reach: int) -> None:
        self.cache.reach = reach
        kept, problem = self.cache.embedded_B1D, ""
        results: list[tuple[Tensor, Tensor]] = []  # those of the last time, which is the one that is captured

        def compute() -> None:
            results[:] = [self._compute()]

        try:
            self._graphs[reach] = (self._captures.capture(compute), results[0])
        except RuntimeError as error:
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        self.cache.embedded_B1D = kept  # reading the same token at the same place again changes nothing else
        # Out of the `except`, so that what the failed step holds is no longer held by the exception.
        if problem:
            self.is_captured = False
            results.clear()
            self._graphs.clear()
            self._captures.forget()
            self._tell(problem)
