"""The whole of prep: the same bytes whatever happens on the way, and nothing half-made that looks whole."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homing.errors import DataError, IntegrityError
from homing.find_source_files import Source
from homing.lm.data.prep import PrepOrder, Progress, chunks, encode_pass, prepare, scan_pass, work_folder
from homing.lm.data.text import read_bytes
from homing.lm.data.text.split import HASH_SPACE, document_hash
from homing.lm.tokenizer import load_tokenizer
from homing.lm.tokenizer.encode import Encoder
from homing.wire.codec import loads
from homing.wire.shard_manifest import DataManifest

WORDS = ["the", "cat", "sat", "on", "a", "mat", "Größe", "straße", "漢字", "🎉", "isn't", "12345", "return", "x", "y"]


def text_of(num_documents: int, seed: int = 1) -> list[str]:
    chance = random.Random(seed)
    return [
        " ".join(chance.choice(WORDS) + chance.choice(["", "s", "ing", "."]) for _ in range(chance.randint(5, 60)))
        for _ in range(num_documents)
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("<|endoftext|>".join(text_of(400)), encoding="utf-8")
    return path


def order_of(corpus: Path, **changes: Any) -> PrepOrder:
    values: dict[str, Any] = {"text": [str(corpus)], "dir": corpus.parent / "out", "vocab_size": 320, **changes}
    return PrepOrder(**values)


def run(order: PrepOrder) -> tuple[DataManifest, list[Progress]]:
    seen: list[Progress] = []
    return prepare(order, seen.append), seen


def decoded(folder: Path, split: str = "train") -> list[str]:
    """Documents read back from the shards."""
    manifest = loads(DataManifest, (folder / "manifest.json").read_bytes())
    tokenizer = load_tokenizer(folder)
    texts = []
    for shard in manifest.splits[split].shards:
        tokens = np.fromfile(folder / shard.name, dtype=manifest.dtype)
        index = np.fromfile(folder / shard.index_name, dtype=np.uint64).astype(int)
        for start, end in pairwise(index):
            assert tokens[start] == tokenizer.end_of_text_id
            assert (tokens[start + 1 : end] >= len(tokenizer.specials)).all()
            texts.append(tokenizer.decode(tokens[start + 1 : end].tolist()))
    return texts


def files(folder: Path) -> dict[str, str]:
    """Every file by its hash; manifest and stamps carry times, so they are left out."""
    paths = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("manifest.json", "prep.json")]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def warnings(seen: list[Progress]) -> str:
    return "\n".join(progress.warning for progress in seen if progress.warning)


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.acceptance(12, 24)
def test_every_document_comes_back_once_on_the_side_its_hash_says(corpus: Path) -> None:
    manifest, _ = run(order_of(corpus, val_fraction=0.1, shard_tokens=2000))
    documents = corpus.read_text(encoding="utf-8").split("<|endoftext|>")
    train, val = decoded(corpus.parent / "out"), decoded(corpus.parent / "out", "val")
    assert sorted(train + val) == sorted(documents)
    assert max(document_hash(d.encode()) for d in val) < min(document_hash(d.encode()) for d in train)
    assert 0.08 < sum(map(len, val)) / sum(map(len, documents)) < 0.12
    assert train == [d for d in documents if d in set(train)], "in the order of the file"
    assert len(manifest.splits["train"].shards) > 3
    for split, texts in (("train", train), ("val", val)):
        assert manifest.splits[split].num_documents == len(texts)
        assert manifest.splits[split].num_text_bytes == sum(len(t.encode()) for t in texts)


@pytest.mark.acceptance(14)
def test_the_manifest_records_sizes_hashes_settings_and_version(corpus: Path) -> None:
    manifest, _ = run(order_of(corpus))
    out = corpus.parent / "out"
    on_disk = loads(DataManifest, (out / "manifest.json").read_bytes())
    assert on_disk == manifest
    assert manifest.source[0].sha256 == hashlib.sha256(corpus.read_bytes()).hexdigest()
    assert manifest.tokenizer_sha256 == hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest()
    assert manifest.dtype == "uint16"
    assert manifest.vocab_size == 320 == load_tokenizer(out).vocab_size
    assert manifest.specials[0] == "<|endoftext|>"
    assert manifest.settings["num_merges"] == 320 - 256 - 16
    assert manifest.code_version
    assert sorted(p.name for p in out.iterdir() if "-0" not in p.name) == [
        *("manifest.json", "merges.txt", "prep.json", "tokenizer.json", "tokenizer_config.json", "vocab.json")
    ]


def test_one_special_and_a_large_vocabulary_width(corpus: Path) -> None:
    manifest, _ = run(order_of(corpus, specials="one", vocab_size=300, split="gpt2"))
    assert manifest.settings["num_merges"] == 300 - 257
    assert manifest.specials == ["<|endoftext|>"]


@pytest.mark.acceptance(13)
def test_a_validation_file_is_val_and_is_not_trained_on(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("<|endoftext|>".join(text_of(5, seed=2)), encoding="utf-8")
    order = order_of(corpus, text=[f"{tmp_path}/*.txt"], validation=[str(tmp_path / "valid.txt")])
    _, seen = run(order)
    assert decoded(order.dir, "val") == text_of(5, seed=2)
    assert decoded(order.dir) == text_of(400)
    assert "also listed for validation" in warnings(seen)


@pytest.mark.acceptance(16)
def test_one_file_without_a_marker_still_splits_and_says_so(tmp_path: Path) -> None:
    play = tmp_path / "play.txt"
    play.write_text("\n\n".join(text_of(5000)), encoding="utf-8")
    order = order_of(play, val_fraction=0.05)
    manifest, seen = run(order)
    train, val = manifest.splits["train"], manifest.splits["val"]
    assert 0.04 < val.num_text_bytes / (train.num_text_bytes + val.num_text_bytes) < 0.06
    assert val.num_documents >= 3
    (note,) = [progress.note for progress in seen if progress.note]
    assert note.startswith("The text has no <|endoftext|> marker: 1 large file was split at paragraph breaks")
    assert warnings(seen) == "", "ordinary text has none, and there is nothing to fix"
    assert len("".join(decoded(order.dir) + decoded(order.dir, "val"))) == len(play.read_text(encoding="utf-8"))


@pytest.mark.acceptance(16)
@pytest.mark.parametrize("border", ["<|endoftext|>", "\n\n"])
def test_of_a_part_of_the_text_it_is_said_truly_whether_it_has_the_marker(tmp_path: Path, border: str) -> None:
    play = tmp_path / "play.txt"
    play.write_text(border.join(text_of(5000)), encoding="utf-8")
    manifest, seen = run(order_of(play, take_bytes=60_000))
    assert manifest.splits["train"].num_documents > 1
    notes = [progress.note for progress in seen if "has no <|endoftext|> marker" in progress.note]
    messages = "The text has no <|endoftext|> marker: 1 large file was split at paragraph breaks"
    assert [note.startswith(messages) for note in notes] == ([] if border == "<|endoftext|>" else [True])


@pytest.mark.acceptance(16)
def test_where_the_marker_is_the_only_special_its_absence_is_a_warning(tmp_path: Path) -> None:
    play = tmp_path / "play.txt"
    play.write_text("\n\n".join(text_of(500)), encoding="utf-8")
    _, seen = run(order_of(play, specials="one"))
    assert "The text has no <|endoftext|> marker" in warnings(seen)
    assert [progress.note for progress in seen if "<|endoftext|>" in progress.note] == []


def test_the_marker_warning_is_silent_where_a_marker_occurs_or_json_lines_need_none(corpus: Path) -> None:
    _, seen = run(order_of(corpus))
    assert warnings(seen) == ""
    lines = corpus.parent / "a.jsonl"
    lines.write_text("\n".join(json.dumps({"text": t}) for t in text_of(300)), encoding="utf-8")
    _, seen = run(order_of(lines, dir=corpus.parent / "out2"))
    assert warnings(seen) == ""


def test_windows_line_ends_are_kept_and_reported(corpus: Path) -> None:
    text = corpus.read_text(encoding="utf-8").replace(" the ", "\r\n")
    assert "\r\n" in text
    for number in range(2):
        (corpus.parent / f"w{number}.txt").write_text(text, encoding="utf-8", newline="")
    order = order_of(corpus, text=[f"{corpus.parent}/*.txt"])
    _, seen = run(order)
    (messages,) = warnings(seen).splitlines()
    assert messages.startswith(f"Lines in {corpus.parent}/w0.txt and in 1 other file end in \\r\\n")
    assert messages.endswith(r" Convert them: sed -i 's/\r$//' FILES")
    assert any("\r\n" in document for document in decoded(order.dir))
    (corpus.parent / "w.gz").write_bytes(gzip.compress(text.encode()))  # which sed would spoil
    _, seen = run(order_of(corpus, text=[str(corpus.parent / "w.gz")]))
    assert "Convert decompressed copies: sed" in warnings(seen)


@pytest.mark.acceptance(25)
def test_packed_and_plain_text_and_json_lines_give_the_same_shards(corpus: Path) -> None:
    folder = corpus.parent
    (folder / "b.txt.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    (folder / "c.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in text_of(400)), encoding="utf-8")
    results = []
    for name in ("corpus.txt", "b.txt.gz", "c.jsonl"):
        run(order_of(folder / name, dir=folder / f"out-{name}"))
        results.append(files(folder / f"out-{name}"))
    assert results[0] == results[1] == results[2]


def test_two_preps_of_the_same_text_are_identical_for_any_chunk_size(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(order_of(corpus))
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 500)
    run(order_of(corpus, dir=corpus.parent / "again"))
    assert files(corpus.parent / "out") == files(corpus.parent / "again")


def test_the_sample_is_spread_over_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 2000)
    monkeypatch.setattr(read_bytes, "BLOCK_BYTES", 2000)
    path = tmp_path / "a.txt"
    path.write_text("aaaa bbbb<|endoftext|>" * 5000 + "yyyy zzzz<|endoftext|>" * 5000, encoding="utf-8")
    order = order_of(path, sample_bytes=10_000, vocab_size=256 + 16 + 8, val_fraction=0.0)
    run(order)
    vocab = json.loads((order.dir / "vocab.json").read_text(encoding="utf-8"))
    assert {"aa", "yy"} <= set(vocab)


@pytest.mark.acceptance(17)
def test_one_special_leaves_room_for_9743_merges_of_10000(tmp_path: Path) -> None:
    chance = random.Random(4)
    words = ["".join(chance.choices("aeiounrstlmdk", k=chance.randint(4, 9))) for _ in range(8000)]
    (tmp_path / "words.txt").write_text(" ".join(chance.choices(words, k=60_000)), encoding="utf-8")
    manifest, _ = run(order_of(tmp_path / "words.txt", vocab_size=10_000, specials="one"))
    merges = (tmp_path / "out" / "merges.txt").read_text(encoding="utf-8").splitlines()
    assert len([line for line in merges if not line.startswith("#version")]) == 9743
    assert manifest.vocab_size == load_tokenizer(tmp_path / "out").vocab_size == 10_000


# --- how much is held out ---------------------------------------------------------------------------------------------


def paragraphs(num_bytes: int, seed: int) -> str:
    chance, parts, size = random.Random(seed), [], 0
    while size < num_bytes:
        parts.append(" ".join(chance.choice(WORDS[:7]) + str(chance.randint(0, 99)) for _ in range(60)) + ".")
        size += len(parts[-1].encode()) + 2
    return "\n\n".join(parts)


def shape(name: str) -> list[str]:
    """Documents of one corpus, by what makes it hard to hold out the right share of it."""
    if name == "few long documents":
        return [paragraphs(150_000, seed) for seed in range(4)]
    if name == "one short document":
        return [paragraphs(30_000, 1)]
    if name == "one long and many short documents":
        return [paragraphs(200_000, 1), *text_of(400)]
    if name == "the same long document four times":
        return [paragraphs(100_000, 1)] * 4
    if name == "many documents and one long":
        return [paragraphs(400_000, 2), *text_of(5000)]
    # As many bytes of each, and several times as many tokens of the one as of the other.
    assert name == "two languages"
    chance = random.Random(3)
    dense = ["".join(chance.choices("漢字仮名交文", k=400)) for _ in range(40)]
    return [line for text in dense for line in (text, " ".join(chance.choices(["the", "cat", "sat", "on"], k=350)))]


SHAPES = (
    *("few long documents", "one short document", "one long and many short documents"),
    *("the same long document four times", "many documents and one long", "two languages"),
)


def share_of(manifest: DataManifest) -> float:
    counts = {name: split.num_tokens for name, split in manifest.splits.items()}
    return counts["val"] / sum(counts.values())


@pytest.mark.parametrize("fraction", [0.05, 0.5])
@pytest.mark.parametrize("name", SHAPES)
def test_the_share_of_tokens_that_is_held_out_is_right_within_one_percentage_point(
    tmp_path: Path, name: str, fraction: float
) -> None:
    documents = shape(name)
    path = tmp_path / "corpus.txt"
    path.write_text("<|endoftext|>".join(documents), encoding="utf-8")
    order = order_of(path, val_fraction=fraction)
    manifest, seen = run(order)
    assert abs(share_of(manifest) - fraction) <= 0.01
    assert warnings(seen) == ""
    train, val = decoded(order.dir), decoded(order.dir, "val")
    assert sum(map(len, train + val)) == sum(map(len, documents)), "nothing is lost"
    assert not set(train) & set(val), "equal documents are on one side"
    if fraction == 0.05:
        again, _ = run(order_of(path, val_fraction=fraction, dir=tmp_path / "again"))
        assert files(tmp_path / "again") == files(order.dir)
        assert again.splits == manifest.splits


def test_passages_of_long_documents_are_held_out_cut_at_paragraph_breaks(tmp_path: Path) -> None:
    documents = [paragraphs(150_000, seed) for seed in range(4)]
    path = tmp_path / "corpus.txt"
    path.write_text("<|endoftext|>".join(documents), encoding="utf-8")
    order = order_of(path, val_fraction=0.05)
    manifest, seen = run(order)
    assert abs(share_of(manifest) - 0.05) <= 0.01
    held_out = decoded(order.dir, "val")
    assert len(held_out) >= 4, "several passages, for one would be no fair sample"
    whole = set("\n\n".join(documents).split("\n\n"))
    for passage in held_out:
        assert set(passage.strip().split("\n\n")) <= whole, "no paragraph is cut"
    assert [p.note for p in seen if "passages" in p.note] == [
        "There are few documents, so homing held out passages of about 3.75 kB instead of whole documents."
    ]


def test_a_share_that_cannot_be_held_out_is_a_warning_every_time(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("the cat sat on the mat. " * 10 + "<|endoftext|>" + "a dog ran. " * 20, encoding="utf-8")
    for _ in range(2):  # the second time nothing is to be done
        _, seen = run(order_of(path, vocab_size=280, val_fraction=0.05))
        assert "are held out for validation instead of 5%" in warnings(seen)
        assert "data.validation" in warnings(seen)


def test_a_killed_prep_that_cuts_passages_resumes_to_the_same_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("<|endoftext|>".join(paragraphs(150_000, seed) for seed in range(8)), encoding="utf-8")
    whole, _ = run(order_of(path, val_fraction=0.05, dir=tmp_path / "whole"))
    monkeypatch.setattr(encode_pass, "MARK_BYTES", 300_000)
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 200_000)
    order = order_of(path, val_fraction=0.05)

    def dies(progress: Progress) -> None:
        if progress.stage == "encode" and progress.done_bytes > 700_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(order, dies)
    manifest, seen = run(order)
    assert next(p.stage for p in seen) == "resumed"
    assert manifest.splits == whole.splits
    assert files(order.dir) == files(tmp_path / "whole")


# --- a part of the text -----------------------------------------------------------------------------------------------


def read_into(order: PrepOrder, monkeypatch: pytest.MonkeyPatch) -> tuple[DataManifest, list[Progress], list[str]]:
    """With the names of the files that were opened."""
    opened: list[str] = []
    plain = read_bytes.Reading.__init__

    def noted(self: read_bytes.Reading, source: Source, **how: Any) -> None:
        opened.append(os.path.basename(source.path))
        plain(self, source, **how)

    with monkeypatch.context() as patch:
        patch.setattr(read_bytes.Reading, "__init__", noted)
        manifest, seen = run(order)
    return manifest, seen, opened


@pytest.mark.acceptance(5, 24)
def test_of_every_file_its_share_is_taken_and_the_rest_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("a", 300), ("b", 900), ("c", 300)):
        texts = text_of(count, seed=ord(name))
        (tmp_path / f"{name}.txt").write_text("<|endoftext|>".join(texts), encoding="utf-8")
    order = order_of(tmp_path / "a.txt", text=[str(tmp_path / "*.txt")], take_bytes=60_000, val_fraction=0.0)
    manifest, seen, _ = read_into(order, monkeypatch)
    whole = {name: (tmp_path / f"{name}.txt").read_text(encoding="utf-8").split("<|endoftext|>") for name in "abc"}
    got = decoded(order.dir)
    assert 60_000 <= manifest.splits["train"].num_text_bytes < 61_000, "to the end of a document"
    taken = {name: [text for text in got if text in set(texts)] for name, texts in whole.items()}
    assert all(taken[name] == whole[name][: len(taken[name])] for name in "abc"), "the beginning of each"
    sizes = {name: sum(len(text.encode()) for text in texts) for name, texts in taken.items()}
    assert sizes["b"] == pytest.approx(36_000, rel=0.05)
    assert sizes["a"] == pytest.approx(12_000, rel=0.1)
    assert [source.sha256 for source in manifest.source] == ["", "", ""], "no source was read completely"
    (note,) = [progress.note for progress in seen if "data.take" in progress.note]
    assert note.startswith("Using 60.")
    assert manifest.settings["take_bytes"] == 60_000
    _, seen, opened = read_into(order, monkeypatch)
    assert "reused" in stages(seen)
    assert opened == []


def test_of_many_small_files_most_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, text in enumerate(text_of(200)):
        (tmp_path / f"{number:03}.txt").write_text(text, encoding="utf-8")
    order = order_of(tmp_path / "000.txt", text=[str(tmp_path / "*.txt")], take_bytes=4000, vocab_size=280)
    _, _, opened = read_into(order, monkeypatch)
    assert 0 < len(set(opened)) < 60
    assert max(opened) > "150.txt", "from all of them, not from the first ones"


def test_validation_files_give_their_share_too(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("<|endoftext|>".join(text_of(5, seed=2)), encoding="utf-8")
    order = order_of(corpus, validation=[str(tmp_path / "valid.txt")], take_bytes=5000)
    manifest, _ = run(order)
    assert 1 <= manifest.splits["val"].num_documents < 5


@pytest.mark.parametrize("take_bytes", [0, 10**9])
def test_more_than_there_is_takes_all_as_before(corpus: Path, take_bytes: int) -> None:
    manifest, _ = run(order_of(corpus, take_bytes=take_bytes, shard_tokens=3000))
    run(order_of(corpus, dir=corpus.parent / "whole", shard_tokens=3000))
    assert files(corpus.parent / "out") == files(corpus.parent / "whole")
    assert manifest.source[0].sha256 == hashlib.sha256(corpus.read_bytes()).hexdigest()


@pytest.mark.acceptance(24)
@pytest.mark.parametrize("kill_after", [6, 14, 18])
def test_a_part_stopped_at_any_write_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_after: int
) -> None:
    for number in range(4):
        texts = "<|endoftext|>".join(text_of(300, seed=number))
        (tmp_path / f"{number}.txt").write_text(texts, encoding="utf-8")
    order = order_of(tmp_path / "0.txt", text=[str(tmp_path / "*.txt")], take_bytes=120_000, shard_tokens=3000)
    run(dataclasses.replace(order, dir=tmp_path / "whole"))
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 4000)
    monkeypatch.setattr(encode_pass, "MARK_BYTES", 10_000)
    killed_after(kill_after, order, monkeypatch)
    _, seen = run(order)
    assert files(order.dir) == files(tmp_path / "whole")
    assert "resumed" in stages(seen)


def test_nothing_that_is_not_yet_proven_is_gone_on_from(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison takes its time. Of a mark made before its end the next prep would never hear that it failed."""

    class Slow:
        def check(self, *, is_last: bool = False) -> None:
            if is_last:
                raise IntegrityError("The encoder and tokenizer.json give different ids.")

    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 4000)
    monkeypatch.setattr(encode_pass, "MARK_BYTES", 10_000)
    monkeypatch.setattr(Encoder, "prove", lambda self, documents: Slow())
    with pytest.raises(IntegrityError, match="different ids"):
        run(order_of(corpus))
    state = json.loads((corpus.parent / "out" / work_folder.WORK_FOLDER / work_folder.STATE).read_bytes())
    assert "scan" in state
    assert "mark" not in state


# --- an existing tokenizer --------------------------------------------------------------------------------------------


@pytest.mark.acceptance(15, 30, 73)
def test_an_existing_tokenizer_is_used_as_it_is(corpus: Path, tmp_path: Path) -> None:
    run(order_of(corpus))
    other = tmp_path / "other.txt"
    other.write_text("<|endoftext|>".join(text_of(50, seed=9)), encoding="utf-8")
    tokenizer = tmp_path / "out" / "tokenizer.json"
    manifest, _ = run(order_of(other, dir=tmp_path / "out2", tokenizer=str(tokenizer)))
    assert (tmp_path / "out2" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert manifest.tokenizer_sha256 == hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    assert sorted(decoded(tmp_path / "out2") + decoded(tmp_path / "out2", "val")) == sorted(text_of(50, seed=9))


@pytest.mark.acceptance(15, "P5")
def test_an_absent_or_other_sized_tokenizer_is_an_error_and_none_is_trained(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No tokenizer at"):
        run(order_of(corpus, tokenizer=str(tmp_path / "gone.json")))
    run(order_of(corpus))
    with pytest.raises(DataError, match=r"has a vocabulary of 320, but 400 was requested"):
        run(order_of(corpus, dir=tmp_path / "new", tokenizer=str(tmp_path / "out"), vocab_size=400))
    assert not (tmp_path / "new").exists()


@pytest.fixture
def known(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tokenizer that exists, and small chunks of a corpus that counts as large: text and shards in one pass."""
    run(order_of(corpus, dir=corpus.parent / "known"))
    monkeypatch.setattr(read_bytes, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 4000)
    monkeypatch.setattr(encode_pass, "MARK_BYTES", 10_000)
    monkeypatch.setattr("homing.lm.data.text.split._MAX_EXACT", 50)
    return str(corpus.parent / "known" / "tokenizer.json")


def count_readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a path whenever a source is opened to be read through."""
    opened: list[str] = []

    def counting(source: Source, **options: Any) -> read_bytes.Reading:
        opened.append(source.path)
        return read_bytes.Reading(source, **options)

    monkeypatch.setattr(chunks, "Reading", counting)
    return opened


def test_many_documents_and_a_tokenizer_that_exists_are_read_once(
    corpus: Path, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = order_of(corpus, dir=corpus.parent / "trained", val_fraction=0.1, shard_tokens=3000)
    run(trained)
    opened = count_readings(monkeypatch)
    order = dataclasses.replace(trained, dir=corpus.parent / "out", tokenizer=known)
    manifest, seen = run(order)
    assert opened == [str(corpus)]
    assert "scan" not in stages(seen)
    assert files(order.dir) == files(trained.dir), "as in two passes"
    assert manifest.source[0].sha256 == hashlib.sha256(corpus.read_bytes()).hexdigest()
    assert all(document_hash(d.encode()) < HASH_SPACE // 10 for d in decoded(order.dir, "val"))


def test_documents_that_turn_out_to_be_few_are_split_exactly_all_the_same(
    corpus: Path, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first chunk has very short documents, so the estimate is high; later documents are long.
    documents = ["a cat sat"[: 3 + n % 7] for n in range(900)] + [" ".join(text_of(40, seed=n)) for n in range(30)]
    corpus.write_text("<|endoftext|>".join(documents), encoding="utf-8")
    monkeypatch.setattr("homing.lm.data.text.split._MAX_EXACT", 1000)
    opened = count_readings(monkeypatch)
    order = order_of(corpus, tokenizer=known, val_fraction=0.2)
    _, seen = run(order)
    assert len(opened) == 2
    assert "scan" not in stages(seen)
    train, val = decoded(order.dir), decoded(order.dir, "val")
    assert sorted(train + val) == sorted(documents)
    assert 0.15 < sum(map(len, val)) / sum(map(len, documents)) < 0.25
    again = dataclasses.replace(order, dir=corpus.parent / "again")
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 1_000_000)
    _, seen = run(again)
    assert "scan" in stages(seen)
    assert files(again.dir) == files(order.dir), "as where they are known to be few from the start"


@pytest.mark.slow
@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("kill_after", [0, 1, 2, 3, 4, 5, 6, 8, 12])
def test_one_pass_stopped_at_any_write_resumes_to_the_same_bytes(
    corpus: Path, known: str, monkeypatch: pytest.MonkeyPatch, kill_after: int, is_small: bool
) -> None:
    order = order_of(corpus, tokenizer=known, shard_tokens=3000, val_fraction=0.1)
    if is_small:  # and not known to be
        monkeypatch.setattr("homing.lm.data.text.split._MAX_EXACT", 1000)
        monkeypatch.setattr(scan_pass.Scanner, "is_likely_small", lambda *_: False)
    run(dataclasses.replace(order, dir=corpus.parent / "whole"))
    killed_after(kill_after, order, monkeypatch)
    _, seen = run(order)
    assert files(order.dir) == files(corpus.parent / "whole")
    assert ("resumed" in stages(seen)) == (kill_after > 2)


def test_a_pass_resumes_from_its_resume_point(corpus: Path, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_of(corpus, tokenizer=known, val_fraction=0.1)

    def die_at(progress: Progress) -> None:
        if progress.stage == "encode" and progress.done_bytes > corpus.stat().st_size * 0.8:
            raise Killed

    with pytest.raises(Killed):
        prepare(order, die_at)
    _, seen = run(order)
    first = next(progress for progress in seen if progress.stage == "encode")
    assert first.done_bytes > corpus.stat().st_size * 0.4
    assert {"resumed", "scan"} <= stages(seen)


@pytest.mark.parametrize("has_mark", [False, True])
def test_bad_text_in_the_middle_of_the_one_pass_publishes_nothing(
    corpus: Path, known: str, monkeypatch: pytest.MonkeyPatch, has_mark: bool
) -> None:
    monkeypatch.setattr(encode_pass, "MARK_BYTES", 10_000 if has_mark else 10**9)
    data = corpus.read_bytes()
    corpus.write_bytes(data[: 3 * len(data) // 4] + b"<|endoftext|>caf\xe9<|endoftext|>" + data[3 * len(data) // 4 :])
    seen: list[Progress] = []
    with pytest.raises(DataError, match="not UTF-8"):
        prepare(order_of(corpus, tokenizer=known), seen.append)
    assert "encode" in stages(seen), "it was under way"
    assert not (corpus.parent / "out").exists()


# --- done work, changed work, killed work -----------------------------------------------------------------------------


def stages(seen: list[Progress]) -> set[str]:
    return {progress.stage for progress in seen}


@pytest.mark.acceptance(26, 75)
def test_finished_work_is_not_done_again_until_text_or_settings_change(corpus: Path) -> None:
    first, _ = run(order_of(corpus))
    again, seen = run(order_of(corpus))
    assert again == first
    assert stages(seen) == {"reused"}
    os.utime(corpus, (1, 1))  # touched, not changed
    again, seen = run(order_of(corpus))
    assert (again, stages(seen)) == (first, {"reused"})
    assert "encode" in stages(run(order_of(corpus, vocab_size=310))[1])
    assert "encode" in stages(run(order_of(corpus))[1])
    assert "encode" in stages(run(order_of(corpus, is_forced=True))[1])
    data = bytearray(corpus.read_bytes())
    data[10:11] = b"Q"
    corpus.write_bytes(bytes(data))
    changed, seen = run(order_of(corpus))
    assert "encode" in stages(seen)
    assert changed.source_sha256 != first.source_sha256


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx", "tokenizer.json", "manifest.json"])
def test_a_lost_or_damaged_file_is_made_again(corpus: Path, name: str) -> None:
    run(order_of(corpus))
    before = files(corpus.parent / "out")
    (corpus.parent / "out" / name).write_bytes(b"x")
    _, seen = run(order_of(corpus))
    assert "encode" in stages(seen)
    assert files(corpus.parent / "out") == before


def test_fewer_shards_than_before_leave_no_old_ones(corpus: Path) -> None:
    run(order_of(corpus, shard_tokens=1000))
    run(order_of(corpus))
    assert not (corpus.parent / "out" / "train-00001.bin").exists()


class Killed(BaseException):
    pass


def killed_after(num_writes: int, order: PrepOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prep that dies at the N-th write, and leaves nothing that looks complete."""
    real_replace, count = os.replace, 0

    def replace_or_die(source: Any, target: Any) -> None:
        nonlocal count
        count += 1
        if count > num_writes:
            raise Killed
        real_replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_or_die)
        with pytest.raises(Killed):
            run(order)
    assert not (order.dir / "manifest.json").exists()


@pytest.mark.acceptance(14)
@pytest.mark.parametrize("kill_after", [0, 2, 3, 6, 10, 14, 18, 22, 26])
def test_a_prep_stopped_at_any_write_resumes_to_the_same_bytes(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, kill_after: int
) -> None:
    run(order_of(corpus, dir=corpus.parent / "whole", shard_tokens=3000))
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 4000)
    monkeypatch.setattr(encode_pass, "MARK_BYTES", 10_000)
    order = order_of(corpus, shard_tokens=3000)
    killed_after(kill_after, order, monkeypatch)
    _, seen = run(order)
    assert files(order.dir) == files(corpus.parent / "whole")
    assert ("resumed" in stages(seen)) == (kill_after > 2)


@pytest.mark.parametrize(("which", "complaint"), [(0, "disappeared"), (-1, "is damaged")])
def test_half_done_work_that_lost_a_shard_is_never_published(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, which: int, complaint: str
) -> None:
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 4000)
    monkeypatch.setattr(encode_pass, "MARK_BYTES", 10_000)
    order = order_of(corpus, shard_tokens=3000)
    real_save, marks = work_folder.Work.save, 0

    def save_or_die(self: work_folder.Work, **values: Any) -> None:
        nonlocal marks
        real_save(self, **values)
        marks += "mark" in values
        if marks == 3:
            raise Killed

    monkeypatch.setattr(work_folder.Work, "save", save_or_die)
    with pytest.raises(Killed):
        run(order)
    monkeypatch.setattr(work_folder.Work, "save", real_save)
    shards = sorted((order.dir / ".prep").glob("train-*.bin"))
    assert len(shards) > 1
    shards[which].unlink()
    with pytest.raises(DataError, match=complaint):
        run(order)
    assert not (order.dir / "manifest.json").exists()
    run(dataclasses.replace(order, is_forced=which == -1))
    assert (order.dir / "manifest.json").exists()


def test_text_that_vanishes_between_the_two_passes_is_named(corpus: Path) -> None:
    def vanish(progress: Progress) -> None:
        if progress.stage == "scanned":
            corpus.unlink()

    with pytest.raises(DataError, match=rf"{corpus.name} cannot be read"):
        prepare(order_of(corpus), vanish)


_CHILD = """
import os, sys
from pathlib import Path
from homing.lm.data.prep import PrepOrder, chunks, encode_pass, prepare
chunks._chunk_bytes = lambda: 4000
encode_pass.MARK_BYTES = 10_000
left = int(sys.argv[3])
def report(progress):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), 9)
prepare(PrepOrder(text=[sys.argv[1]], dir=Path(sys.argv[2]), vocab_size=320, shard_tokens=3000), report)
"""


@pytest.mark.acceptance(18)
@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bytes(corpus: Path) -> None:
    whole = corpus.parent / "whole"
    run(order_of(corpus, dir=whole, shard_tokens=3000))
    out = corpus.parent / "out"
    for reports in (1, 12, 26, 33, 40, 3, 5):
        subprocess.run([sys.executable, "-c", _CHILD, str(corpus), str(out), str(reports)], check=False, timeout=60)
        if (out / "manifest.json").exists():
            break
    run(order_of(corpus, shard_tokens=3000))
    assert files(out) == files(whole)


def test_half_done_work_of_other_settings_is_not_continued(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_pass, "MARK_BYTES", 1)

    def die(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr("homing.lm.data.prep.pipeline.publish", die)
    with pytest.raises(Killed):
        run(order_of(corpus))
    monkeypatch.undo()
    _, seen = run(order_of(corpus, vocab_size=330))
    assert "resumed" not in stages(seen)
    assert load_tokenizer(corpus.parent / "out").vocab_size == 330


def test_two_preps_in_one_folder_are_refused(corpus: Path) -> None:
    order = order_of(corpus)
    with work_folder.open_work(order.dir), pytest.raises(DataError, match="Another homing prep"):
        run(order)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.acceptance(13)
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"text": []}, "No text files were given"),
        ({"text": ["gone.txt"]}, "does not exist"),
        ({"vocab_size": 271}, "too small"),
        ({"vocab_size": 10**9}, "too large"),
        ({"vocab_size": 50_000}, "too small for a vocabulary of 50,000"),
        ({"split": "nanochat"}, "Unknown split"),
        ({"specials": "many"}, "Unknown set of special tokens"),
        ({"val_fraction": 0.9}, "validation fraction"),
        ({"sample_bytes": 10**12}, "sample"),
        ({"shard_tokens": 0}, "at least one token"),
    ],
)
def test_a_bad_order_leaves_nothing_behind(corpus: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        run(order_of(corpus, **changes))
    assert not (corpus.parent / "out").exists()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [(b"fine <|endoftext|> caf\xe9", "not UTF-8"), (b" \n<|endoftext|>\n", "no text"), (b"", "empty")],
)
def test_bad_text_leaves_nothing_behind(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=complaint):
        run(order_of(path, vocab_size=272))
    assert not (tmp_path / "out").exists()


def test_bad_text_leaves_an_earlier_result_alone(corpus: Path) -> None:
    run(order_of(corpus))
    before = files(corpus.parent / "out")
    corpus.write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="not UTF-8"):
        run(order_of(corpus))
    assert files(corpus.parent / "out") == before
    assert (corpus.parent / "out" / "manifest.json").exists()


def test_a_target_that_cannot_be_written_is_named(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (corpus.parent / "file").write_text("in the way")
    with pytest.raises(DataError, match="Cannot write to"):
        run(order_of(corpus, dir=corpus.parent / "file" / "out"))

    def refused(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path.parent))

    monkeypatch.setattr(Path, "mkdir", refused)  # as in another user's folder: data/ itself cannot be created
    with pytest.raises(DataError, match="Cannot write to") as caught:
        run(order_of(corpus, dir=corpus.parent / "data" / "out"))
    assert "--out DIR" in caught.value.fix


@pytest.mark.acceptance(23)
def test_a_full_disk_is_said_before_and_while_writing(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_of(corpus)
    usage = type("usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DataError, match="full"):
        run(order)
    monkeypatch.undo()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("homing.lm.data.shards.write_shards._Growing.write", full)
    with pytest.raises(DataError, match="full") as caught:
        run(order)
    assert "run the same command again to resume" in caught.value.fix
    assert not (order.dir / "manifest.json").exists()
    monkeypatch.undo()
    assert "resumed" in stages(run(order)[1])


def test_text_that_changes_while_it_is_read_is_refused(corpus: Path) -> None:
    def touch(progress: Progress) -> None:
        if progress.stage == "encode":
            os.utime(corpus, (1, 1))

    with pytest.raises(DataError, match="changed while"):
        prepare(order_of(corpus), touch)
    assert not (corpus.parent / "out" / "manifest.json").exists()


def test_the_same_text_prepared_again_has_the_same_manifest_byte_for_byte(tmp_path: Path) -> None:
    """A record names its data by the manifest's hash, so preparing anew must be able to bring it back."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat and the rat ran. " * 200, encoding="utf-8")
    order = PrepOrder([str(tmp_path / "a.txt")], tmp_path / "out", vocab_size=280)
    prepare(order, lambda progress: None)
    first = (tmp_path / "out/manifest.json").read_bytes()
    (tmp_path / "out/manifest.json").unlink()
    prepare(order, lambda progress: None)
    assert (tmp_path / "out/manifest.json").read_bytes() == first


def test_take_is_an_amount_of_text_even_if_the_file_is_compressed(tmp_path: Path) -> None:
    text = "<|endoftext|>".join(text_of(900)).encode()
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(text))
    size = packed.stat().st_size
    take_bytes = (size + len(text)) // 2  # more than the size of the file, less than the text in it
    manifest, seen = run(order_of(packed, take_bytes=take_bytes, val_fraction=0.0))
    assert manifest.splits["train"].num_text_bytes == pytest.approx(take_bytes, abs=1000)
    (note,) = [progress.note for progress in seen if "data.take" in progress.note]
    assert f"out of about {3 * size / 1e3:.2f} kB of text" in note
    manifest, seen = run(order_of(packed, take_bytes=2 * len(text), val_fraction=0.0))
    assert manifest.source[0].sha256 == hashlib.sha256(packed.read_bytes()).hexdigest(), "all of it is used"
    assert not [progress.note for progress in seen if "data.take" in progress.note]


@pytest.mark.parametrize(("separator", "is_cut"), [("<|endoftext|>", False), ("\n\n", True)])
def test_the_manifest_says_whether_long_documents_were_cut_into_passages(
    tmp_path: Path, separator: str, is_cut: bool
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(separator.join(text_of(400)), encoding="utf-8")
    manifest, _ = run(order_of(path))
    assert manifest.is_cut is is_cut
