"""Which question is asked when: prompt number n -> task and the how-manieth of that task, from the weights alone.

Prompts come in blocks. Each block has of each task as many as its weight says, to the nearest whole one, in an order
drawn by (seed, block); so the shares are kept in every stretch of training, and any n can be asked for without those
before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from homing.errors import UsageError
from homing.lm.rl.draws import source

__all__ = ["Order"]

_BLOCK = 256


class Order:
    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        self._seed = seed
        self._quotas = _quotas(weights)

    def at(self, number: int) -> tuple[int, int]:
        """(which task, how many of its questions were asked before)"""
        block, place = divmod(number, _BLOCK)
        tasks = [task for task, quota in enumerate(self._quotas) for _ in range(quota)]
        order = source("tasks", self._seed, block).permutation(_BLOCK)
        task = tasks[int(order[place])]
        before = sum(tasks[int(at)] == task for at in order[:place])
        return task, block * self._quotas[task] + before


def _quotas(weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to a block, each as near to its share as can be: the largest remainders go up."""
    shares = [weight / sum(weights) * _BLOCK for weight in weights]
    quotas = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda task: (quotas[task] - shares[task], task))
    for task in by_remainder[: _BLOCK - sum(quotas)]:
        quotas[task] += 1
    if 0 in quotas:
        raise UsageError(
            what="A task of the rl phase would never be asked.",
            why=f"Its weight is less than 1 in {_BLOCK} of all: {', '.join(f'{weight:g}' for weight in weights)}.",
            fix="Raise its weight, or leave the task out.",
        )
    return quotas
