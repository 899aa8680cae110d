"""Computes loss on held-out text: nats per token, perplexity, and bits per byte (independent of the tokenizer).

    bits per byte = nats of the text tokens / ln 2 / their UTF-8 bytes

Special tokens have no bytes, so bits per byte excludes them; the plain loss counts every target. The rows are always
the same: the first rows of a fixed permutation of the split, so that any number of them is a representative sample.

The bigram baseline, which a model must beat, is the loss when each token is predicted from the previous one alone.

    P(b | a) = (pairs (a, b) + k P(b)) / (pairs that begin with a + k)

Pairs are counted on train, and the loss is measured on val. Several values of k are tried and the best one on val is
used, so that the baseline is as low as a bigram model can get. A model with a higher loss predicts worse than a table
of token pairs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from homing.errors import DataError
from homing.lm.data.shards.pack_text import PackedStream, check_ids
from homing.lm.data.shards.read_shards import TokenSplit, open_split, read_manifest
from homing.lm.model import Decoder
from homing.lm.tokenizer import load_tokenizer
from homing.lm.train.distributed.ranks import ALONE, Ranks
from homing.wire import file_names

__all__ = ["Bigram", "Evaluation", "bigram_entropy", "bigram_nats", "evaluate"]

_IGNORED = -100
_ORDER_SEED = 0
_REPORT_EVERY_S = 20.0
# values of k to try; the unigram prior counts as much as k observations
_PRIOR_WEIGHTS = tuple(2.0**power for power in range(-3, 11))
_CHUNK_TOKENS = 4 * 2**20


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per target, lower is better; NaN or infinite if the model diverged
    bits_per_byte: float | None  # None if the targets have no bytes
    num_tokens: int
    more: dict[str, float] = field(default_factory=dict)  # the phase's extra metrics, by name in metrics.jsonl

    is_in_nats: bool = True  # False if the loss is not in nats; then there is no perplexity
    exam: str = ""  # identifies the random subset that was evaluated; losses on different subsets cannot be compared

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
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Evaluate on about `num_tokens` targets (0: the whole split). `notify(rows done, total rows)` reports progress.

    All `ranks` must call this. Each evaluates a part of the rows, and all return the same.
    """
    context, device = model.shape.context, model.device
    stream = PackedStream(split, seed=_ORDER_SEED)
    num_targets = min(num_tokens or stream.epoch_tokens, stream.epoch_tokens - 1)
    num_rows = -(-num_targets // context)
    rows_at_a_time = min(rows_at_a_time, -(-num_rows // ranks.count))
    bytes_of_V = torch.tensor(token_bytes, dtype=torch.int64, device=device)
    sums, reported_at = [], time.monotonic()
    for number, is_counted in ranks.turns(-(-num_rows // rows_at_a_time)):
        row = number * rows_at_a_time
        rows = min(rows_at_a_time, num_rows - row)
        ids = stream.rows(row, rows, context)
        check_ids(ids, model.shape.vocab_size, split.name)
        tokens = torch.from_numpy(ids).long()
        ids_BT, targets_BT = tokens[:-1].view(rows, context), tokens[1:].clone()
        # After the end of the split, the stream continues with a second epoch, whose targets must not be counted.
        targets_BT[max(0, stream.epoch_tokens - 1 - row * context) :] = _IGNORED
        ids_BT, targets_BT = ids_BT.to(device), targets_BT.view(rows, context).to(device)
        losses_BT = model.token_losses(ids_BT, targets_BT)
        bytes_BT = bytes_of_V[targets_BT.clamp(min=0)] * (targets_BT != _IGNORED)
        text_nats = torch.where(bytes_BT > 0, losses_BT, 0.0).sum()
        counts = ((targets_BT != _IGNORED).sum().float(), bytes_BT.sum().float())
        sums.append(torch.stack([losses_BT.sum(), text_nats, *counts]) * is_counted)
        if time.monotonic() - reported_at > _REPORT_EVERY_S:
            notify(row + rows, num_rows)
            reported_at = time.monotonic()
    # Copy the sums to the host once, at the end, and add them there in double precision, because a sum of a million
    # fp32 terms would lose the last digits.
    own = torch.stack(sums).cpu().double().sum(dim=0).tolist()
    nats, text_nats_sum, count, num_bytes = ranks.sums(own)
    bits_per_byte = text_nats_sum / math.log(2) / num_bytes if num_bytes else None
    return Evaluation(loss=nats / count, bits_per_byte=bits_per_byte, num_tokens=int(count))


# -- bigram baseline ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bigram:
    nats: float  # mean nats per token over all targets, like the loss
    bits_per_byte: float  # counts text tokens only
    num_tokens: int


def bigram_entropy(data_dir: Path) -> Bigram:
    """Return the bigram baseline for the val split of a prepared data directory."""
    manifest = read_manifest(data_dir)
    train, val = (open_split(data_dir, manifest, name) for name in ("train", "val"))
    if val.num_tokens < 2:
        raise DataError(
            what=f"The val split in {data_dir} is too small to evaluate on.",
            why=f"It needs at least 2 tokens, but has only {val.num_tokens}.",
            fix="Raise data.val_fraction, or add text under data.validation.",
        )
    targets = np.concatenate(val.shards).astype(np.int64)
    nats = bigram_nats(train, targets, manifest.vocab_size)
    token_bytes = np.array(load_tokenizer(data_dir / file_names.TOKENIZER).token_bytes(), dtype=np.int64)
    bytes_of_targets = token_bytes[targets[1:]]
    text_nats, num_bytes = float(nats[bytes_of_targets > 0].sum()), int(bytes_of_targets.sum())
    return Bigram(
        nats=float(nats.mean()),
        bits_per_byte=text_nats / math.log(2) / num_bytes if num_bytes else 0.0,
        num_tokens=len(nats),
    )


def bigram_nats(train: TokenSplit, val: NDArray[np.int64], vocab_size: int) -> NDArray[np.float64]:
    """Return the loss (in nats) of each token in val[1:], given the previous token.

    Only pairs that occur in val are counted, chunk by chunk, because a table of all pairs would have vocab_size squared
    entries.
    """
    wanted, place = np.unique(val[:-1] * vocab_size + val[1:], return_inverse=True)
    pairs = np.zeros(len(wanted), dtype=np.int64)
    firsts, unigrams = np.zeros(vocab_size, dtype=np.int64), np.zeros(vocab_size, dtype=np.int64)
    for chunk in _chunks(train):
        unigrams += np.bincount(chunk[1:], minlength=vocab_size)
        firsts += np.bincount(chunk[:-1], minlength=vocab_size)
        seen = chunk[:-1] * vocab_size + chunk[1:]
        at = np.minimum(np.searchsorted(wanted, seen), len(wanted) - 1)
        pairs += np.bincount(at[wanted[at] == seen], minlength=len(wanted))
    # Because of add-one smoothing, a token of val that is missing from train is improbable rather than impossible.
    unigram = (unigrams + 1.0) / (unigrams.sum() + vocab_size)
    before, after = val[:-1], val[1:]
    tried = (-np.log((pairs[place] + k * unigram[after]) / (firsts[before] + k)) for k in _PRIOR_WEIGHTS)
    return min(tried, key=lambda nats: float(nats.mean()))


def _chunks(split: TokenSplit) -> Iterator[NDArray[np.int64]]:
    """Yield chunks that begin with the last token of the previous chunk, so that no pair is lost between chunks."""
    last = np.empty(0, dtype=np.int64)
    for shard in split.shards:
        for start in range(0, len(shard), _CHUNK_TOKENS):
            chunk = np.concatenate([last, shard[start : start + _CHUNK_TOKENS].astype(np.int64)])
            last = chunk[-1:]
            yield chunk
