"""Reads tokens into a KV cache and returns the logits of the next token.

    prompt -> prefill -> logits -> [ one id -> logits ] ...

    CPU, MPS     a cache that is read only as far as it is filled: the least computation
    CUDA         a cache of fixed shape, and a captured step that is launched for each id (`lm.decode`): otherwise
                 launching a step's kernels would take the host longer than the GPU takes to run them

On CUDA the steps that are not captured compute the same, so a seed always gives the same text, however long it is and
whether or not capturing works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from homing.lm.decode_token import REACH, Steps, room_for
from homing.lm.model import Decoder, KVCache
from homing.lm.model.attention import RowCache

__all__ = ["WORTH", "Reader"]

# Minimum number of ids to come that makes a graph worthwhile: capturing runs a step a few times, waits for the GPU and
# frees unused memory first, so a few ids are faster without. Measured for models of the sizes in `pays` of
# benchmarks/gpu/decode.py.
WORTH = 5


class Reader:
    """Reads one text. Close it: captured graphs hold memory that nothing else can use."""

    def __init__(self, model: Decoder, *, capacity: int, notify: Callable[[str], None]) -> None:
        self._model, self.length = model, 0
        self._steps: Steps[Tensor] | None = None
        self._cache: KVCache
        if is_stepped(model.device):
            places, dtype = room_for(capacity), model.compute_dtype
            self._cache = rows = RowCache(model.shape, capacity=places, device=model.device, dtype=dtype)
            self._steps = Steps(model, rows, _as_they_are, is_captured=True, notify=partial(_not_captured, notify))
        else:
            self._cache = model.new_cache(capacity=capacity)

    @torch.no_grad()
    def read(self, ids: list[int], *, num_to_come: int) -> Tensor:
        """Read ids; return the logits (V,) of the next token, in a buffer that the next call may overwrite.

        `num_to_come`: at most how many ids will be read from here on, including these.
        """
        place, self.length = self.length, self.length + len(ids)
        if self._steps is None or len(ids) > 1:
            return self._model.next_logits(torch.tensor([ids], device=self._model.device), self._cache)[0]
        is_worth = min(num_to_come, REACH - place % REACH) >= WORTH
        return self._steps.step(torch.tensor(ids), torch.tensor([place]), furthest=place, is_worth=is_worth)[0]

    def clear(self) -> None:
        """Restart from an empty cache; captured graphs are kept."""
        self.length = 0
        self._cache.clear()

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()


def is_stepped(device: torch.device) -> bool:
    return device.type == "cuda"


def _as_they_are(logits_BV: Tensor) -> Tensor:
    return logits_BV


def _not_captured(notify: Callable[[str], None], problem: str) -> None:
    notify(f"warning: CUDA graphs failed; generation continues without them, slower. {problem}")
