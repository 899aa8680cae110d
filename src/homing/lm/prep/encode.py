"""Pass two: documents to ids to shards, with a mark now and then from which a killed prep goes on.

A mark is a position in the documents and the state of both writers, taken together after their bytes are on disk.
Shards depend on the documents alone, so what a resumed prep writes is, byte for byte, what it would have written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from homing.lm.prep.order import Inputs
from homing.lm.prep.pieces import Piece, Position, ahead, pieces_of
from homing.lm.prep.scan import Scan
from homing.lm.prep.work import Work
from homing.lm.shards.write import ShardWriter
from homing.lm.text.documents import Cuts
from homing.lm.text.split import document_hash
from homing.lm.tokenizer.encode import Encoder
from homing.wire.data import Split

__all__ = ["MARK_BYTES", "encode_all"]

# Text between two marks: a second or two of work is lost at most, and syncing stays a small part of the time.
MARK_BYTES = 256_000_000
# Text of the person's own on which the encoder is proven at each start; `tokenizers` is slow, so not much.
_PROOF_BYTES = 128_000


def encode_all(
    work: Work,
    inputs: Inputs,
    scan: Scan,
    encoder: Encoder,
    writers: Callable[[str, Any], ShardWriter],
    *,
    text_field: str,
    tell: Callable[[int, int], None],
) -> dict[str, Split]:
    """`writers(split, state)` makes a writer that goes on from `state`; `tell(read bytes, tokens)` after each piece."""
    mark = work.state.get("mark") or {}
    train, val = writers("train", mark.get("train")), writers("val", mark.get("val"))
    cuts = Cuts(scan.unmarked_bytes, text_field, is_checked=False)
    unmarked_bytes, is_proven = 0, False
    try:
        with ahead(_with_sides(pieces_of(inputs, cuts, start=_position(mark)), scan.threshold)) as pieces:
            for piece, is_val in pieces:
                if piece.documents:
                    if not is_proven:
                        encoder.prove(list(_few(piece.documents)))
                        is_proven = True
                    _encode(piece, is_val, encoder, train, val)
                tell(piece.read_bytes, train.num_tokens + val.num_tokens)
                unmarked_bytes += piece.num_text_bytes
                if unmarked_bytes >= MARK_BYTES:
                    position = {"source": piece.after.source, "document": piece.after.document}
                    work.save(mark={"position": position, "train": train.mark(), "val": val.mark()})
                    unmarked_bytes = 0
        return {"train": train.finish(), "val": val.finish()}
    finally:
        train.abandon()
        val.abandon()


def _position(mark: dict[str, Any]) -> Position:
    return Position(**mark["position"]) if mark else Position()


def _with_sides(pieces: Iterator[Piece], threshold: int) -> Iterator[tuple[Piece, npt.NDArray[np.bool_]]]:
    """In the reading thread: which documents of a piece go to val."""
    for piece in pieces:
        if piece.is_validation or not threshold:
            yield piece, np.full(len(piece.documents), piece.is_validation)
        else:
            yield piece, np.array([document_hash(document) < threshold for document in piece.documents], dtype=bool)


def _few(documents: list[bytes]) -> Iterator[bytes]:
    left = _PROOF_BYTES
    for document in documents:
        if left <= 0:
            return
        # Proven on a document's beginning; a cut inside a character is not text, so it is mended.
        yield document[:left].decode(errors="ignore").encode()
        left -= len(document)


def _encode(
    piece: Piece, is_val: npt.NDArray[np.bool_], encoder: Encoder, train: ShardWriter, val: ShardWriter
) -> None:
    ids, starts = encoder.encode(piece.documents)
    sizes = np.fromiter(map(len, piece.documents), dtype=np.int64, count=len(piece.documents))
    for writer, is_here in ((train, ~is_val), (val, is_val)):
        if is_here.all():
            writer.append(ids, starts, int(sizes.sum()))
        elif is_here.any():
            lengths = np.diff(starts)
            here = np.concatenate([[0], np.cumsum(lengths[is_here])])
            writer.append(ids[np.repeat(is_here, lengths)], here, int(sizes[is_here].sum()))
