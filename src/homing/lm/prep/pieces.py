"""Sources to pieces of a few MB: the unit in which both passes work.

Where only a part of the text is to be taken, every file gives its beginning, as much as its share of all files. So the
part is spread over all of them, the same on every pass, and the rest is not read.

A second thread reads, unpacks, splits and hashes the next piece while this one is counted or encoded: unpacking,
hashing and both Rust libraries let go of the interpreter, so the two really run at once.
"""

from __future__ import annotations

import math
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
from homing.text_sources import Source

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
    read_bytes: int = 0  # of `Inputs.num_bytes`, when the piece was full


class _Pace:
    """A document is taken while what was taken is no further along than the files are."""

    def __init__(self, inputs: Inputs) -> None:
        self._share = inputs.take_bytes / inputs.num_file_bytes if inputs.is_part else math.inf
        self._allowed = 0.0
        self.taken_bytes = 0

    def begin_anew(self) -> None:
        """At the first validation file: what the text took too much must not be taken from it."""
        self._allowed = float(self.taken_bytes)

    def open(self, source: Source) -> None:
        self._allowed += self._share * source.num_bytes

    @property
    def has_room(self) -> bool:
        return self.taken_bytes < self._allowed

    def take(self, documents: Iterator[bytes]) -> Iterator[bytes]:
        while self.has_room and (document := next(documents, None)) is not None:
            self.taken_bytes += len(document)
            yield document


def _piece_bytes() -> int:
    """Small pieces are fast and keep memory low; many cores need a little more to share."""
    return min(max(2, os.cpu_count() or 1), 16) * _MB


def pieces_of(
    inputs: Inputs, cuts: Cuts, *, start: Position = BEGINNING, sha256s: list[str] | None = None
) -> Iterator[Piece]:
    """Every document from `start` on, in order. With `sha256s`, each source's hash is appended as it ends: "" where
    it was not read to its end."""
    size, pace, read_before = _piece_bytes(), _Pace(inputs), 0
    piece = Piece(is_validation=start.source >= len(inputs.text))
    for number, source in enumerate(inputs.sources):
        is_before, sha256 = number < start.source, ""
        if piece.is_validation != (number >= len(inputs.text)) and not is_before:
            yield piece
            piece = Piece(is_validation=True)
        if number == len(inputs.text):
            pace.begin_anew()
        pace.open(source)
        # An earlier source is read again only where what it gave decides how much the later ones give.
        if pace.has_room and (inputs.is_part or not is_before):
            with Reading(source, is_hashed=sha256s is not None) as reading:
                for count, document in enumerate(pace.take(documents_of(reading, cuts)), start=1):
                    if is_before or (number == start.source and count <= start.document):
                        continue
                    piece.documents.append(document)
                    piece.num_text_bytes += len(document)
                    if piece.num_text_bytes >= size:
                        piece.after = Position(number, count)
                        here = read_before + min(reading.num_bytes_read, source.num_bytes)
                        piece.read_bytes = min(pace.taken_bytes, inputs.num_bytes) if inputs.is_part else here
                        yield piece
                        piece = Piece(piece.is_validation)
                if sha256s is not None and pace.has_room:
                    sha256 = reading.sha256()
        if sha256s is not None:
            sha256s.append(sha256)
        read_before += source.num_bytes
        piece.after = Position(number + 1, 0)
        piece.read_bytes = min(pace.taken_bytes, inputs.num_bytes) if inputs.is_part else read_before
    yield piece


@contextmanager
def ahead(items: Iterator[T], depth: int = 4) -> Iterator[Iterator[T]]:
    """`items`, made by a thread that stays `depth` ahead. Its exception is raised here; leaving ends the thread."""
    line: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(maxsize=depth)  # an item, a failure, the end
    is_over = threading.Event()

    def put(next_: tuple[T] | BaseException | None) -> None:
        while not is_over.is_set():
            try:
                line.put(next_, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put((item,))
                if is_over.is_set():
                    return
            put(None)
        except BaseException as exc:  # carried to who takes
            put(exc)

    def take() -> Iterator[T]:
        while (next_ := line.get()) is not None:
            if isinstance(next_, BaseException):
                raise next_
            yield next_[0]

    thread = threading.Thread(target=work, name="read-ahead", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        is_over.set()
        thread.join()
