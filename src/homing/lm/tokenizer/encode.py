"""Encodes documents at full speed with gigatoken, loaded from tokenizer.json without its special tokens.

If they were loaded, the text "<|endoftext|>" would be encoded as the special id. Leaving them out does not change any
other id, because the vocabulary defines the ids. Special ids are never produced.

gigatoken is a new library, so it is verified: at each start, `prove` also encodes difficult strings and the beginning
of the user's own text with `tokenizers`. If a single id differs, the run stops. There is no fallback encoder, because
shards must not depend on which encoder happened to work. The one known difference, letters of Unicode 17, is handled
per document. Third-party tokenizers, which gigatoken may not support, use `TheirEncoder`; tokenizer.json alone
determines which encoder is used, before any text is read.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from homing.errors import DataError, IntegrityError
from homing.lm.tokenizer.tokenizer import Tokenizer, load_tokenizer, read_tokenizer_json
from homing.lm.tokenizer.trim_heap import release_free_memory

__all__ = [
    "AWKWARD",
    "NEW_LETTERS",
    "Encoder",
    "Proof",
    "TheirEncoder",
    "has_new_letter",
    "parts_by_new_letters",
    "warm_up",
]

# gigatoken caches every word it has seen, so its instance is replaced after this much text; creating one takes a tenth
# of a second.
_FRESH_AFTER_BYTES = 128_000_000

AWKWARD = [
    "<|endoftext|><|im_start|>user<|im_end|> <|pad|><|endoftext|",
    "It's they'LL I'd 'S '\u017f we're\u2019ve  don't",
    "1234567 1,234.5 ١٢٣٤ Ⅷ ½ 10000000",
    "漢字かな交じり文。한국어 텍스트\u3000全角スペース",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301\u0327 \u202eright-to-left\u202c \ufeff\u200b\u180e",
    "\x00\x01\x1b[31m\x7f\x85\xa0 \t\r\n\r\n \n\n   \n  x   \t",
    "def f(x):\r\n    return x**2  # comment!!!\n\n\n\n\tpass     ",
    "ǅ ﬁ ß İ \u0131 \u212a \u212b \U0001d518\U0001d52b \U0010ffff \ue000",
    " ",
    "\n",
]


def warm_up() -> None:
    """Import the slow modules that `Encoder` needs, ahead of time."""
    # gigatoken returns an array of the `awkward` package, and importing that package takes half a second.
    for module in ("awkward", "numpy.ma"):
        importlib.import_module(module)


class Encoder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        warm_up()
        self._path = os.fspath(path)
        self._json = json.dumps({**read_tokenizer_json(path), "added_tokens": [], "post_processor": None})
        self._turn, self._reference_lock = threading.Condition(), threading.Lock()
        self._backend: Any = self._load()
        self._num_bytes = self._num_encoding = 0
        self._reference: Tokenizer | None = None  # loaded at first use

    def encode(self, documents: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Return an array of all ids, and an array of each document's offset in it, followed by the total length.

        Several threads may call this at the same time.
        """
        if not documents:
            return np.empty(0, dtype=np.uint32), np.zeros(1, dtype=np.int64)
        odd = [number for number, document in enumerate(documents) if has_new_letter(document)]
        if odd:
            return self._encode_by_parts(documents, odd)
        rows = self._encode_rows(documents)
        starts = np.asarray(rows.offsets.data, dtype=np.int64)
        assert len(starts) == len(documents) + 1, "one row for each document"
        return np.asarray(rows.content.data, dtype=np.uint32)[starts[0] : starts[-1]], starts - starts[0]

    def _encode_rows(self, documents: Sequence[bytes]) -> Any:
        """Encode with gigatoken; return its array object. The backend is never replaced while a thread is using it."""
        from gigatoken import BytesSource

        with self._turn:
            while self._num_bytes > _FRESH_AFTER_BYTES:
                if self._num_encoding:
                    self._turn.wait()
                else:
                    # Free the old backend first: holding two backends caused the memory peak of long prep runs.
                    self._backend = None
                    release_free_memory()
                    self._backend, self._num_bytes = self._load(), 0
            self._num_bytes += sum(map(len, documents))
            self._num_encoding += 1
        try:
            return self._backend.encode_batch(BytesSource(list(documents))).layout
        finally:
            with self._turn:
                self._num_encoding -= 1
                self._turn.notify_all()

    def _encode_by_parts(
        self, documents: Sequence[bytes], odd: list[int]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Like `encode`, but use `tokenizers` for new letters. `odd` has the indices of documents with such letters."""
        split = {number: parts_by_new_letters(documents[number]) for number in odd}
        parts = [split.get(number, [(False, document)]) for number, document in enumerate(documents)]
        ids, starts = self.encode([part for row in parts for is_odd, part in row if not is_odd])
        plain = iter([ids[start:end] for start, end in pairwise(starts.tolist())])
        reference = self._load_reference()  # loading blocks all other threads, so do it only when needed
        rows = [
            np.concatenate(
                [
                    np.array(reference.encode(part.decode()), dtype=np.uint32) if is_odd else next(plain)
                    for is_odd, part in row
                ]
            )
            for row in parts
        ]
        return np.concatenate(rows), np.cumsum([0, *map(len, rows)], dtype=np.int64)

    def prove(self, documents: Sequence[bytes]) -> Proof:
        """Start a comparison with `tokenizers` on AWKWARD and `documents`.

        The caller calls `check` on the returned Proof from time to time, and at the end.
        """
        texts = [text.encode() for text in AWKWARD] + list(documents)
        ids, starts = self.encode(texts)
        rows = [ids[starts[n] : starts[n + 1]].tolist() for n in range(len(texts))]
        return Proof("gigatoken", self._load_reference, texts, rows)

    def _load_reference(self) -> Tokenizer:
        with self._reference_lock:
            self._reference = self._reference or load_tokenizer(self._path)
            return self._reference

    def _load(self) -> Any:
        from gigatoken.gigatoken_rs import load_hf_json

        try:
            return load_hf_json(self._json)
        except Exception as exc:  # gigatoken passes on any exception of its parser
            raise DataError(
                what=f"Cannot load the tokenizer {self._path}.",
                why=str(exc),
                fix="Remove tokenizer.file (or --tokenizer), so that homing prep trains a new tokenizer.",
            ) from exc


class Proof:
    """Compares the ids in a separate thread, as loading `tokenizers` takes longer than encoding the first chunks."""

    def __init__(
        self, encoder: str, reference: Callable[[], Tokenizer], texts: list[bytes], rows: list[list[int]]
    ) -> None:
        self._encoder, self._reference, self._texts, self._rows = encoder, reference, texts, rows
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._compare, name="prove-encoder", daemon=True)
        self._thread.start()

    def check(self, *, is_last: bool = False) -> None:
        """Raise an error if a difference has been found; with `is_last`, first wait for the comparison to finish."""
        if is_last:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _compare(self) -> None:
        try:
            reference = self._reference()
            for text, got in zip(self._texts, self._rows, strict=True):
                wanted = reference.encode(text.decode())
                if got != wanted:
                    raise _not_identical(self._encoder, text, got, wanted)
        except BaseException as exc:  # `check` raises it again in the calling thread
            self._error = exc


def _not_identical(encoder: str, text: bytes, got: list[int], wanted: list[int]) -> IntegrityError:
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    return IntegrityError(
        what="The encoder and tokenizer.json give different ids for the same text.",
        why=f"For {text[:60]!r}, the ids starting at token {at} are {got[at : at + 4]} with {encoder}"
        f" but {wanted[at : at + 4]} with tokenizers.",
        fix="Install the versions in constraints.txt: pip install -c constraints.txt gigatoken tokenizers",
    )


# -- letters and digits added in Unicode 17 ----------------------------------------------------------------------------

# Ranges of characters, each given by its first and last character. gigatoken supports these characters; `tokenizers`
# does not yet. Where they occur next to other characters, the two libraries split the text differently, and all ids
# after that point may differ. `tokenizers` defines the meaning of tokenizer.json, so it encodes the part of a document
# around such a character. These characters are very rare in real text: they are unusual ideographs or belong to newly
# added scripts.
#
# The ranges were found by encoding every Unicode character with both libraries; a test repeats this.
NEW_LETTERS = [
    *[(0x088F, 0x088F), (0x0C5C, 0x0C5C), (0x0CDC, 0x0CDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4)],
    *[(0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9)],
    *[(0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E)],
    *[(0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE), (0x1E6E0, 0x1E6E2), (0x1E6E4, 0x1E6E5), (0x1E6E7, 0x1E6ED)],
    *[(0x1E6F0, 0x1E6F4), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479)],
]
_ANY = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in NEW_LETTERS) + "]")
# The first two bytes, and the first byte, of each of these characters in UTF-8. Checking for these bytes is fast and
# rules out nearly all text.
_STARTS = {chr(number).encode()[:2] for first, last in NEW_LETTERS for number in range(first, last + 1)}
_FIRST_BYTES = sorted({start[:1] for start in _STARTS})
_IS_START = np.zeros(1 << 16, dtype=bool)
_IS_START[[int.from_bytes(start, "big") for start in _STARTS]] = True
# Places where both of our split patterns end a word regardless of context, so that both sides can be encoded
# separately: after a line break between two visible characters, and before a space between two letters.
_LINE_END = re.compile(rb"\n(?<=[!-~]\n)(?=[!-~])")
_SPACE = re.compile(rb" (?<=[A-Za-z] )(?=[A-Za-z])")


def has_new_letter(document: bytes) -> bool:
    """Return whether `document`, which must be UTF-8, contains a character in NEW_LETTERS."""
    if document.isascii() or not any(byte in document for byte in _FIRST_BYTES):
        return False
    if len(document) > 1000:  # for shorter documents, this quick check would save no time
        data = np.frombuffer(document, dtype=np.uint8)
        at = np.flatnonzero(data >= 0xE0)  # starts a character of three or four bytes, so a second byte follows
        if not _IS_START[(data[at].astype(np.uint16) << 8) | data[at + 1]].any():
            return False
    return _ANY.search(document.decode()) is not None


def parts_by_new_letters(document: bytes) -> list[tuple[bool, bytes]]:
    """Split a document into independently encodable parts; the flag says whether a part contains new letters."""
    parts: list[tuple[bool, bytes]] = []
    for line in _cut(document, _LINE_END, 1):
        if has_new_letter(line):
            parts += [(has_new_letter(part), part) for part in _cut(line, _SPACE, 0)]
        else:
            parts.append((False, line))
    runs = groupby(parts, key=itemgetter(0))
    return [(is_odd, b"".join(part for _, part in run)) for is_odd, run in runs]


def _cut(text: bytes, border: re.Pattern[bytes], offset: int) -> list[bytes]:
    ends = [match.start() + offset for match in border.finditer(text)]
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]


# -- third-party tokenizers --------------------------------------------------------------------------------------------

# Bytes of text per core to encode at once: enough to keep all cores busy without using much memory.
_BATCH_BYTES_PER_CORE, _MOST_CORES = 512 << 10, 16


class TheirEncoder:
    """Encodes with `tokenizers` itself, for third-party tokenizers whose split pattern gigatoken does not know.

    A document is encoded whole, never in parts, so that the split pattern and the normalizer see all of its text.
    An encoding takes far more memory than its ids. But documents have a maximum size (text/documents), a batch contains
    only a few documents, and its encodings are freed before the next batch, so memory use is bounded. `tokenizers` uses
    all cores for a batch.

    This encoder is an order of magnitude slower than gigatoken, so `homing prep` reports when it is used. Like
    gigatoken, it never produces special ids.
    """

    def __init__(self, path: str | os.PathLike[str], end_id: int | None = None) -> None:
        """Load the tokenizer. `end_id`, if any, is appended to each document."""
        self._tokenizer = load_tokenizer(path)
        self._end = np.array([] if end_id is None else [end_id], dtype=np.uint32)
        self._batch_bytes = _BATCH_BYTES_PER_CORE * min(os.cpu_count() or 1, _MOST_CORES)

    def encode(self, documents: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Return an array of all ids, and an array of each document's offset in it, followed by the total length.

        Several threads may call this at the same time.
        """
        rows = [part for row in self._rows(documents) for part in (row, self._end)]
        sizes = [len(text) + len(end) for text, end in zip(rows[::2], rows[1::2], strict=True)]
        ids = np.concatenate(rows) if rows else np.empty(0, dtype=np.uint32)
        return ids, np.cumsum([0, *sizes], dtype=np.int64)

    def prove(self, documents: Sequence[bytes]) -> Proof:
        """Like `Encoder.prove`, but verify that each text gets the same ids in a batch as when encoded alone."""
        texts = [text.encode() for text in AWKWARD] + list(documents)
        rows = [row.tolist() for row in self._rows(texts)]
        return Proof("a batch of tokenizers", lambda: self._tokenizer, texts, rows)

    def _rows(self, documents: Sequence[bytes]) -> Iterator[npt.NDArray[np.uint32]]:
        for batch in _batches(documents, self._batch_bytes):
            for ids in self._tokenizer.encode_many([document.decode() for document in batch]):
                yield np.array(ids, dtype=np.uint32)


def _batches(documents: Sequence[bytes], size: int) -> Iterator[list[bytes]]:
    batch, num_bytes = list[bytes](), 0
    for document in documents:
        batch.append(document)
        num_bytes += len(document)
        if num_bytes >= size:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
