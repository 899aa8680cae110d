"""The processes that train one model together, one per card: who am I, and the few things said between them.

    agree           what rank 0 decided, to everybody: where to end, whether to stop, how many rows at a time
    worst           the worst news that any rank has, before all of them act on it
    add_up          gradients and losses: sums over all ranks, as every loss is a part of the whole step's
    share, gather   a part of Muon's matrices for each, and the results to all

Every rank holds the same weights and the same optimizer state, so rank 0 alone writes checkpoints, and a run goes on
with any other number of ranks. What is decided travels between the hosts (gloo) and never waits for a card; gradients
travel between cards (NCCL) where there are any. Alone, which is usual, nothing is sent and nothing is waited for.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from homing.errors import RunFailed
from homing.lm.train.launch import COUNT, MEET, RANK

__all__ = ["ALONE", "Ranks", "joined_ranks"]

# Rank 0 evaluates and saves while the others wait; whoever watches for a stall is far quicker than this.
_TIMEOUT = datetime.timedelta(hours=2)
_BUCKET_BYTES = 64 * 2**20  # small gradients travel together
Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    count: int = 1

    @staticmethod
    def told() -> Ranks:
        """By what `launch` put into the environment; alone without that. Nobody has been met yet."""
        return Ranks(int(os.environ.get(RANK, "0")), int(os.environ.get(COUNT, "1")))

    @property
    def is_first(self) -> bool:
        """The one that decides, speaks and writes."""
        return self.rank == 0

    def agree(self, value: Value) -> Value:
        """What rank 0 has here, on every rank."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def worst(self, number: int, *, within_s: float = 0.0) -> int:
        """`within_s`: a rank that has not answered by then ends the run; 0: by the timeout of all messages."""
        if self.count == 1:
            return number
        held, begun = torch.tensor(number, device="cpu"), time.monotonic()
        work = dist.all_reduce(held, op=dist.ReduceOp.MAX, async_op=True)
        try:
            work.wait(datetime.timedelta(seconds=within_s)) if within_s else work.wait()
        except RuntimeError as exc:
            if not within_s or time.monotonic() - begun < within_s:
                raise  # another rank is gone: whoever started us knows more
            raise RunFailed(
                what=f"Another rank has not answered for {within_s / 60:.0f} minutes.",
                why="It still compiles, or hangs.",
                fix="Start the run again; if it happens again, set train.compile: off.",
            ) from exc
        return int(held)

    def add_up(self, model: nn.Module, total: Tensor) -> None:
        """Gradients of all ranks and `total` become their sums, in place."""
        if self.count == 1:
            return
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for bucket in _buckets(grads):
            flat = torch.cat([grad.flatten() for grad in bucket]) if len(bucket) > 1 else bucket[0]
            dist.all_reduce(flat)
            if len(bucket) > 1:
                parts = flat.split([grad.numel() for grad in bucket])
                torch._foreach_copy_(bucket, [part.view_as(grad) for part, grad in zip(parts, bucket, strict=True)])
        dist.all_reduce(total)

    def share(self, num: int) -> slice:
        """Which of `num` equal things are mine: the same number for all but the last ones, who may have fewer."""
        each = -(-num // self.count)
        return slice(min(num, self.rank * each), min(num, (self.rank + 1) * each))

    def gather(self, mine: Tensor, num: int, *, is_rehearsed: bool = False) -> Tensor:
        """All `num` things along the first side, of which `mine` are this rank's share. `is_rehearsed`: a tensor like
        it, and nobody is waited for."""
        if self.count == 1:
            return mine
        each = -(-num // self.count)
        padded = mine.new_zeros(each, *mine.shape[1:])
        padded[: len(mine)] = mine
        whole = mine.new_empty(each * self.count, *mine.shape[1:])
        if is_rehearsed:
            whole.zero_()
        else:
            dist.all_gather_into_tensor(whole, padded)
        return whole[:num]


ALONE = Ranks()


@contextlib.contextmanager
def joined_ranks(*, is_cuda: bool) -> Iterator[Ranks]:
    """This process among its ranks, once all of them are there."""
    ranks = Ranks.told()
    if ranks.count == 1:
        yield ranks
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo", init_method=f"file://{os.environ[MEET]}",
        rank=ranks.rank, world_size=ranks.count, timeout=_TIMEOUT,
    )  # fmt: skip
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """In order, the same on every rank; one that fills a bucket travels alone and is not copied."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        num_bytes = grad.numel() * grad.element_size()
        if bucket and size + num_bytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += num_bytes
    if bucket:
        yield bucket
