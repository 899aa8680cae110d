"""Trains a BPE vocabulary with rustbpe, and keeps only merges that every reader of tokenizer.json can replay.

    documents -> rustbpe -> token bytes in the order they were merged -> (left, right) pairs

rustbpe returns only ranks. The two halves of a token are recovered by merging its bytes using earlier tokens, just as
readers of tokenizer.json build the token. A token that cannot be recovered that way, or that another pair has already
produced, is left out and replaced by one from a small reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from homing.errors import DataError
from homing.lm.data.text.documents import cut
from homing.lm.tokenizer.trim_heap import release_free_memory
from homing.lm.tokenizer.write_files import pattern_named

__all__ = ["MAX_SAMPLE_BYTES", "MIN_VOCAB", "learn_merges", "replay_merges", "too_little_text"]

MIN_VOCAB = 256
# rustbpe uses 32-bit counts, which cannot overflow in this much text.
MAX_SAMPLE_BYTES = 2_000_000_000
_NUM_RESERVE = 256
# rustbpe buffers a fixed number of texts, regardless of their size. Once the buffered texts reach the byte limit, the
# rest of the buffer is filled with empty texts, so that rustbpe processes it.
_BUFFER_TEXTS = 2048
_BUFFER_BYTES = 16 << 20
# rustbpe's regex engine backtracks on the stack: a million spaces in one text crash it. Parts of this size are safe.
_PART_BYTES = 64 << 10


def learn_merges(documents: Iterable[bytes], *, num_merges: int, split: str) -> list[tuple[bytes, bytes]]:
    """Return up to `num_merges` pairs, in the order in which they were merged."""
    import rustbpe

    if not num_merges:
        for _ in documents:  # read all documents even if no merges are needed, because the iterator also checks them
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
    release_free_memory()  # otherwise glibc would keep this memory while the encoder allocates more
    return replay_merges(tokens, num_merges)


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
    """Merge the token's bytes into earlier tokens, lowest rank first and leftmost among equals; return what is left."""
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
            # This cannot fail: parts are cut between characters, and documents were checked when they were read.
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
        what=f"The text is too small for a vocabulary of {vocab_size:,}: it yields only {num_merges:,} merges.",
        why=f"{num_specials} special tokens, 256 bytes and {num_merges:,} merges make a vocabulary of {largest:,};"
        " more text would yield more merges.",
        fix=f"Set tokenizer.vocab_size in the run file (or --vocab-size) to {largest} or, preferably, much less.",
    )
