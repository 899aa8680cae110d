"""Activation checkpointing: activations are recomputed in backward instead of kept, trading time for memory.

    none   every block keeps what its backward needs
    half   every second block keeps only its input: about half of the memory, a sixth more compute
    all    every block keeps only its input: least memory, a third more compute (half more if weights are frozen)

The second forward is bit-identical to the first, so gradients do not change. No random generator needs to be rewound:
blocks use only stateless ones (see `frozen_linear` on dropout).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

__all__ = ["RECOMPUTES", "is_recomputed", "recomputed"]

RECOMPUTES = {"none": 0, "half": 2, "all": 1}  # recompute every n-th block


def is_recomputed(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def recomputed(run: Callable[..., Any], number: int, every: int) -> Callable[..., Any]:
    """Return `run`, wrapped so that backward recomputes it if block `number` is among those to recompute."""
    if not is_recomputed(number, every):
        return run
    return functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
