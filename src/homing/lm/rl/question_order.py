"""The order of questions: prompt number n -> a task and an index within it, derived from the weights alone.

Prompts come in blocks. In each block every task occurs according to its weight, rounded, in an order shuffled by (seed,
block). So the proportions hold throughout training, and any n can be computed without those before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from homing.errors import UsageError
from homing.lm.rl.named_random import source

__all__ = ["Order"]

_BLOCK = 256


class Order:
    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        self._seed = seed
        self._quotas = _quotas(weights)

    def at(self, number: int) -> tuple[int, int]:
        """Return (task, number of its questions before this one)."""
        block, place = divmod(number, _BLOCK)
        tasks = [task for task, quota in enumerate(self._quotas) for _ in range(quota)]
        order = source("tasks", self._seed, block).permutation(_BLOCK)
        task = tasks[int(order[place])]
        before = sum(tasks[int(at)] == task for at in order[:place])
        return task, block * self._quotas[task] + before


def _quotas(weights: Sequence[float]) -> list[int]:
    """Return integers that add up to a block, as close to the shares as possible (largest remainders round up)."""
    shares = [weight / sum(weights) * _BLOCK for weight in weights]
    quotas = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda task: (quotas[task] - shares[task], task))
    for task in by_remainder[: _BLOCK - sum(quotas)]:
        quotas[task] += 1
    if 0 in quotas:
        raise UsageError(
            what="A task of the rl phase would never be used.",
            why=f"Its weight is less than 1/{_BLOCK} of the total: {', '.join(f'{weight:g}' for weight in weights)}.",
            fix="Raise its weight, or remove the task.",
        )
    return quotas
