"""Implements communication between the ranks, the processes (one per GPU) that train one model together.

    agree           broadcast rank 0's decisions: at which step to end, whether to stop, the micro-batch size
    worst           get the maximum status code of all ranks, before all of them act on it
    add_up          all-reduce gradients and losses by summing, as each loss is already its share of the step's mean
    share, gather   assign each rank its part of the Muon matrices, and send the results to all ranks

Every rank holds the same weights and optimizer state, so rank 0 alone writes checkpoints, and a run can resume with a
different number of ranks. Decisions are exchanged between CPUs (gloo) and never wait for a GPU; gradients are exchanged
between GPUs (NCCL) if there are any. With a single rank, the usual case, there is no communication.

A rank is told its number and how to reach the others by environment variables (see `start_ranks`). If the ranks of a
step lose each other, an error follows within `_TIMEOUT`, and torch's flight recorder writes the last collectives of
each rank to logs/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from homing.errors import RunFailed, UsageError
from homing.lm.train.distributed.start_ranks import COUNT, HOST, LISTEN_FD, LOCAL_COUNT, LOCAL_RANK, PORT, RANK
from homing.wire import file_names

__all__ = ["ALONE", "Ranks", "joined_ranks"]

# How long ranks wait for each other within a step: longer than compiling takes, because one rank may find less in its
# cache than another.
_TIMEOUT = datetime.timedelta(minutes=30)
# How long they wait for a decision of rank 0, which also evaluates and saves while the others wait.
_DECISION_TIMEOUT = datetime.timedelta(hours=2)
_NUM_RECORDED = 2000  # number of collectives that torch's flight recorder keeps; the memory is negligible
_BUCKET_BYTES = 64 * 2**20  # maximum size of a group of small gradients that are reduced together
Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    count: int = 1
    local_rank: int = 0  # number of this rank among those of the same machine, and thereby its GPU
    local_count: int = 1
    decisions: dist.ProcessGroup | None = None  # the group in which `agree` and `worst` communicate

    @staticmethod
    def from_env() -> Ranks:
        """Return this process's rank, read from the environment variables that `start_ranks` or torchrun sets.

        Without these variables, the process is rank 0 of 1. No messages are exchanged with other ranks.
        """
        if RANK not in os.environ or COUNT not in os.environ:
            return ALONE
        given = {name: os.environ.get(name, os.environ[other]) for name, other in
                 ((RANK, RANK), (COUNT, COUNT), (LOCAL_RANK, RANK), (LOCAL_COUNT, COUNT))}  # fmt: skip
        try:
            ranks = Ranks(int(given[RANK]), int(given[COUNT]), int(given[LOCAL_RANK]), int(given[LOCAL_COUNT]))
        except ValueError:
            ranks = Ranks(-1)
        missing = [name for name in (HOST, PORT) if ranks.count > 1 and not os.environ.get(name)]
        is_right = 0 <= ranks.rank < ranks.count and 0 <= ranks.local_rank < ranks.local_count <= ranks.count
        if missing or not is_right:
            wrong = ", ".join(f"{name}={number}" for name, number in given.items())
            raise UsageError(
                what="The environment variables of this rank are incomplete or contradictory.",
                why=f"{' and '.join(missing)} not set." if missing else wrong,
                fix=f"Start the trainer with torchrun, or unset {RANK} and {COUNT} to let homing start the ranks.",
            )
        return ranks

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which makes decisions, reports and writes files for all ranks."""
        return self.rank == 0

    def agree(self, value: Value) -> Value:
        """Return rank 0's value on every rank, by broadcasting it."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"), group=self.decisions)
        return box[0]

    def worst(self, number: int, *, within_s: float = 0.0) -> int:
        """Return the maximum of `number` over all ranks.

        Raises RunFailed if a rank does not respond within `within_s` seconds. With 0, the timeout of the process group
        applies.
        """
        if self.count == 1:
            return number
        held, begun = torch.tensor(number, device="cpu"), time.monotonic()
        work = dist.all_reduce(held, op=dist.ReduceOp.MAX, async_op=True, group=self.decisions)
        try:
            work.wait(datetime.timedelta(seconds=within_s)) if within_s else work.wait()
        except RuntimeError as exc:
            if not within_s or time.monotonic() - begun < within_s:
                raise  # the error is not a timeout: another rank has exited, and the launcher reports the cause
            raise RunFailed(
                what=f"Another rank has not responded for {within_s / 60:.0f} minutes.",
                why="That rank is still compiling, or it is stuck.",
                fix="Start the run again. If the same error occurs again, set train.compile: off.",
            ) from exc
        return int(held)

    def add_up(self, model: nn.Module, total: Tensor) -> None:
        """Replace gradients and `total` by their sums over all ranks, in place.

        If the model is divided among the ranks, FSDP has already added up the gradients in the backward pass.
        """
        if self.count == 1:
            return
        is_divided = getattr(model, "shards", None) is not None
        grads = [p.grad for p in model.parameters() if p.grad is not None and not is_divided]
        for bucket in _buckets(grads):
            flat = torch.cat([grad.flatten() for grad in bucket]) if len(bucket) > 1 else bucket[0]
            dist.all_reduce(flat)
            if len(bucket) > 1:
                parts = flat.split([grad.numel() for grad in bucket])
                torch._foreach_copy_(bucket, [part.view_as(grad) for part, grad in zip(parts, bucket, strict=True)])
        dist.all_reduce(total)

    def turns(self, num: int) -> Iterator[tuple[int, bool]]:
        """Yield (index, whether it counts) for this rank's share of `num` items, to be processed in lockstep.

        All ranks get equally many, because FSDP gathers weights from all of them in every forward pass. The surplus is
        the first item again, which does not count.
        """
        for index in range(self.rank, -(-num // self.count) * self.count, self.count):
            yield (index, True) if index < num else (0, False)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of these numbers over all ranks, in double precision."""
        held = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        if self.count > 1:
            dist.all_reduce(held, group=self.decisions)
        return [float(number) for number in held]

    def share(self, num: int) -> slice:
        """Return the slice of `num` items that this rank handles. Slices are equally long; the last may be shorter."""
        each = -(-num // self.count)
        return slice(min(num, self.rank * each), min(num, (self.rank + 1) * each))

    def gather(self, mine: Tensor, num: int, *, is_rehearsed: bool = False) -> Tensor:
        """Return all `num` items, by concatenating the tensors `mine` of all ranks along the first dimension.

        If `is_rehearsed`, return zeros of the same shape without communicating.
        """
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
def joined_ranks(*, is_cuda: bool, run_dir: Path) -> Iterator[Ranks]:
    """Wait until all ranks have started, and join their process group for the duration of the context."""
    ranks = Ranks.from_env()
    if ranks.count == 1:
        yield ranks
        return
    _record_collectives(run_dir / file_names.LOGS)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo", store=_store(ranks), init_method=None if _is_ours() else "env://",
        rank=ranks.rank, world_size=ranks.count, timeout=_TIMEOUT,
    )  # fmt: skip
    try:
        yield dataclasses.replace(ranks, decisions=dist.new_group(backend="gloo", timeout=_DECISION_TIMEOUT))
    finally:
        dist.destroy_process_group()


def _is_ours() -> bool:
    return LISTEN_FD in os.environ


def _store(ranks: Ranks) -> Any:  # torch does not export the type of a store
    """Return the store through which the ranks find each other; None if torch gets it from the environment."""
    if not _is_ours():
        return None
    fd = int(os.environ[LISTEN_FD]) if ranks.is_first else None
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ[HOST], int(os.environ[PORT]), ranks.count, is_master=ranks.is_first, timeout=_TIMEOUT,
        master_listen_fd=fd,
    )  # fmt: skip


def _record_collectives(logs: Path) -> None:
    """Turn on torch's flight recorder: if a collective times out, each rank writes its last collectives to `logs`.

    `torchfrtrace` reads these files. Variables that the user has set take precedence.
    """
    logs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_NUM_RECORDED))
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(logs / "flight-recorder-"))  # torch appends the rank
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of gradients to reduce together, in the same order on every rank.

    A gradient that fills a group by itself is reduced without being copied.
    """
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
