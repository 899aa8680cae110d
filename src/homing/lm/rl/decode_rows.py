"""One decoding step of a rollout: ids -> logits -> sampled ids and entropy, with a separate random draw for each row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from homing.lm.decode_token import Steps
from homing.lm.model import Decoder
from homing.lm.model.attention import RowCache
from homing.lm.rl.named_random import pick_rows

__all__ = ["Decoding"]


class Decoding:
    """Decoding of a fixed number of rows, eagerly or with CUDA graphs; see `lm.decode`."""

    def __init__(
        self, model: Decoder, cache: RowCache, *, temperature: float, top_k: int, is_captured: bool,
        notify: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.cache = cache
        self._draws_B = torch.zeros(len(cache.places_B), dtype=torch.int64, device=model.device)
        # Not a bound method: a reference cycle would keep all this memory until the garbage collector runs.
        pick = partial(_pick, draws_B=self._draws_B, temperature=temperature, top_k=top_k)
        self._steps = Steps(model, cache, pick, is_captured=is_captured, notify=notify)

    @property
    def is_captured(self) -> bool:
        return self._steps.is_captured

    def step(self, ids_B: Tensor, places_B: Tensor, draws_B: Tensor, *, furthest: int) -> tuple[Tensor, Tensor]:
        """Read `ids_B` at `places_B`, none past `furthest`; return sampled ids and their entropy in nats.

        Both are buffers that the next step may overwrite.
        """
        self._draws_B.copy_(draws_B, non_blocking=True)
        return self._steps.step(ids_B, places_B, furthest=furthest)


def _pick(logits_BV: Tensor, *, draws_B: Tensor, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    logs_BV = torch.log_softmax(logits_BV, dim=-1)
    # A probability of 0 has an infinite logarithm, but contributes nothing.
    entropy_B = -(logs_BV.exp() * logs_BV.clamp(min=-1e4)).sum(dim=-1)
    return pick_rows(logits_BV, draws_B, temperature=temperature, top_k=top_k), entropy_B
