"""Prep with a third-party tokenizer: the ids of `tokenizers`, the special tokens of its family, none of ours."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lm.data.prep.test_pipeline import Killed, files, killed_after, order_of, run, stages, text_of, warnings
from tests.lm.model.open_weights.foreign_models import write_their_tokenizer
from tokenizers import Tokenizer

from homing.errors import DataError
from homing.lm.data.prep import PrepOrder, Progress, chunks, encode_pass, prepare
from homing.lm.data.text import read_bytes
from homing.lm.tokenizer import encode, load_tokenizer
from homing.lm.tokenizer.encode import TheirEncoder
from homing.lm.tokenizer.write_files import read_facts
from homing.wire.shard_manifest import DataManifest

# A digit is a word of its own in Qwen's split; NFC joins the accent; specials are text, an added word is itself.
ODD = ["20241115 12 345", "Cafe\u0301 <|im_start|>x", "<think>so</think>", "  \n\n \t\r\n x   y", "It'LL 漢字🎉ß" * 40]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": text}) for text in [*text_of(300), *ODD, *text_of(100, seed=3)]]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(params=["qwen2", "llama-3"])
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = write_their_tokenizer(tmp_path / request.param, request.param, " ".join(text_of(300)))
    (path.parent / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return path


def order_with(reference: Path, corpus: Path, **changes: Any) -> PrepOrder:
    return order_of(corpus, tokenizer=str(reference), vocab_size=read_facts(reference).vocab_size, **changes)


def rows(folder: Path, manifest: DataManifest, split: str = "train") -> list[list[int]]:
    found = []
    for shard in manifest.splits[split].shards:
        tokens = np.fromfile(folder / shard.name, dtype=manifest.dtype).tolist()
        index = np.fromfile(folder / shard.index_name, dtype=np.uint64).astype(int)
        found += [tokens[start:end] for start, end in pairwise(index)]
    return found


def test_each_document_has_the_ids_of_tokenizers_between_the_marks_of_the_family(corpus: Path, reference: Path) -> None:
    order = order_with(reference, corpus, val_fraction=0.0, shard_tokens=3000)
    manifest, seen = run(order)
    backend = Tokenizer.from_file(str(reference))
    backend.encode_special_tokens = True
    is_qwen = reference.parent.name == "qwen2"
    before = [backend.token_to_id("<|endoftext|>" if is_qwen else "<|begin_of_text|>")]
    after = [] if is_qwen else [backend.token_to_id("<|end_of_text|>")]
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    wanted = [[*before, *backend.encode(text, add_special_tokens=False).ids, *after] for text in texts]
    assert rows(order.dir, manifest) == wanted
    if is_qwen:
        digits = load_tokenizer(reference).encode("20241115")
        assert len(digits) == 8, "each is a word of its own"
        assert wanted[302].count(backend.token_to_id("<think>")) == 1
        assert backend.token_to_id("<|im_start|>") not in wanted[301]
    assert manifest.vocab_size == load_tokenizer(order.dir).vocab_size
    assert manifest.splits["train"].num_text_bytes == sum(len(text.encode()) for text in texts)
    assert "The fast encoder does not support" in warnings(seen)
    assert ("uses a custom pre-tokenizer" if is_qwen else "ignores merges for whole words") in warnings(seen)


def test_files_of_a_third_party_tokenizer_replace_ours(corpus: Path, reference: Path) -> None:
    own = order_of(corpus)
    run(own)
    assert (own.dir / "vocab.json").exists()
    order = order_with(reference, corpus)
    manifest, _ = run(order)
    kept = {"tokenizer.json", "tokenizer_config.json", "manifest.json", "prep.json"}
    assert {path.name for path in order.dir.iterdir() if "-0" not in path.name} == kept
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (order.dir / name).read_bytes() == (reference.parent / name).read_bytes()
    again, seen = run(order)
    assert stages(seen) == {"reused"}
    assert again == manifest
    (reference.parent / "chat_template.jinja").write_text("{{ messages }}")
    _, seen = run(order)
    assert "reused" not in stages(seen)
    assert (order.dir / "chat_template.jinja").exists()


@pytest.mark.parametrize("reference", ["llama-3"], indirect=True)
@pytest.mark.parametrize("kill_after", [0, 1, 2, 3, 4, 6, 9])
def test_an_external_prep_stopped_at_any_write_resumes_to_the_same_bytes(
    corpus: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, kill_after: int
) -> None:
    monkeypatch.setattr(read_bytes, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 4000)
    monkeypatch.setattr(encode_pass, "SLOW_MARK_BYTES", 10_000)
    monkeypatch.setattr("homing.lm.data.text.split._MAX_EXACT", 50)
    order = order_with(reference, corpus, shard_tokens=3000, val_fraction=0.1)
    run(dataclasses.replace(order, dir=corpus.parent / "whole"))
    killed_after(kill_after, order, monkeypatch)
    run(order)
    assert files(order.dir) == files(corpus.parent / "whole")


@pytest.mark.parametrize("reference", ["qwen2"], indirect=True)
def test_a_slow_pass_writes_resume_points_and_resumes_from_the_last(
    corpus: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_bytes, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 4000)
    monkeypatch.setattr(encode_pass, "SLOW_MARK_BYTES", 10_000)
    monkeypatch.setattr("homing.lm.data.text.split._MAX_EXACT", 50)
    order = order_with(reference, corpus)

    def die_at(progress: Progress) -> None:
        if progress.stage == "encode" and progress.done_bytes > corpus.stat().st_size * 0.8:
            raise Killed

    with pytest.raises(Killed):
        prepare(order, die_at)
    _, seen = run(order)
    first = next(progress for progress in seen if progress.stage == "encode")
    assert first.done_bytes > corpus.stat().st_size * 0.4
    assert "resumed" in stages(seen)


def test_batches_change_no_id_and_hold_few_documents(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [text.encode() for text in [*text_of(60), *ODD]]
    wanted, starts = TheirEncoder(reference, 7).encode(documents)
    assert [int(wanted[start - 1]) for start in starts[1:]] == [7] * len(documents)
    encoder = TheirEncoder(reference, 7)
    encoder._batch_bytes, sizes = 1000, []
    inner = encoder._tokenizer.encode_many
    monkeypatch.setattr(encoder._tokenizer, "encode_many", lambda texts: sizes.append(len(texts)) or inner(texts))
    ids, again = encoder.encode(documents)
    assert ids.tolist() == wanted.tolist()
    assert again.tolist() == starts.tolist()
    assert len(sizes) > 5
    assert encoder.encode([])[1].tolist() == [0]
    assert encode._BATCH_BYTES_PER_CORE >= 1000


def test_a_tokenizer_that_says_to_cut_each_text_cuts_none(tmp_path: Path, corpus: Path) -> None:
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path = write_their_tokenizer(tmp_path / "cut", "qwen2", " ".join(text_of(300)), truncation=cut)
    plain = write_their_tokenizer(tmp_path / "plain", "qwen2", " ".join(text_of(300)))
    manifest, _ = run(order_with(path, corpus))
    other, _ = run(order_with(plain, corpus, dir=tmp_path / "other"))
    assert manifest.splits["train"].num_tokens == other.splits["train"].num_tokens > 1000


def test_a_vocabulary_that_would_lose_letters_is_refused(tmp_path: Path) -> None:
    path = write_their_tokenizer(tmp_path, "qwen2", "some text", num_merges=2)
    data = json.loads(path.read_text())
    del data["model"]["vocab"]["!"]
    path.write_text(json.dumps(data))
    with pytest.raises(DataError) as caught:
        read_facts(path)
    assert "lacks 1 of the 256 bytes, such as 0x21" in caught.value.why
