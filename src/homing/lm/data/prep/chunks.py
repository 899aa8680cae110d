"""Splits sources into chunks (`Chunk`) of a few MB, the unit of work in both passes.

If only part of the text is requested, homing takes the beginning of each file, in proportion to the file's size. So
every file contributes, every pass takes the same text, and the rest is not read.

A second thread reads, unpacks, splits and hashes the next chunk while the current one is counted or encoded. Unpacking,
hashing and both Rust libraries release the GIL, so the two threads really run in parallel.
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

from homing.find_source_files import Source
from homing.lm.data.prep.prep_settings import Inputs
from homing.lm.data.text.documents import Cuts, documents_of
from homing.lm.data.text.read_bytes import Reading

__all__ = ["Chunk", "Position", "ahead", "read_chunks"]

T = TypeVar("T")
_MB = 1_000_000


@dataclass(frozen=True)
class Position:
    """Where to resume: after all sources before index `source` and the first `document` documents of that source."""

    source: int = 0
    document: int = 0


BEGINNING = Position()


@dataclass
class Chunk:
    is_validation: bool
    documents: list[bytes] = field(default_factory=list)
    num_text_bytes: int = 0
    after: Position = BEGINNING
    read_bytes: int = 0  # how many of `Inputs.num_bytes` had been read when this chunk was complete


class _Pace:
    """Limits the text read to the requested fraction of the estimated text in the files opened so far."""

    def __init__(self, inputs: Inputs) -> None:
        self._share = inputs.take_bytes / inputs.num_text_bytes if inputs.is_part else math.inf
        self._allowed = 0.0
        self.taken_bytes = 0

    def begin_anew(self) -> None:
        """Forget any excess or shortfall of training text, so that the amount of validation text is not affected."""
        self._allowed = float(self.taken_bytes)

    def open(self, source: Source) -> None:
        self._allowed += self._share * source.num_text_bytes

    @property
    def has_room(self) -> bool:
        return self.taken_bytes < self._allowed

    def take(self, documents: Iterator[bytes]) -> Iterator[bytes]:
        while self.has_room and (document := next(documents, None)) is not None:
            self.taken_bytes += len(document)
            yield document


def _chunk_bytes() -> int:
    """Return the chunk size. Small chunks save time and memory, but more cores need larger chunks to stay busy."""
    return min(max(2, os.cpu_count() or 1), 16) * _MB


def read_chunks(
    inputs: Inputs, cuts: Cuts, *, start: Position = BEGINNING, sha256s: list[str] | None = None
) -> Iterator[Chunk]:
    """Yield every document from `start` on, in order, in chunks.

    If `sha256s` is given, each source's hash is appended to it, or "" if the source was not read completely.
    """
    size, pace, read_before = _chunk_bytes(), _Pace(inputs), 0
    chunk = Chunk(is_validation=start.source >= len(inputs.text))
    for number, source in enumerate(inputs.sources):
        is_before, sha256 = number < start.source, ""
        if chunk.is_validation != (number >= len(inputs.text)) and not is_before:
            yield chunk
            chunk = Chunk(is_validation=True)
        if number == len(inputs.text):
            pace.begin_anew()
        pace.open(source)
        # Reread a source that precedes `start` only if the amount of its text determines how much to take from later
        # sources.
        if pace.has_room and (inputs.is_part or not is_before):
            with Reading(source, is_hashed=sha256s is not None) as reading:
                for count, document in enumerate(pace.take(documents_of(reading, cuts)), start=1):
                    if is_before or (number == start.source and count <= start.document):
                        continue
                    chunk.documents.append(document)
                    chunk.num_text_bytes += len(document)
                    if chunk.num_text_bytes >= size:
                        chunk.after = Position(number, count)
                        here = read_before + min(reading.num_bytes_read, source.num_bytes)
                        chunk.read_bytes = min(pace.taken_bytes, inputs.num_bytes) if inputs.is_part else here
                        yield chunk
                        chunk = Chunk(chunk.is_validation)
                if sha256s is not None and pace.has_room:
                    sha256 = reading.sha256()
        if sha256s is not None:
            sha256s.append(sha256)
        read_before += source.num_bytes
        chunk.after = Position(number + 1, 0)
        chunk.read_bytes = min(pace.taken_bytes, inputs.num_bytes) if inputs.is_part else read_before
    yield chunk


@contextmanager
def ahead(items: Iterator[T], depth: int = 4) -> Iterator[Iterator[T]]:
    """Iterate over `items` in a separate thread, up to `depth` items ahead of the consumer.

    An exception in the thread is raised again in the consumer. Leaving the context ends the thread.
    """
    line: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(maxsize=depth)  # item, exception, or end (None)
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
        except BaseException as exc:  # raised again in the consumer
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
