"""What was read so far, and the logits of what follows it.

    prompt -> read at once -> logits -> [ one id -> logits ] ...

    processors   a cache that is looked at as far as it is filled: the fewest numbers to compute
    CUDA         a cache of fixed shapes, and one captured step that is launched for each id (`lm.decode`): there the
                 host would take longer to launch a step's kernels than the card to run them

On CUDA the steps that are not captured are computed the same way, so one seed is one text, however long it becomes and
whether or not capturing works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from homing.lm.decode import REACH, Steps, room_for
from homing.lm.model import Decoder, KVCache
from homing.lm.model.row_cache import RowCache

__all__ = ["WORTH", "Reader"]

# Ids that a graph must have before it: capturing computes a step a few times, with the card waited for and its unused
# memory given back before, so a few ids come sooner without. As measured for models of the size of those in `pays` of
# benchmarks/gpu/decode.py.
WORTH = 5


class Reader:
    """Of one text. Close it: what was captured holds memory that nobody else can have."""

    def __init__(self, model: Decoder, *, capacity: int, tell: Callable[[str], None]) -> None:
        self._model, self.length = model, 0
        self._steps: Steps[Tensor] | None = None
        self._cache: KVCache
        if is_stepped(model.device):
            places, dtype = room_for(capacity), model.compute_dtype
            self._cache = rows = RowCache(model.shape, capacity=places, device=model.device, dtype=dtype)
            self._steps = Steps(model, rows, _as_they_are, is_captured=True, tell=partial(_not_captured, tell))
        else:
            self._cache = model.new_cache(capacity=capacity)

    @torch.no_grad()
    def read(self, ids: list[int], *, num_to_come: int) -> Tensor:
        """Logits (V,) of what follows; a buffer that the next call may write over. `num_to_come`: ids that will be read
        from here on at most, these included."""
        place, self.length = self.length, self.length + len(ids)
        if self._steps is None or len(ids) > 1:
            return self._model.next_logits(torch.tensor([ids], device=self._model.device), self._cache)[0]
        is_worth = min(num_to_come, REACH - place % REACH) >= WORTH
        return self._steps.step(torch.tensor(ids), torch.tensor([place]), furthest=place, is_worth=is_worth)[0]

    def clear(self) -> None:
        """Before a text is read from its beginning again: the graphs stay."""
        self.length = 0
        self._cache.clear()

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()


def is_stepped(device: torch.device) -> bool:
    return device.type == "cuda"


def _as_they_are(logits_BV: Tensor) -> Tensor:
    return logits_BV


def _not_captured(tell: Callable[[str], None], problem: str) -> None:
    tell(f"warning: CUDA graphs failed; the text goes on without them, slower. {problem}")
