"""Loss on held-out text: nats per token, perplexity, and bits per byte, which does not depend on the tokenizer.

    bits per byte = nats of the text tokens / ln 2 / their UTF-8 bytes

Special tokens have no bytes, so neither their nats nor their bytes enter; the plain loss counts every target.
The rows are the same every time: one fixed permutation of the split, from its start, so that a part of it is fair.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from homing.lm.model import Decoder
from homing.lm.shards.pack import PackedStream, check_ids
from homing.lm.shards.read import TokenSplit

__all__ = ["Evaluation", "evaluate"]

_IGNORED = -100
_ORDER_SEED = 0
_TELL_EVERY_S = 20.0


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per target, less is better; not finite where the model is
    bits_per_byte: float | None  # None where the targets have no bytes
    num_tokens: int
    more: dict[str, float] = field(default_factory=dict)  # what this phase alone has, by its name in metrics.jsonl

    is_in_nats: bool = True  # False: a loss of another kind, which has no perplexity
    exam: str = ""  # on what, where that is a part drawn: losses on two parts cannot be compared

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
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Evaluation:
    """On about `num_tokens` targets (0: all of the split). `tell(rows done, rows)` is called now and then."""
    context, device = model.shape.context, model.device
    stream = PackedStream(split, seed=_ORDER_SEED)
    num_targets = min(num_tokens or stream.epoch_tokens, stream.epoch_tokens - 1)
    num_rows = -(-num_targets // context)
    bytes_of_V = torch.tensor(token_bytes, dtype=torch.int64, device=device)
    sums, told = [], time.monotonic()
    for row in range(0, num_rows, rows_at_a_time):
        rows = min(rows_at_a_time, num_rows - row)
        ids = stream.rows(row, rows, context)
        check_ids(ids, model.shape.vocab_size, split.name)
        tokens = torch.from_numpy(ids).long()
        ids_BT, targets_BT = tokens[:-1].view(rows, context), tokens[1:].clone()
        # The stream goes on after the split has been seen once; what comes then was seen, and does not count.
        targets_BT[max(0, stream.epoch_tokens - 1 - row * context) :] = _IGNORED
        ids_BT, targets_BT = ids_BT.to(device), targets_BT.view(rows, context).to(device)
        losses_BT = model.token_losses(ids_BT, targets_BT)
        bytes_BT = bytes_of_V[targets_BT.clamp(min=0)] * (targets_BT != _IGNORED)
        text_nats = torch.where(bytes_BT > 0, losses_BT, 0.0).sum()
        counts = ((targets_BT != _IGNORED).sum().float(), bytes_BT.sum().float())
        sums.append(torch.stack([losses_BT.sum(), text_nats, *counts]))
        if time.monotonic() - told > _TELL_EVERY_S:
            tell(row + rows, num_rows)
            told = time.monotonic()
    # One read at the end: summed on the host in double, for a million fp32 terms would lose the last digits.
    nats, text_nats_sum, count, num_bytes = torch.stack(sums).cpu().double().sum(dim=0).tolist()
    bits_per_byte = text_nats_sum / math.log(2) / num_bytes if num_bytes else None
    return Evaluation(loss=nats / count, bits_per_byte=bits_per_byte, num_tokens=int(count))
