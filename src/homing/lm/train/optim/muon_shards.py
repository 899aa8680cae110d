"""Muon for matrices that are divided among ranks by rows. Each matrix has an owner, which orthogonalizes it.

    gradient rows -> momentum rows -> all-to-all: whole matrices to their owners -> polar factor
        -> all-to-all: rows of the updates back to their ranks -> step of the rows

The momentum stays divided by rows, so it takes a share of the memory that shrinks with the number of ranks. The two
exchanges move each matrix once in each direction, and every rank computes only the matrices that it owns. `assign`
chooses the owners such that all ranks take about equally long. Only the second moment (one number per row or column)
belongs to the owner, because it is computed from the whole update.

Shapes: M matrices of one shape, m of them owned by this rank, R rows, r rows on this rank, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from homing.lm.model.row_shards import Part, Shards, local
from homing.lm.train.optim.muon import evening_factor_, how_for, momentum_at, orthogonalize, shrink_
from homing.lm.train.optim.offload import Load, Now, Place
from homing.wire.run_json import Optimizer

__all__ = ["ShardedMuonGroup", "assign"]


def assign(shapes: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return the owner of each matrix. The most expensive matrices are assigned first, each to the least busy rank.

    The result depends only on the arguments, so all ranks compute the same.
    """
    busy = [0] * num_ranks
    owners = [0] * len(shapes)
    costs = [rows * cols * min(rows, cols) for rows, cols in shapes]
    for number in sorted(range(len(shapes)), key=lambda number: -costs[number]):
        owner = min(range(num_ranks), key=lambda rank: busy[rank])
        owners[number] = owner
        busy[owner] += costs[number]
    return owners


class ShardedMuonGroup:
    """All matrices of one shape, of which this rank holds some rows each, sorted by owner.

    Its steps are not compiled: the element-wise work on a share of the rows is short, and the matmuls are the same.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], owners: Sequence[int], spec: Optimizer, shards: Shards,
        place: Place,
    ) -> None:  # fmt: skip
        order = sorted(range(len(named)), key=lambda number: owners[number])
        self.names = [named[number][0] for number in order]
        self.owners = [owners[number] for number in order]
        self.whole: list[nn.Parameter] = [named[number][1] for number in order]
        self.spec, self.shards, self.place = spec, shards, place
        rows, cols = self.whole[0].shape
        self._counts = [self.owners.count(rank) for rank in range(shards.count)]
        self._heights = [shards.rows(rows, rank).stop - shards.rows(rows, rank).start for rank in range(shards.count)]
        mine = local(self.whole[0])
        self.momentum_MRC = place.full((len(named), *mine.shape), 0.0, torch.float32)
        self.how = how_for(rows, cols, spec, mine.device)
        sides = (rows, 1) if self.how.along == -1 else (1, cols)
        num_squares = self._counts[shards.rank] if spec.variance_beta else 0
        self.squares = torch.zeros(num_squares, *sides, device=mine.device, dtype=torch.float32)

    @property
    def parameters(self) -> list[Tensor]:
        return [local(parameter) for parameter in self.whole]

    @torch.no_grad()
    def _step(self, states: Sequence[Tensor], now: Now) -> None:
        (momentum_MrC,) = states
        momentum, rate = momentum_at(self.spec, now.num_steps), self.spec.lr * now.lr_scale * now.is_good
        g_MrC = torch.stack([self._grad(number) for number in range(len(self.whole))]).float()
        # If the step is to be skipped, replace the gradient with the momentum, so that the momentum stays unchanged.
        g_MrC = torch.where(now.is_good > 0, g_MrC, momentum_MrC)
        momentum_MrC.lerp_(g_MrC, 1.0 - momentum)
        update_mRC = orthogonalize(self._to_owners(torch.lerp(g_MrC, momentum_MrC, momentum)), self.how.kind)
        if self.spec.variance_beta:
            update_mRC = update_mRC.float()
            update_mRC = update_mRC * evening_factor_(self.squares, update_mRC, now.is_good, self.how)
        for weight_rC, update_rC in zip(self.parameters, self._to_rows(update_mRC).float(), strict=True):
            shrink_(weight_rC, update_rC, rate, self.how)
            weight_rC.sub_(update_rC * (rate * self.how.scale))

    def _grad(self, number: int) -> Tensor:
        grad = self.whole[number].grad
        assert grad is not None, f"{self.names[number]} has no gradient; call backward() before step()"
        return local(grad)

    def _to_owners(self, mine_MrC: Tensor) -> Tensor:
        """Return the whole matrices that this rank owns (m, R, C), given its rows of all matrices (M, r, C)."""
        m, (_, r, C) = self._counts[self.shards.rank], mine_MrC.shape
        received = self._exchange(
            mine_MrC.flatten(), [count * r * C for count in self._counts], [m * height * C for height in self._heights]
        )
        rows = [part.view(m, height, C) for part, height in zip(received, self._heights, strict=True)]
        return torch.cat(rows, dim=1)

    def _to_rows(self, whole_mRC: Tensor) -> Tensor:
        """Return this rank's rows of all matrices (M, r, C), given the whole matrices that it owns (m, R, C)."""
        m, _, C = whole_mRC.shape
        r = self._heights[self.shards.rank]
        sent = torch.cat([part.flatten() for part in whole_mRC.split(self._heights, dim=1)])
        received = self._exchange(
            sent, [m * height * C for height in self._heights], [count * r * C for count in self._counts]
        )
        return torch.cat([part.view(count, r, C) for part, count in zip(received, self._counts, strict=True)])

    def _exchange(self, sent: Tensor, sizes: list[int], received_sizes: list[int]) -> tuple[Tensor, ...]:
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent.contiguous(), received_sizes, sizes, group=self.shards.group)
        return received.split(received_sizes)

    def loads(self) -> list[Load]:
        return [Load([self.momentum_MRC], self._step, self.place.is_away)]

    def state(self) -> Iterator[tuple[str, Part]]:
        rows, cols = self.whole[0].shape
        first, is_mine = self.shards.rows(rows).start, self.shards.is_first_copy
        for name, momentum in zip(self.names, self.momentum_MRC, strict=True):
            yield f"{name}.momentum", Part((rows, cols), first, momentum, is_mine)
        if not self.spec.variance_beta:
            return
        shape = tuple(self.squares.shape[1:])
        owned = iter(self.squares)
        for name, owner in zip(self.names, self.owners, strict=True):
            is_owner = owner == self.shards.rank
            yield f"{name}.squares", Part(shape, 0, next(owned) if is_owner else self.squares.new_empty(0, shape[1]),
                                          is_owner and is_mine)  # fmt: skip
