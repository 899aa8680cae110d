"""Computes the loss (in nats) of selected tokens, many rows at a time. All evaluations without sampling use this.

    rows of ids -> batched by similar length, padded on the right -> the model -> nats of the targets, in input order

A row begins at position 0, so padding after it changes nothing. Memory use depends on the number of tokens, not rows:
about `tokens_at_a_time` tokens are computed together, and a few times as many are buffered. If memory runs out, the
batch is halved.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from homing.errors import RunFailed
from homing.lm.device import free_memory
from homing.lm.model import Decoder
from homing.lm.model.loss import IGNORED

__all__ = ["Row", "Scored", "score_rows", "windows"]

TOKENS_AT_A_TIME = {"cuda": 32768, "mps": 8192}
_TOKENS_ELSEWHERE = 4096
_LOGITS_AT_A_TIME = 2**26  # maximum number of logits at a time, if they are needed for all positions
_BATCHES_WAITING = 8


@dataclass(frozen=True)
class Row:
    """A row of at most context + 1 ids.

    Each of `ids[1:]` is predicted from the ids before it. Only those marked in `is_target` count.
    """

    ids: Sequence[int]
    is_target: NDArray[np.bool_]  # has the same length as `ids`; the first id is never a target


@dataclass(frozen=True)
class Scored:
    """The nats of one row's targets, in order, and whether each target was the most likely token."""

    nats: NDArray[np.float64]
    is_likeliest: NDArray[np.bool_]  # empty unless requested


def windows(ids: Sequence[int], context: int, stride: int) -> Iterator[Row]:
    """Split a text of any length into overlapping rows of at most `context` inputs.

    Each id except the first is a target exactly once. After the first row, each target is predicted from at least
    `context - stride` ids.
    """
    done = 1
    while done < len(ids):
        end = min(len(ids), (context + 1) if done == 1 else done + stride)
        start = max(0, end - context - 1)
        is_target = np.zeros(end - start, dtype=bool)
        is_target[done - start :] = True
        yield Row(ids[start:end], is_target)
        done = end


@torch.no_grad()
def score_rows(
    model: Decoder, rows: Iterable[Row], *, wants_likeliest: bool = False, tokens_at_a_time: int = 0,
    notify: Callable[[str], None] = lambda done: None,
) -> Iterator[Scored]:  # fmt: skip
    """Yield the scores of each row, in input order.

    `notify` reports progress after each batch, because many batches run before the first scores are yielded.
    """
    most = tokens_at_a_time or TOKENS_AT_A_TIME.get(model.device.type, _TOKENS_ELSEWHERE)
    if wants_likeliest:
        most = min(most, max(1, _LOGITS_AT_A_TIME // model.shape.vocab_size))
    coming, num_done = iter(rows), 0
    while waiting := _take(coming, most * _BATCHES_WAITING):
        order = sorted(range(len(waiting)), key=lambda number: len(waiting[number].ids))
        scored: list[Scored | None] = [None] * len(waiting)
        for numbers in _batches(order, waiting, most):
            batch = _score([waiting[number] for number in numbers], model, wants_likeliest)
            for number, one in zip(numbers, batch, strict=True):
                scored[number] = one
            num_done += sum(len(one.nats) for one in batch)
            notify(f"{num_done:,} tokens")
        yield from (one for one in scored if one is not None)


def _take(coming: Iterator[Row], most: int) -> list[Row]:
    taken: list[Row] = []
    total = 0
    for row in islice(coming, most):
        taken.append(row)
        total += len(row.ids)
        if total >= most:
            break
    return taken


def _batches(order: list[int], rows: list[Row], most: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for number in order:  # rows are sorted by length, so each row is at least as long as those already in the batch
        if batch and (len(batch) + 1) * len(rows[number].ids) > most:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _score(rows: list[Row], model: Decoder, wants_likeliest: bool) -> list[Scored]:
    try:
        return _compute(rows, model, wants_likeliest)
    except torch.OutOfMemoryError as error:
        problem = str(error).splitlines()[0]
    if len(rows) == 1:
        raise RunFailed(
            what=f"Out of memory on a single row of {len(rows[0].ids):,} tokens.",
            why=problem,
            fix="Use a smaller window (--window TOKENS) or a different device (--device cpu)",
        )
    free_memory()
    half = len(rows) // 2
    return _score(rows[:half], model, wants_likeliest) + _score(rows[half:], model, wants_likeliest)


def _compute(rows: list[Row], model: Decoder, wants_likeliest: bool) -> list[Scored]:
    longest = max(len(row.ids) for row in rows)
    ids_BT = np.zeros((len(rows), longest), dtype=np.int64)
    is_target_BT = np.zeros((len(rows), longest), dtype=bool)
    for number, row in enumerate(rows):
        ids_BT[number, : len(row.ids)] = row.ids
        is_target_BT[number, : len(row.ids)] = row.is_target
    all_BT, wanted_BT = torch.from_numpy(ids_BT).to(model.device), torch.from_numpy(is_target_BT[:, 1:])
    read_BT, targets_BT = all_BT[:, :-1], all_BT[:, 1:].masked_fill(~wanted_BT.to(model.device), IGNORED)
    if wants_likeliest:
        logits_BTV = model(read_BT)
        logs_BT = torch.log_softmax(logits_BTV, dim=-1).gather(2, targets_BT.clamp(min=0).unsqueeze(2))
        nats_BT, is_best_BT = -logs_BT.squeeze(2), logits_BTV.argmax(dim=-1) == targets_BT
        best = is_best_BT.cpu().numpy()
    else:
        nats_BT, best = model.token_losses(read_BT, targets_BT), None
    nats, wanted = nats_BT.cpu().double().numpy(), wanted_BT.numpy()
    none = np.zeros(0, dtype=bool)
    return [
        Scored(nats[number][wanted[number]], none if best is None else best[number][wanted[number]])
        for number in range(len(rows))
    ]
