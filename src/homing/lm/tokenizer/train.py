"""Documents to a vocabulary: rustbpe counts and merges, we keep what every reader can replay.

    documents -> rustbpe -> token bytes in the order they were merged -> (left, right) pairs

rustbpe gives ranks only; a token's two halves are found again by merging its bytes with the tokens before it, which
is also how a reader of tokenizer.json will build it. A token that cannot be found again that way, or that another pair
has made already, is left out, and one from a small reserve takes its place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

from homing.errors import DataError
from homing.lm.text.documents import cut
from homing.lm.tokenizer.splits import pattern_named

__all__ = ["MAX_SAMPLE_BYTES", "MIN_VOCAB", "learn_merges", "replay_merges", "too_little_text"]

MIN_VOCAB = 256
# rustbpe counts in 32 bits: one word cannot occur more often than this in so much text.
MAX_SAMPLE_BYTES = 2_000_000_000
_NUM_RESERVE = 256
# rustbpe holds `buffer` texts at once and knows no sizes; blank texts fill a buffer whose bytes have run out.
_BUFFER_TEXTS = 2048
_BUFFER_BYTES = 16 << 20
# Its expressions backtrack on the stack: a million spaces in one text end it. Parts of this size do not.
_PART_BYTES = 64 << 10


def learn_merges(documents: Iterable[bytes], *, num_merges: int, split: str) -> list[tuple[bytes, bytes]]:
    """Up to `num_merges` pairs, best first; fewer when the text has no more."""
    import rustbpe

    if not num_merges:
        for _ in documents:  # the caller checks its text while we would have counted it
            pass
        return []
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(
        _bounded(documents),
        vocab_size=MIN_VOCAB + num_merges + _NUM_RESERVE,
        buffer_size=_BUFFER_TEXTS,
        pattern=pattern_named(split),
    )
    tokens = [bytes(token) for token, _ in trainer.get_mergeable_ranks()[MIN_VOCAB:]]
    del trainer
    _give_memory_back()
    return replay_merges(tokens, num_merges)


def _give_memory_back() -> None:
    """glibc keeps what was freed; the encoder's memory would come on top of the trainer's. Elsewhere: nothing to do."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def replay_merges(tokens: Iterable[bytes], num_merges: int) -> list[tuple[bytes, bytes]]:
    ranks: dict[bytes, int] = {bytes([byte]): byte for byte in range(256)}
    merges: list[tuple[bytes, bytes]] = []
    for token in tokens:
        if len(merges) == num_merges:
            break
        parts = _merge(token, ranks)
        if len(parts) == 2:
            ranks[token] = MIN_VOCAB + len(merges)
            merges.append((parts[0], parts[1]))
    return merges


def _merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The token's bytes merged as far as earlier tokens go, lowest rank first, leftmost among equals."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 1:
        best_rank, best_at = len(ranks), -1
        for at in range(len(parts) - 1):
            rank = ranks.get(parts[at] + parts[at + 1], best_rank)
            if rank < best_rank:
                best_rank, best_at = rank, at
        if best_at < 0:
            break
        parts[best_at : best_at + 2] = [parts[best_at] + parts[best_at + 1]]
    return parts


def _bounded(documents: Iterable[bytes]) -> Iterator[str]:
    num_texts = num_bytes = 0
    for document in documents:
        for part in cut(document, _PART_BYTES):
            # A part is cut between characters, so it decodes; documents were checked when they were read.
            yield part.decode()
            num_texts += 1
            num_bytes += len(part)
            if num_bytes >= _BUFFER_BYTES:
                for _ in range(-num_texts % _BUFFER_TEXTS):
                    yield ""
                num_texts = num_bytes = 0
            elif num_texts == _BUFFER_TEXTS:
                num_texts = num_bytes = 0


def too_little_text(vocab_size: int, num_specials: int, num_merges: int) -> DataError:
    largest = num_specials + MIN_VOCAB + num_merges
    return DataError(
        what=f"The text gives no vocabulary of {vocab_size:,}: it has {num_merges:,} merges and no more.",
        why=f"{num_specials} specials, 256 bytes and {num_merges:,} merges make {largest:,}; more text makes more.",
        fix=f"Set tokenizer.vocab_size in the run file (--vocab-size without one) to {largest} or, better, well below.",
    )
