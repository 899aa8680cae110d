"""Activations that are not kept but computed a second time in backward: memory for time.

    none   every block keeps what its backward needs
    half   every second block keeps its input only: about half of the memory, a sixth more work
    all    every block keeps its input only: least memory, a third more work (half more where weights are frozen)

The second forward computes the same bits as the first, so gradients do not change. No generator is rewound for it:
nothing in a block draws from one that carries state (see `frozen` on dropout).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

__all__ = ["RECOMPUTES", "is_recomputed", "recomputed"]

RECOMPUTES = {"none": 0, "half": 2, "all": 1}  # every how many blocks


def is_recomputed(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def recomputed(run: Callable[..., Any], number: int, every: int) -> Callable[..., Any]:
    """`run` for block `number`, computed again in backward where it is that block's turn."""
    if not is_recomputed(number, every):
        return run
    return functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
