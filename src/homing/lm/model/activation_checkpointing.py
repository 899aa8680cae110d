"""Activation checkpointing recomputes activations in the backward pass instead of keeping them, to save memory.

    none   every block keeps what its backward pass needs
    half   every second block keeps only its input: about half of the memory, a sixth more compute
    all    every block keeps only its input: least memory, a third more compute (half more if weights are frozen)

The second forward pass is bit-identical to the first, so gradients do not change. No random generator needs to be
rewound, because blocks use only stateless generators (see `frozen_linear` on dropout).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

__all__ = ["RECOMPUTES", "is_recomputed", "recomputed"]

# name of the mode -> n, where every n-th block is recomputed (0: no block)
RECOMPUTES = {"none": 0, "half": 2, "all": 1}


def is_recomputed(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def recomputed(run: Callable[..., Any], number: int, every: int) -> Callable[..., Any]:
    """Return `run`; if block `number` is to be recomputed, wrap it so that the backward pass runs it a second time."""
    if not is_recomputed(number, every):
        return run
    return functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
