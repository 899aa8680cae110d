"""Pass two of prep: encodes documents and writes them to shards, with regular resume points (marks).

A mark holds a position in the documents and the state of both writers, recorded together once their data is on disk. It
also holds the rule that splits train from val, because a mark is valid only for that rule. Shards depend only on the
documents, so if prep is killed and resumes at a mark, it writes exactly the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from homing.lm.data.prep.chunks import Chunk, Position, ahead
from homing.lm.data.prep.work_folder import Work
from homing.lm.data.shards.write_shards import ShardWriter
from homing.lm.data.text.split import SplitRule, document_hash
from homing.lm.tokenizer.encode import Encoder, TheirEncoder
from homing.lm.tokenizer.trim_heap import release_free_memory
from homing.wire.shard_manifest import Split

__all__ = ["MARK_BYTES", "SLOW_MARK_BYTES", "AnyEncoder", "encode_all", "last_mark", "position_of"]

AnyEncoder = Encoder | TheirEncoder

# Number of bytes of text between two resume points (marks). It is small enough that a killed prep loses only seconds of
# work, and large enough that syncing to disk takes little time.
MARK_BYTES, SLOW_MARK_BYTES = 256_000_000, 16_000_000
# At each start, the encoder is verified on this many bytes of the user's text. The number is small because the
# `tokenizers` library, which encodes the same text for comparison, is slow.
_PROOF_BYTES = 32_000
# Consecutive documents that belong to the same split form a run. A chunk with up to this many runs is written run by
# run. With more runs, it is faster to gather the documents of each split first.
_MAX_RUNS = 64
# Maximum number of chunks in progress: those being encoded (two at a time) and those waiting to be written.
_NUM_UNDER_WAY = 3
# Free heap memory is returned to the operating system after every _RELEASE_BYTES bytes encoded. The first time is
# after only _FIRST_RELEASE_BYTES, soon after loading.
_RELEASE_BYTES, _FIRST_RELEASE_BYTES = 32_000_000, 8_000_000


def last_mark(work: Work, rule: SplitRule) -> dict[str, Any]:
    """Return the last mark (resume point), or {} if there is none or it was made with a different split rule."""
    mark: dict[str, Any] = work.state.get("mark") or {}
    return mark if mark.get("rule") == asdict(rule) else {}


def position_of(mark: dict[str, Any]) -> Position:
    return Position(**mark["position"]) if mark else Position()


def encode_all(
    work: Work,
    chunks: Iterator[Chunk],
    rule: SplitRule,
    encoder: Callable[[], AnyEncoder],
    writers: Callable[[str, Any], ShardWriter],
    *,
    is_slow: bool,
    mark: dict[str, Any],
    notify: Callable[[int, int], None],
    meanwhile: Callable[[], None],
) -> dict[str, Split]:
    """Encode all chunks into shards; return the finished splits.

    `chunks` and `writers(split, state)` continue from `mark`, and `notify(bytes read, tokens)` reports progress after
    each chunk. `encoder()` is called only after reading has begun, so the tokenizer may still be loading until then.
    `meanwhile` runs in parallel once encoding is under way.
    """
    train, val = writers("train", mark.get("train")), writers("val", mark.get("val"))
    proof, background = None, None
    marking = _Every(SLOW_MARK_BYTES if is_slow else MARK_BYTES)
    releasing = _Every(_RELEASE_BYTES, first=_FIRST_RELEASE_BYTES)
    try:
        with (
            ahead(_with_sides(chunks, rule)) as sided,
            ThreadPoolExecutor(1, "write-shards") as shard_writer,
            ThreadPoolExecutor(1, "background") as executor,
        ):
            # Write one chunk at a time while others are being encoded. This keeps the order and limits memory use.
            writing = shard_writer.submit(lambda: None)
            for chunk, is_val, (ids, starts) in _encoded(sided, encoder):
                if chunk.documents:
                    # Start verifying the encoder after the first chunk, because this begins with an import, which
                    # blocks all other threads.
                    proof = proof or encoder().prove(list(_few(chunk.documents)))
                    proof.check()
                    writing.result()
                    writing = shard_writer.submit(_write, chunk, is_val, ids, starts, train, val)
                background = background or executor.submit(meanwhile)
                notify(chunk.read_bytes, train.num_tokens + val.num_tokens)
                if releasing.is_due(chunk.num_text_bytes):
                    shard_writer.submit(release_free_memory)
                if marking.is_due(chunk.num_text_bytes):
                    writing.result()
                    if proof is not None:  # if prep resumes here, it will not verify earlier text
                        proof.check(is_last=True)
                    position = {"source": chunk.after.source, "document": chunk.after.document}
                    states = {"train": train.mark(), "val": val.mark()}
                    work.save(mark={"rule": asdict(rule), "position": position, **states})
            writing.result()
            if background is not None:
                background.result()
        if proof is not None:
            proof.check(is_last=True)
        return {"train": train.finish(), "val": val.finish()}
    finally:
        train.abandon()
        val.abandon()


class _Every:
    """Counts bytes of text. `is_due` returns True once every `num_bytes` bytes; `first` shortens the first interval."""

    def __init__(self, num_bytes: int, *, first: int | None = None) -> None:
        self._every, self._since = num_bytes, num_bytes - first if first is not None else 0

    def is_due(self, num_bytes: int) -> bool:
        self._since += num_bytes
        if self._since < self._every:
            return False
        self._since = 0
        return True


def _with_sides(chunks: Iterator[Chunk], rule: SplitRule) -> Iterator[tuple[Chunk, npt.NDArray[np.bool_]]]:
    """Yield each chunk with one flag per document: whether it goes to val. Splits documents if the rule requires it.

    Runs in the reader thread.
    """
    for chunk in chunks:
        if chunk.is_validation or not rule.threshold:
            yield chunk, np.full(len(chunk.documents), chunk.is_validation)
        # in this usual case, avoid creating an object per document: there may be millions
        elif not rule.passage_bytes:
            sides = [document_hash(document) < rule.threshold for document in chunk.documents]
            yield chunk, np.array(sides, dtype=bool)
        else:
            parts = [part for document in chunk.documents for part in rule.parts_of(document)]
            sides = [is_val for _, is_val in parts]
            yield replace(chunk, documents=[document for document, _ in parts]), np.array(sides, dtype=bool)


def _encoded(
    sided: Iterator[tuple[Chunk, npt.NDArray[np.bool_]]], encoder: Callable[[], AnyEncoder]
) -> Iterator[tuple[Chunk, npt.NDArray[np.bool_], tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]]]:
    """Yield encoded chunks in order.

    Later chunks are already being encoded, so that no core has to wait for a slow document.
    """
    with ThreadPoolExecutor(2, "encode") as pool:
        line: deque[Any] = deque()
        for chunk, is_val in sided:
            line.append((chunk, is_val, pool.submit(encoder().encode, chunk.documents)))
            if len(line) == _NUM_UNDER_WAY:
                first, is_val, encoding = line.popleft()
                yield first, is_val, encoding.result()
        for chunk, is_val, encoding in line:
            yield chunk, is_val, encoding.result()


def _few(documents: list[bytes]) -> Iterator[bytes]:
    left = _PROOF_BYTES
    for document in documents:
        if left <= 0:
            return
        # Take only the beginning of a document. If that cuts a character in half, drop the character, because half a
        # character is not valid UTF-8.
        yield document[:left].decode(errors="ignore").encode()
        left -= len(document)


def _write(
    chunk: Chunk,
    is_val: npt.NDArray[np.bool_],
    ids: npt.NDArray[np.uint32],
    starts: npt.NDArray[np.int64],
    train: ShardWriter,
    val: ShardWriter,
) -> None:
    sizes = np.fromiter(map(len, chunk.documents), dtype=np.int64, count=len(chunk.documents))
    turns = np.flatnonzero(np.diff(is_val)) + 1
    if len(turns) < _MAX_RUNS:
        for first, last in pairwise([0, *turns.tolist(), len(is_val)]):
            run = starts[first : last + 1]
            writer = val if is_val[first] else train
            writer.append(ids[run[0] : run[-1]], run - run[0], int(sizes[first:last].sum()))
        return
    for writer, is_here in ((train, ~is_val), (val, is_val)):
        lengths = np.diff(starts)
        here = np.concatenate([[0], np.cumsum(lengths[is_here])])
        writer.append(ids[np.repeat(is_here, lengths)], here, int(sizes[is_here].sum()))
