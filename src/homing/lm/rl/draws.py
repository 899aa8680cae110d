"""Random numbers by name: what is drawn depends on (seed, purpose, numbers) alone, and on nothing drawn before.

    numbers("sample", seed, step, prompt, sample)  ->  a Philox stream  ->  31-bit integers

So a run that is resumed, cut into other pieces or spread over other ranks draws the same. Tokens are picked in whole
numbers: probabilities become integers, whose running sum is exact in any order, so that no device adds them otherwise.

Shapes: B rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BITS", "draws", "pick_rows", "source"]

BITS = 31  # two of them multiply inside 64 bits


def source(*name: object) -> np.random.Generator:
    """A generator for making things up; the same for the same name."""
    return np.random.Generator(_philox(name))


def draws(count: int, *name: object) -> NDArray[np.int64]:
    """`count` integers of BITS bits. Raw words of the stream: numpy promises never to change those."""
    raw: NDArray[np.uint64] = _philox(name).random_raw(count)
    return (raw >> np.uint64(64 - BITS)).astype(np.int64)


def pick_rows(logits_BV: Tensor, draws_B: Tensor, *, temperature: float, top_k: int) -> Tensor:
    """One id for each row, by its own draw; temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    candidates_BC, ids_BC = logits_BV, None
    if 0 < top_k < logits_BV.shape[1]:
        candidates_BC, ids_BC = logits_BV.topk(top_k, dim=-1)
    shares_BC = (torch.softmax(candidates_BC / temperature, dim=-1) * 2.0**BITS).to(torch.int64)
    sums_BC = shares_BC.cumsum(dim=-1)
    at_B1 = (draws_B.unsqueeze(1) * sums_BC[:, -1:]) >> BITS  # below the sum of all
    # The first whose running sum is past the draw; logits that are no numbers would point behind the last one.
    picked_B1 = torch.searchsorted(sums_BC, at_B1, right=True).clamp(max=sums_BC.shape[1] - 1)
    return (picked_B1 if ids_BC is None else ids_BC.gather(1, picked_B1)).squeeze(1)


def _philox(name: tuple[object, ...]) -> np.random.Philox:
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))
