"""Pass two: documents to ids to shards, with a mark now and then from which a killed prep goes on.

A mark is a position in the documents and the state of both writers, taken together after their bytes are on disk,
and the rule that told the writers apart: with another one it is of no use.
Shards depend on the documents alone, so what a resumed prep writes is, byte for byte, what it would have written.
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

from homing.lm.prep.pieces import Piece, Position, ahead
from homing.lm.prep.work import Work
from homing.lm.shards.write import ShardWriter
from homing.lm.text.split import SplitRule, document_hash
from homing.lm.tokenizer.encode import Encoder
from homing.lm.tokenizer.encode_theirs import TheirEncoder
from homing.lm.tokenizer.heap import release_free_memory
from homing.wire.data import Split

__all__ = ["MARK_BYTES", "SLOW_MARK_BYTES", "AnyEncoder", "encode_all", "last_mark", "position_of"]

AnyEncoder = Encoder | TheirEncoder

# Text between two marks: a few seconds of work are lost at most, and syncing stays a small part of the time.
MARK_BYTES, SLOW_MARK_BYTES = 256_000_000, 16_000_000
# Text of the person's own on which the encoder is proven at each start; `tokenizers` is slow, so not much.
_PROOF_BYTES = 32_000
# Runs of documents on one side are written as they lie; where they are many, gathering each side first is faster.
_MAX_RUNS = 64
# Pieces that are being encoded, two at a time, or wait to be written.
_NUM_UNDER_WAY = 3
# Text between two times that the heap gives back what is free in it; the first comes soon, after the loading.
_RELEASE_BYTES, _FIRST_RELEASE_BYTES = 32_000_000, 8_000_000


def last_mark(work: Work, rule: SplitRule) -> dict[str, Any]:
    """Empty where there is none, or none with this rule."""
    mark: dict[str, Any] = work.state.get("mark") or {}
    return mark if mark.get("rule") == asdict(rule) else {}


def position_of(mark: dict[str, Any]) -> Position:
    return Position(**mark["position"]) if mark else Position()


def encode_all(
    work: Work,
    pieces: Iterator[Piece],
    rule: SplitRule,
    encoder: Callable[[], AnyEncoder],
    writers: Callable[[str, Any], ShardWriter],
    *,
    is_slow: bool,
    mark: dict[str, Any],
    tell: Callable[[int, int], None],
    meanwhile: Callable[[], None],
) -> dict[str, Split]:
    """`pieces` go on from `mark`, and so does what `writers(split, state)` makes; `tell(read bytes, tokens)` each time.

    `encoder()` is asked for when the reading has begun, so that it may still be loading then. `meanwhile` is done
    beside the encoding, once that is under way.
    """
    train, val = writers("train", mark.get("train")), writers("val", mark.get("val"))
    proof, aside = None, None
    marking = _Every(SLOW_MARK_BYTES if is_slow else MARK_BYTES)
    releasing = _Every(_RELEASE_BYTES, first=_FIRST_RELEASE_BYTES)
    try:
        with (
            ahead(_with_sides(pieces, rule)) as sided,
            ThreadPoolExecutor(1, "write-shards") as write_beside,
            ThreadPoolExecutor(1, "beside-encoding") as beside,
        ):
            # One piece is written while others are encoded, never more than one: order and memory stay as they are.
            writing = write_beside.submit(lambda: None)
            for piece, is_val, (ids, starts) in _encoded(sided, encoder):
                if piece.documents:
                    # Not before the first piece: comparing begins with loading, which lets no other thread run.
                    proof = proof or encoder().prove(list(_few(piece.documents)))
                    proof.check()
                    writing.result()
                    writing = write_beside.submit(_write, piece, is_val, ids, starts, train, val)
                aside = aside or beside.submit(meanwhile)
                tell(piece.read_bytes, train.num_tokens + val.num_tokens)
                if releasing.is_due(piece.num_text_bytes):
                    write_beside.submit(release_free_memory)
                if marking.is_due(piece.num_text_bytes):
                    writing.result()
                    if proof is not None:  # whoever goes on from here proves what comes after it
                        proof.check(is_last=True)
                    position = {"source": piece.after.source, "document": piece.after.document}
                    states = {"train": train.mark(), "val": val.mark()}
                    work.save(mark={"rule": asdict(rule), "position": position, **states})
            writing.result()
            if aside is not None:
                aside.result()
        if proof is not None:
            proof.check(is_last=True)
        return {"train": train.finish(), "val": val.finish()}
    finally:
        train.abandon()
        val.abandon()


class _Every:
    """Due once for so many bytes of text; the first time perhaps sooner."""

    def __init__(self, num_bytes: int, *, first: int | None = None) -> None:
        self._every, self._since = num_bytes, num_bytes - first if first is not None else 0

    def is_due(self, num_bytes: int) -> bool:
        self._since += num_bytes
        if self._since < self._every:
            return False
        self._since = 0
        return True


def _with_sides(pieces: Iterator[Piece], rule: SplitRule) -> Iterator[tuple[Piece, npt.NDArray[np.bool_]]]:
    """In the reading thread: which documents of a piece go to val, after cutting them where the rule says so."""
    for piece in pieces:
        if piece.is_validation or not rule.threshold:
            yield piece, np.full(len(piece.documents), piece.is_validation)
        elif not rule.passage_bytes:  # nearly always, and with millions of documents: no object for each
            sides = [document_hash(document) < rule.threshold for document in piece.documents]
            yield piece, np.array(sides, dtype=bool)
        else:
            parts = [part for document in piece.documents for part in rule.parts_of(document)]
            sides = [is_val for _, is_val in parts]
            yield replace(piece, documents=[document for document, _ in parts]), np.array(sides, dtype=bool)


def _encoded(
    sided: Iterator[tuple[Piece, npt.NDArray[np.bool_]]], encoder: Callable[[], AnyEncoder]
) -> Iterator[tuple[Piece, npt.NDArray[np.bool_], tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]]]:
    """In order, with the next pieces always under way: no core waits for a slow document, nor for us."""
    with ThreadPoolExecutor(2, "encode") as pool:
        line: deque[Any] = deque()
        for piece, is_val in sided:
            line.append((piece, is_val, pool.submit(encoder().encode, piece.documents)))
            if len(line) == _NUM_UNDER_WAY:
                first, is_val, encoding = line.popleft()
                yield first, is_val, encoding.result()
        for piece, is_val, encoding in line:
            yield piece, is_val, encoding.result()


def _few(documents: list[bytes]) -> Iterator[bytes]:
    left = _PROOF_BYTES
    for document in documents:
        if left <= 0:
            return
        # Proven on a document's beginning; a cut inside a character is not text, so it is mended.
        yield document[:left].decode(errors="ignore").encode()
        left -= len(document)


def _write(
    piece: Piece,
    is_val: npt.NDArray[np.bool_],
    ids: npt.NDArray[np.uint32],
    starts: npt.NDArray[np.int64],
    train: ShardWriter,
    val: ShardWriter,
) -> None:
    sizes = np.fromiter(map(len, piece.documents), dtype=np.int64, count=len(piece.documents))
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
