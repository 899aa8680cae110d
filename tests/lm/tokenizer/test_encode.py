"""A fresh backend now and then: the old one is gone before the new one comes, and no id changes."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from homing.lm.tokenizer import encode
from homing.lm.tokenizer.encode import Encoder
from homing.lm.tokenizer.tokenizer import SPECIALS
from homing.lm.tokenizer.train_bpe import learn_merges
from homing.lm.tokenizer.write_files import build_tokenizer_json

TEXT = Path(__file__).read_bytes()


class Backend:
    """gigatoken's own, and weakly referable."""

    def __init__(self, own: Any) -> None:
        self.encode_batch = own.encode_batch


@pytest.mark.slow
def test_threads_that_share_an_encoder_never_have_two_backends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    merges = learn_merges([TEXT], num_merges=100, split="gpt4")
    path.write_text(build_tokenizer_json(merges, SPECIALS["standard"], "gpt4"), encoding="utf-8")
    chunks = [[TEXT[start : start + 300], b"end"] for start in range(0, len(TEXT), 30)]
    wanted = [Encoder(path).encode(piece)[0].tolist() for piece in chunks]

    load, alive, most = Encoder._load, weakref.WeakSet[Backend](), []

    def load_and_count(self: Encoder) -> Any:
        gc.collect()
        most.append(len(alive))
        backend = Backend(load(self))
        alive.add(backend)
        return backend

    monkeypatch.setattr(encode, "_FRESH_AFTER_BYTES", 2000)
    monkeypatch.setattr(Encoder, "_load", load_and_count)
    encoder = Encoder(path)
    with ThreadPoolExecutor(4) as pool:
        got = [ids.tolist() for ids, _ in pool.map(encoder.encode, chunks)]
    assert got == wanted
    assert len(most) > 3
    assert max(most) == 0, "the old one was still there when the new one was loaded"
