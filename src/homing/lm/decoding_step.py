"""Runs one decoding step (one token per row): ids -> logits -> result, eagerly or as a captured CUDA graph.

A step of a small model is a few hundred short kernels, and launching them takes longer than running them, while a graph
needs a single launch. A graph always uses the same buffers, so `Steps` owns all inputs and updates them in place. There
is one graph per number of rows and value of `reach`. `reach` is rounded up to one of a few values (`reach_for`), and
only the graphs used last are kept (`RecentGraphs`), so that a server with a long context does not fill the GPU with
graphs. Captured or not, a step runs the same kernels on the same shapes and gives the same numbers.

The callers are `generate`, which needs the logits, and `rl.rollout`, which picks a token for each row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from homing.lm.cuda_graphs import RecentGraphs
from homing.lm.model import Decoder
from homing.lm.model.attention import RowCache

__all__ = ["REACH", "Steps", "reach_for", "room_for"]

REACH = 128  # the number of positions that attention reads is a multiple of this
Made = TypeVar("Made")


def room_for(num_places: int) -> int:
    """Return the capacity of a cache for this many positions: a multiple of REACH."""
    return -(-num_places // REACH) * REACH


def reach_for(num_places: int) -> int:
    """Return how many positions attention reads if this many are filled: 1, 2, 3, 4, 6, 8, 12, 16, ... times REACH.

    At most half of what is read is in vain, and there are two values for each doubling of the context.
    """
    units = max(1, -(-num_places // REACH))
    power = 1 << (units.bit_length() - 1)
    return REACH * next(each for each in (power, power * 3 // 2, power * 2) if each >= units)


class Steps(Generic[Made]):
    """Runs decoding steps.

    `make(logits_BV)` computes a step's result, in buffers that the next step may overwrite. If capturing a graph fails,
    `notify(problem)` is called, and the steps are slower but still correct.
    """

    def __init__(
        self, model: Decoder, cache: RowCache, make: Callable[[Tensor], Made], *, is_captured: bool,
        notify: Callable[[str], None], graphs: RecentGraphs | None = None, reach: Callable[[int], int] = reach_for,
    ) -> None:  # fmt: skip
        """`graphs`: where to keep graphs, if several `Steps` together have one bound; by default a store of its own.

        `reach` rounds up the number of positions that attention reads.
        """
        self._model, self.cache, self._make = model, cache, make
        self.is_captured, self._notify = is_captured, notify
        self._ids_B = torch.zeros(len(cache.places_B), dtype=torch.int64, device=model.device)
        self._reach, self._owner = reach, object()  # the owner tells this object's graphs from others in the store
        self._graphs = graphs if graphs is not None else RecentGraphs(model.device)

    def step(self, ids_B: Tensor, places_B: Tensor, *, furthest: int, is_worth: bool = True) -> Made:
        """Process `ids_B` at the positions `places_B`, none of which is past `furthest`.

        If there is no graph yet, `is_worth` determines whether to capture one.
        """
        self._ids_B.copy_(ids_B, non_blocking=True)
        self.cache.places_B.copy_(places_B, non_blocking=True)
        reach = min(self.cache.capacity, self._reach(furthest + 1))
        key = (self._owner, reach)
        if self.is_captured and is_worth and key not in self._graphs:
            self._capture(reach)
        if key in self._graphs:
            made: Made = self._graphs.replay(key)
            return made
        self.cache.reach = reach
        return self._compute()

    def close(self) -> None:
        """Free the graphs' memory. Until this is called, nothing else can use that memory."""
        self._graphs.discard(lambda key: key[0] is self._owner)

    def _compute(self) -> Made:
        self.cache.look()
        # A row without a text may be at a place behind the context, which has no RoPE position.
        positions_B1 = self.cache.places_B.unsqueeze(1).clamp(max=self._model.shape.context - 1)
        return self._make(self._model(self._ids_B.unsqueeze(1), cache=self.cache, positions=positions_B1)[:, 0])

    def _capture(self, reach: int) -> None:
        self.cache.reach = reach
        kept, problem = self.cache.embedded_B1D, ""
        try:
            self._graphs.capture((self._owner, reach), self._compute)
        except RuntimeError as error:
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        # No other state needs to be restored, because every call processed the same token at the same position.
        self.cache.embedded_B1D = kept
        # This is outside the `except`, so that the exception no longer references the failed step's tensors.
        if problem:
            self.is_captured = False
            self._graphs.forget_failed()
            self._notify(problem)
