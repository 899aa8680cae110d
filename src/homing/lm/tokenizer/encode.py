"""Documents to ids at full speed: gigatoken, loaded from tokenizer.json without its special tokens.

Without them on purpose: with them, text that spells <|endoftext|> would become the control id. Ids stay ours, because
the vocabulary carries them; the ids of specials are simply never produced.

gigatoken is young, so it is not believed: `prove` encodes awkward strings and the beginning of the person's own text
with `tokenizers` as well, at each start, and one different id stops the run. There is no second encoder to fall
back to; shards must not depend on which of two was in a good mood.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from homing.errors import DataError, IntegrityError
from homing.lm.tokenizer.load import load_tokenizer, read_tokenizer_json

__all__ = ["AWKWARD", "Encoder", "warm_up"]

# gigatoken remembers every word it has met. A fresh one costs a tenth of a second, so it is dropped after so much text.
_FRESH_AFTER_BYTES = 256_000_000

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


def warm_up() -> threading.Thread:
    """Imports what `Encoder` needs beside the caller's own work; join it before the first `encode`."""
    # gigatoken hands its rows over as an awkward array, whose import alone takes half a second.
    thread = threading.Thread(target=importlib.import_module, args=("awkward",), name="warm-up", daemon=True)
    thread.start()
    return thread


class Encoder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        data = read_tokenizer_json(path)
        data["added_tokens"] = []
        data["post_processor"] = None
        self._json = json.dumps(data)
        self._backend: Any = self._load()
        self._num_bytes = 0

    def encode(self, documents: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """All ids end to end, and where each document begins, with the end of the last one added."""
        from gigatoken import BytesSource

        if self._num_bytes > _FRESH_AFTER_BYTES:
            self._backend, self._num_bytes = self._load(), 0
        self._num_bytes += sum(map(len, documents))
        rows = self._backend.encode_batch(BytesSource(list(documents))).layout
        starts = np.asarray(rows.offsets.data, dtype=np.int64)
        assert len(starts) == len(documents) + 1, "one row for each document"
        return np.asarray(rows.content.data, dtype=np.uint32)[starts[0] : starts[-1]], starts - starts[0]

    def prove(self, documents: Sequence[bytes]) -> None:
        """Raises unless `tokenizers` gives the same ids for AWKWARD and for `documents`."""
        reference = load_tokenizer(self._path)
        texts = [text.encode() for text in AWKWARD] + list(documents)
        ids, starts = self.encode(texts)
        for number, text in enumerate(texts):
            got = ids[starts[number] : starts[number + 1]].tolist()
            wanted = reference.encode(text.decode())
            if got != wanted:
                raise _not_identical(text, got, wanted)

    def _load(self) -> Any:
        from gigatoken.gigatoken_rs import load_hf_json

        try:
            return load_hf_json(self._json)
        except Exception as exc:  # the package raises what its parser raises
            raise DataError(
                what=f"The encoder cannot load {self._path}.",
                why=str(exc),
                fix="Leave it out, and prep trains a tokenizer of its own.",
            ) from exc


def _not_identical(text: bytes, got: list[int], wanted: list[int]) -> IntegrityError:
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    return IntegrityError(
        what="The fast encoder and tokenizer.json give different ids for the same text.",
        why=f"Token {at} of {text[:60]!r}: gigatoken {got[at : at + 4]}, tokenizers {wanted[at : at + 4]}.",
        fix="Install the versions in constraints.txt: pip install -c constraints.txt gigatoken tokenizers",
    )
