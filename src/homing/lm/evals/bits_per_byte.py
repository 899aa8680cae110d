"""Loss on held-out text: nats per token, perplexity, and bits per byte, which does not depend on the tokenizer.

    bits per byte = nats of the text tokens / ln 2 / their UTF-8 bytes

Special tokens have no bytes, so neither their nats nor their bytes count; the plain loss counts every target. The rows
are always the same: a fixed permutation of the split, from its start, so that a part of it is a fair sample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from homing.lm.data.shards.pack_text import PackedStream, check_ids
from homing.lm.data.shards.read_shards import TokenSplit
from homing.lm.model import Decoder

__all__ = ["Evaluation", "evaluate"]

_IGNORED = -100
_ORDER_SEED = 0
_REPORT_EVERY_S = 20.0


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per target, lower is better; NaN or infinite if the model diverged
    bits_per_byte: float | None  # None if the targets have no bytes
    num_tokens: int
    more: dict[str, float] = field(default_factory=dict)  # extra metrics of the phase, by their name in metrics.jsonl

    is_in_nats: bool = True  # False: another kind of loss, without perplexity
    exam: str = ""  # identifies a random subset that was evaluated on: losses on different ones cannot be compared

    @property
    def perplexity(self) -> float:
        if not self.is_in_nats:
            return math.nan
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: Decoder,
    split: TokenSplit,
    *,
    token_bytes: Sequence[int],
    num_tokens: int,
    rows_at_a_time: int,
    notify: Callable[[int, int], None] = lambda done, of: None,
) -> Evaluation:
    """Evaluate on about `num_tokens` targets (0: the whole split). `tell(rows done, rows)` reports progress."""
    context, device = model.shape.context, model.device
    stream = PackedStream(split, seed=_ORDER_SEED)
    num_targets = min(num_tokens or stream.epoch_tokens, stream.epoch_tokens - 1)
    num_rows = -(-num_targets // context)
    bytes_of_V = torch.tensor(token_bytes, dtype=torch.int64, device=device)
    sums, reported_at = [], time.monotonic()
    for row in range(0, num_rows, rows_at_a_time):
        rows = min(rows_at_a_time, num_rows - row)
        ids = stream.rows(row, rows, context)
        check_ids(ids, model.shape.vocab_size, split.name)
        tokens = torch.from_numpy(ids).long()
        ids_BT, targets_BT = tokens[:-1].view(rows, context), tokens[1:].clone()
        # The stream continues with a second epoch after the end of the split; do not count that.
        targets_BT[max(0, stream.epoch_tokens - 1 - row * context) :] = _IGNORED
        ids_BT, targets_BT = ids_BT.to(device), targets_BT.view(rows, context).to(device)
        losses_BT = model.token_losses(ids_BT, targets_BT)
        bytes_BT = bytes_of_V[targets_BT.clamp(min=0)] * (targets_BT != _IGNORED)
        text_nats = torch.where(bytes_BT > 0, losses_BT, 0.0).sum()
        counts = ((targets_BT != _IGNORED).sum().float(), bytes_BT.sum().float())
        sums.append(torch.stack([losses_BT.sum(), text_nats, *counts]))
        if time.monotonic() - reported_at > _REPORT_EVERY_S:
            notify(row + rows, num_rows)
            reported_at = time.monotonic()
    # Read once at the end and sum on the host in double: a million fp32 terms would lose the last digits.
    nats, text_nats_sum, count, num_bytes = torch.stack(sums).cpu().double().sum(dim=0).tolist()
    bits_per_byte = text_nats_sum / math.log(2) / num_bytes if num_bytes else None
    return Evaluation(loss=nats / count, bits_per_byte=bits_per_byte, num_tokens=int(count))
