"""Sources to pieces of a few MB: the unit in which both passes work.

A second thread reads, unpacks, splits and hashes the next piece while this one is counted or encoded: unpacking,
hashing and both Rust libraries let go of the interpreter, so the two really run at once.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from homing.lm.prep.order import Inputs
from homing.lm.text.documents import Cuts, documents_of
from homing.lm.text.read import Reading

__all__ = ["Piece", "Position", "ahead", "pieces_of"]

T = TypeVar("T")
_MB = 1_000_000


@dataclass(frozen=True)
class Position:
    """Documents before this one are done: `document` of them in source number `source`, and all earlier sources."""

    source: int = 0
    document: int = 0


BEGINNING = Position()


@dataclass
class Piece:
    is_validation: bool
    documents: list[bytes] = field(default_factory=list)
    num_text_bytes: int = 0
    after: Position = BEGINNING
    read_bytes: int = 0  # of all sources on disk, when the piece was full


def _piece_bytes() -> int:
    """Small pieces are fast and keep memory low; many cores need a little more to share."""
    return min(max(2, os.cpu_count() or 1), 16) * _MB


def pieces_of(
    inputs: Inputs, cuts: Cuts, *, start: Position = BEGINNING, sha256s: list[str] | None = None
) -> Iterator[Piece]:
    """Every document from `start` on, in order. With `sha256s`, each source's hash is appended as it ends."""
    size = _piece_bytes()
    sources = inputs.sources
    read_before = sum(source.num_bytes for source in sources[: start.source])
    piece = Piece(is_validation=start.source >= len(inputs.text))
    for number in range(start.source, len(sources)):
        if piece.is_validation != (number >= len(inputs.text)):
            yield piece
            piece = Piece(is_validation=True)
        reading = Reading(sources[number], is_hashed=sha256s is not None)
        with reading:
            count = 0
            for document in documents_of(reading, cuts):
                count += 1
                if number == start.source and count <= start.document:
                    continue
                piece.documents.append(document)
                piece.num_text_bytes += len(document)
                if piece.num_text_bytes >= size:
                    piece.after = Position(number, count)
                    piece.read_bytes = read_before + min(reading.num_bytes_read, sources[number].num_bytes)
                    yield piece
                    piece = Piece(piece.is_validation)
            if sha256s is not None:
                sha256s.append(reading.sha256())
        read_before += sources[number].num_bytes
        piece.after, piece.read_bytes = Position(number + 1, 0), read_before
    yield piece


@contextmanager
def ahead(items: Iterator[T], depth: int = 4) -> Iterator[Iterator[T]]:
    """`items`, made by a thread that stays `depth` ahead. Its exception is raised here; leaving ends the thread."""
    line: queue.Queue[tuple[str, object]] = queue.Queue(maxsize=depth)
    is_over = threading.Event()

    def put(kind: str, value: object) -> None:
        while not is_over.is_set():
            try:
                line.put((kind, value), timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put("item", item)
                if is_over.is_set():
                    return
            put("end", None)
        except BaseException as exc:
            put("error", exc)

    def take() -> Iterator[T]:
        while True:
            kind, value = line.get()
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(value, BaseException)
                raise value
            yield value  # type: ignore[misc]

    thread = threading.Thread(target=work, name="read-ahead", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        is_over.set()
        thread.join()
