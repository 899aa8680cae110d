"""One new token for every row: ids -> logits -> picked ids, as plain calls or as a captured CUDA graph.

A step of a small model is a few hundred short kernels, and launching them takes longer than running them; a graph is
launched at once. It needs the same buffers each time, so all inputs live here and are written into. One graph for each
`reach`, of which there are few.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
        self._pool: Any = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}

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
            graph, results = self._graphs[reach]
            graph.replay()
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
        kept = self.cache.embedded_B1D
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries set themselves up in their first calls, which is not captured
                for _ in range(2):
                    self.cache.embedded_B1D = kept
                    self._compute()
            torch.cuda.current_stream().wait_stream(stream)
            self.cache.embedded_B1D = kept  # reading the same token at the same place again changes nothing else
            # One pool of memory for all graphs: what one of them leaves there is read before another one runs.
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Only what this thread does is captured; another one may be copying a checkpoint off the card.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = self._compute()
            self._graphs[reach] = (graph, results)
        except RuntimeError as error:
            self.is_captured = False
            self._graphs.clear()
            self.cache.embedded_B1D = kept
            self._tell(str(error).strip().splitlines()[0][:300])
