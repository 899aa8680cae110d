"""A model whose parameters are divided among ranks by rows, and the rows that this rank holds of each tensor.

    parameter (R rows)  ->  rank 0: rows [0, r), rank 1: rows [r, 2r), ..., the last may have fewer, r = ceil(R / ranks)

torch's FSDP2 (`fully_shard`) divides the parameters (see `train.distributed.shard_model`); outside of a forward or
backward pass they are DTensors. What belongs to a parameter is divided in the same way: its gradient and its optimizer
state. Everything here also works for a model that is not divided, of which this rank holds all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Part", "Shards", "local", "part_of", "put"]


@dataclass(frozen=True)
class Shards:
    """How a model is divided: the ranks that hold one copy together, and this rank's number among them."""

    kind: str  # zero2 | zero3 | hsdp
    group: dist.ProcessGroup
    rank: int
    count: int
    is_first_copy: bool  # False if another group of ranks (hsdp) holds the same rows and writes them to disk

    def rows(self, num_rows: int, rank: int | None = None) -> slice:
        """Return the rows of a tensor that a rank holds, by default this one."""
        each, rank = -(-num_rows // self.count), self.rank if rank is None else rank
        return slice(min(num_rows, rank * each), min(num_rows, (rank + 1) * each))


@dataclass(frozen=True)
class Part:
    """This rank's rows of a tensor, without padding rows, and their place in the whole tensor."""

    shape: tuple[int, ...]  # shape of the whole tensor
    first_row: int
    tensor: Tensor
    is_mine: bool = True  # False if another rank writes these rows to disk

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.first_row : self.first_row + len(self.tensor)] if self.shape else whole


def local(tensor: Tensor) -> Tensor:
    """Return the rows that this rank holds, as a plain tensor that shares their memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, shards: Shards | None, num_rows: int, most_rows: int | None = None) -> Part:
    """Return the place of `tensor`, this rank's rows of a tensor with `num_rows` rows.

    `most_rows` cuts off padding rows at the end of the whole tensor.
    """
    if not tensor.dim():
        return Part((), 0, tensor, shards is None or (shards.rank == 0 and shards.is_first_copy))
    rows = slice(0, num_rows) if shards is None else shards.rows(num_rows)
    assert rows.stop - rows.start == len(tensor), "FSDP has divided a tensor in another way"
    kept = num_rows if most_rows is None else most_rows
    cut = tensor[: max(0, kept - rows.start)]
    return Part((kept, *tensor.shape[1:]), rows.start, cut, shards is None or shards.is_first_copy)


@torch.no_grad()
def put(part: Part, whole: Tensor) -> None:
    """Copy this rank's rows of `whole` into the part."""
    part.tensor.copy_(part.of(whole))
