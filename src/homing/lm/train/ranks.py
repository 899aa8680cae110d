"""The processes that train one model together, one per card: who am I, and the few things said between them.

    share    which part of a list of equal things is mine
    gather   everybody's parts, in order, to everybody

Alone (the usual case) nothing is sent and nothing is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

__all__ = ["Ranks"]


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    count: int = 1

    def share(self, num: int) -> slice:
        """The same number for all but the last ones, who may have fewer."""
        each = -(-num // self.count)
        return slice(min(num, self.rank * each), min(num, (self.rank + 1) * each))

    def gather(self, mine: Tensor, num: int) -> Tensor:
        """All `num` things along the first side, of which `mine` are this rank's share."""
        if self.count == 1:
            return mine
        each = -(-num // self.count)
        whole = mine.new_empty(each * self.count, *mine.shape[1:])
        padded = whole.new_zeros(each, *mine.shape[1:])
        padded[: len(mine)] = mine
        dist.all_gather_into_tensor(whole, padded)
        return whole[:num]
