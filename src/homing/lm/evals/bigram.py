"""The bigram baseline that a model must beat: how well the previous token alone predicts the next.

    P(b | a) = (pairs (a, b) + k P(b)) / (pairs that begin with a + k)

Counted on train, measured on val, with the best of several k on val, so that the baseline is as low as a bigram gets. A
model above it has learned nothing that a table of pairs does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from homing.errors import DataError
from homing.lm.data.shards.read_shards import TokenSplit, open_split, read_manifest
from homing.lm.tokenizer import load_tokenizer
from homing.wire import file_names

__all__ = ["Bigram", "bigram_entropy", "bigram_nats"]

_LEANS = tuple(2.0**power for power in range(-3, 11))  # k: how many observations the unigram prior is worth
_PIECE_TOKENS = 4 * 2**20


@dataclass(frozen=True)
class Bigram:
    nats: float  # per token, over all targets, as in the loss
    bits_per_byte: float  # over text tokens only
    num_tokens: int


def bigram_entropy(data_dir: Path) -> Bigram:
    """Return the bigram baseline on the val split of a prepared data directory."""
    manifest = read_manifest(data_dir)
    train, val = (open_split(data_dir, manifest, name) for name in ("train", "val"))
    if val.num_tokens < 2:
        raise DataError(
            what=f"The val split in {data_dir} is too small to evaluate on.",
            why=f"It holds {val.num_tokens} token.",
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
    """Return the nats of val[1:], each given the previous token.

    Only pairs that occur in val are counted, chunk by chunk: a table of all pairs would have vocab_size squared
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
    # Add-one smoothing: a token in val that is not in train is improbable, not impossible.
    unigram = (unigrams + 1.0) / (unigrams.sum() + vocab_size)
    before, after = val[:-1], val[1:]
    tried = (-np.log((pairs[place] + k * unigram[after]) / (firsts[before] + k)) for k in _LEANS)
    return min(tried, key=lambda nats: float(nats.mean()))


def _chunks(split: TokenSplit) -> Iterator[NDArray[np.int64]]:
    """Yield chunks that begin with the last token of the previous one, so that no pair is lost between them."""
    last = np.empty(0, dtype=np.int64)
    for shard in split.shards:
        for start in range(0, len(shard), _PIECE_TOKENS):
            chunk = np.concatenate([last, shard[start : start + _PIECE_TOKENS].astype(np.int64)])
            last = chunk[-1:]
            yield chunk
