"""Named random numbers: each depends only on (seed, purpose, numbers), not on earlier draws.

    numbers("sample", seed, step, prompt, sample)  ->  a Philox stream  ->  31-bit integers

So a run draws the same numbers even if it is resumed, batched differently or run on a different number of ranks. Tokens
are sampled with integer arithmetic: probabilities are converted to integers, which have the same cumulative sums in any
order of addition, so that all devices agree.

Shapes: B rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from homing.lm.generate.pick_token import BITS, draw_candidates

__all__ = ["BITS", "draws", "pick_rows", "source"]


def source(*name: object) -> np.random.Generator:
    """Return a random generator, seeded only by `name`, for generating and shuffling questions."""
    return np.random.Generator(_philox(name))


def draws(count: int, *name: object) -> NDArray[np.int64]:
    """Return `count` integers of BITS bits.

    They come from the bit generator's raw output, which numpy guarantees never to change.
    """
    raw: NDArray[np.uint64] = _philox(name).random_raw(count)
    return (raw >> np.uint64(64 - BITS)).astype(np.int64)


def pick_rows(logits_BV: Tensor, draws_B: Tensor, *, temperature: float, top_k: int) -> Tensor:
    """Sample one id per row, using that row's random draw. Temperature 0 picks the most likely id."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    candidates_BC, ids_BC = logits_BV, None
    if 0 < top_k < logits_BV.shape[1]:
        candidates_BC, ids_BC = logits_BV.topk(top_k, dim=-1)
    picked_B1 = draw_candidates(torch.softmax(candidates_BC / temperature, dim=-1), draws_B.unsqueeze(1))
    return (picked_B1 if ids_BC is None else ids_BC.gather(1, picked_B1)).squeeze(1)


def _philox(name: tuple[object, ...]) -> np.random.Philox:
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))
