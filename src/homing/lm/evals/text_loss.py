"""Computes bits per byte and perplexity on any text: files, or the text held out from a run's training data.

    documents -> <|endoftext|> and their ids -> overlapping windows -> nats -> sums over stretches of bytes

Every token of the text is predicted once: the first from the <|endoftext|> before the document, each later one with at
least `window - stride` tokens of context if the text has them. <|endoftext|> itself has no bytes and is never
predicted. The result is slightly lower than the trainer's, because the trainer's rows may begin anywhere in a document,
so that their first tokens have little context.

The units are stretches of text of a fixed number of bytes, and a token belongs to the stretch in which it begins. The
stretches are the same for every tokenizer, so that models with different tokenizers can be compared stretch by stretch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from homing.errors import DataError
from homing.find_source_files import find_sources
from homing.lm.data.shards.read_shards import file_sha256, open_split, read_manifest
from homing.lm.data.text.documents import MAX_DOCUMENT_BYTES, Cuts, documents_of
from homing.lm.data.text.read_bytes import Reading
from homing.lm.evals.eval_result import Measured, Score, files_sha256
from homing.lm.evals.likelihood import Row, score_rows, windows
from homing.lm.model import Decoder
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.wire import file_names

__all__ = ["LARGEST_WINDOW", "STRETCH_BYTES", "Text", "held_out_text", "measure_text", "text_in_files"]

LARGEST_WINDOW = 2048  # default limit on the window: longer windows hardly change the result but cost a lot
STRETCH_BYTES = 2048


@dataclass(frozen=True)
class Text:
    """A text to evaluate on. `documents` can be called repeatedly and starts from the beginning each time."""

    name: str
    sha256: str
    documents: Callable[[], Iterator[str]]


def text_in_files(patterns: Sequence[str], *, text_field: str = "text") -> Text:
    """Return text from files, with one document per file, JSON line or Parquet row.

    A file is split into several documents only at <|endoftext|>, or if it is very long.
    """
    sources = find_sources(patterns, key="text").sources

    def documents() -> Iterator[str]:
        for source in sources:
            cuts = Cuts(unmarked_bytes=MAX_DOCUMENT_BYTES // 2, text_field=text_field)
            with Reading(source) as reading:
                yield from (document.decode() for document in documents_of(reading, cuts))

    name = ", ".join(Path(source.path).name for source in sources[:3])
    more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
    return Text(name + more, files_sha256(Path(source.path) for source in sources), documents)


def held_out_text(data_dir: Path, run_name: str) -> Text:
    """Return the text that `homing prep` held out for a run, decoded, so that other models can be evaluated on it."""
    manifest = read_manifest(data_dir)
    split = open_split(data_dir, manifest, "val")
    tokenizer = load_tokenizer(data_dir / file_names.TOKENIZER)

    def documents() -> Iterator[str]:
        for ids in split.documents():
            yield tokenizer.decode((int(i) for i in ids), skip_specials=True)

    sha256 = hashlib.sha256("".join(shard.sha256 for shard in manifest.splits["val"].shards).encode()).hexdigest()
    return Text(f"text held out for {run_name}", sha256, documents)


def has_data(data_dir: Path, manifest_sha256: str) -> bool:
    """Return whether `data_dir` contains exactly the run's data.

    If it does not, the run may have been trained on text that is held out there.
    """
    path = data_dir / file_names.MANIFEST
    return path.is_file() and (not manifest_sha256 or file_sha256(path) == manifest_sha256)


def measure_text(
    model: Decoder, tokenizer: Tokenizer, text: Text, *, window: int = 0, at_most: int = 0,
    notify: Callable[[str], None] = lambda done: None,
) -> Measured:  # fmt: skip
    """Evaluate on at most `at_most` documents, or on all if it is 0."""
    context = min(window or LARGEST_WINDOW, model.shape.context)
    stride = max(1, context // 2)
    sums = _Sums(tokenizer.token_bytes())
    documents = islice(text.documents(), at_most or None)
    rows = sums.rows(documents, tokenizer, context, stride)
    for scored in score_rows(model, rows, notify=notify):
        sums.add(scored.nats)
    if not sums.num_tokens:
        raise DataError(
            what=f"{text.name} has nothing to evaluate.", why="It has no text.", fix="Use a different text: --text FILE"
        )
    nats, text_bytes, tokens = sums.columns()
    what = f"{len(nats):,} stretches of {STRETCH_BYTES:,} bytes"
    return Measured(
        name=text.name,
        kind="text",
        scores=[
            Score("bits_per_byte", nats / math.log(2), text_bytes, what),
            Score("perplexity", nats, tokens, what, is_exp=True, by_tokenizer=True, is_compared=False),
            Score("nats_per_token", nats, tokens, what, by_tokenizer=True, is_compared=False),
        ],
        counts={"documents": sums.num_documents, "tokens": sums.num_tokens, "bytes": int(text_bytes.sum())},
        data_sha256=text.sha256,
        settings={"window": context, "stride": stride, "at_most": at_most},
    )


class _Sums:
    """Adds up the nats, bytes and tokens in each stretch of text.

    Call `add` once for each row that `rows` yielded, in the same order.
    """

    def __init__(self, token_bytes: Sequence[int]) -> None:
        self._token_bytes = np.array(token_bytes, dtype=np.int64)
        self._expected: list[NDArray[np.int64]] = []  # for each yielded row, the stretch that each target belongs to
        self._nats: list[float] = []
        self._bytes: list[int] = []
        self._tokens: list[int] = []
        self.num_documents = self.num_tokens = 0

    def rows(self, documents: Iterable[str], tokenizer: Tokenizer, context: int, stride: int) -> Iterator[Row]:
        for document in documents:
            ids = [tokenizer.end_of_text_id, *tokenizer.encode(document)]
            if len(ids) < 2:
                continue
            stretches = self._new_stretches(len(document.encode()), ids[1:])
            done = 0
            for row in windows(ids, context, stride):
                count = int(row.is_target.sum())
                self._expected.append(stretches[done : done + count])
                done += count
                yield row

    def add(self, nats: NDArray[np.float64]) -> None:
        stretches = self._expected.pop(0)
        self.num_tokens += len(nats)
        for stretch in np.unique(stretches).tolist():
            here = stretches == stretch
            self._nats[stretch] += float(nats[here].sum())
            self._tokens[stretch] += int(here.sum())

    def columns(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        nats, num_bytes, tokens = (np.array(each, dtype=np.float64) for each in (self._nats, self._bytes, self._tokens))
        return nats, num_bytes, tokens

    def _new_stretches(self, num_bytes: int, ids: list[int]) -> NDArray[np.int64]:
        """Return, for each token id, the index of the stretch in which the token begins.

        A stretch never spans two documents.
        """
        sizes = self._token_bytes[ids]
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        count = -(-num_bytes // STRETCH_BYTES)
        first = len(self._nats)
        lengths = [STRETCH_BYTES] * (count - 1) + [num_bytes - STRETCH_BYTES * (count - 1)]
        self._nats += [0.0] * count
        self._tokens += [0] * count
        self._bytes += lengths
        self.num_documents += 1
        # If the tokenizer normalizes text, the last token may begin a byte or two after the end of the document itself.
        return first + np.minimum(starts // STRETCH_BYTES, count - 1)
