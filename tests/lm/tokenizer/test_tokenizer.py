"""One text, one list of ids: the encoder, `tokenizers` and tiktoken agree, and text never becomes a special."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from homing.errors import DataError, IntegrityError
from homing.lm.tokenizer import load_tokenizer
from homing.lm.tokenizer.encode import AWKWARD, NEW_LETTERS, Encoder, has_new_letter
from homing.lm.tokenizer.tokenizer import SPECIALS
from homing.lm.tokenizer.train_bpe import learn_merges
from homing.lm.tokenizer.write_files import SPLITS, build_tokenizer_json, name_of_split, read_facts, write_extras

TRAINING = (
    "The quick brown fox's tail isn't 1234567 long; they'll say so.\n\n\tif x == 10:\r\n    pass  # done!!\n"
    "Größe, Straße, naïve café, 漢字かな交じり文、한국어 텍스트. 👩‍👩‍👧 emoji 🎉🎉 <|endoftext|> <|im_start|>user\n"
) * 5 + Path(__file__).read_text(encoding="utf-8")
# What breaks splits: case-folding apostrophes, digits of other scripts, marks, joiners, controls, odd spaces, specials.
PARTS = [
    *("'s", "'S", "'\u017f", "'LL", "\u2019t", "1", "12", "123", "4567", "١٢", "Ⅷ", "½", "²"),
    *(" ", "  ", "\n", "\r\n", "\r", "\t", "\x0b", "\x85", "\xa0", "\u1680", "\u180e", "\u2003", "\u2028", "\u3000"),
    *("\x00", "\x1b", "\x7f", "\u200b", "\u200d", "\ufeff", "e\u0301", "\u0327", "\ue000", "\U0010ffff"),
    *("漢字", "かな", "한국", "ไทย", "हिन्दी", "שלום", "👩‍👩‍👧", "🏳️‍🌈", "🎉", "ß", "ǅ", "İ", "\u212a"),
    *("\U00032a67", "\ua7ce", "a\nb", "a b", ".\n.", "x \ny"),  # letters of Unicode 17, and where text may be cut
    *("word", "Word", " the", "!!", "...", "--", "_", "<|endoftext|>", "<|im_end|>", "<|", "|>", "<|pad|"),
]
fuzz = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=6)), max_size=25).map("".join)


@pytest.fixture(scope="module", params=["gpt4", "gpt2"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    split = request.param
    path = tmp_path_factory.mktemp(split) / "tokenizer.json"
    merges = learn_merges([TRAINING.encode()], num_merges=300, split=split)
    path.write_text(build_tokenizer_json(merges, SPECIALS["standard"], split), encoding="utf-8")
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks.update({left + right: 256 + number for number, (left, right) in enumerate(merges)})
    reference = tiktoken.Encoding(
        f"test-{split}", pat_str=SPLITS[split], mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 999_999}
    )
    return path, load_tokenizer(path), Encoder(path), reference


@settings(max_examples=300, deadline=None)
@given(text=fuzz)
def test_the_encoder_equals_tokenizers_and_tiktoken_on_any_text(made: Any, text: str) -> None:
    _, tokenizer, encoder, reference = made
    ids, starts = encoder.encode([text.encode(), b"next"])
    got = ids[: starts[1]].tolist()
    assert got == tokenizer.encode(text)
    assert got == [16 + rank for rank in reference.encode_ordinary(text)]
    assert tokenizer.decode(got) == text


def test_documents_with_letters_that_only_one_of_them_knows_follow_tokenizers(made: Any) -> None:
    _, tokenizer, encoder, _ = made
    texts = ["plain", ".\U00032a67 a b\n.\U000323b0.", "", "1\ua7ce1", "漢字", "to be\nor 🎉.\U00033479 not", "end"]
    ids, starts = encoder.encode([text.encode() for text in texts])
    assert [ids[a:b].tolist() for a, b in pairwise(starts.tolist())] == [tokenizer.encode(text) for text in texts]
    assert [has_new_letter(text.encode()) for text in texts] == [False, True, False, True, False, True, False]
    long = "漢字 🎉 " * 500
    assert not has_new_letter(long.encode())
    assert all(has_new_letter((long + chr(end) + long).encode()) for ends in NEW_LETTERS for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["gpt4", "gpt2"])
def test_the_list_of_letters_that_only_one_of_them_knows_is_complete(split: str, tmp_path: Path) -> None:
    # Merges of a letter, a digit, a mark and a space with any first byte: a border between the two shows in the ids.
    merges = [(probe, bytes([byte])) for probe in (b"a", b"1", b".", b" ") for byte in range(0xC2, 0xF5)]
    path = tmp_path / "tokenizer.json"
    path.write_text(build_tokenizer_json(merges, SPECIALS["standard"], split), encoding="utf-8")
    encoder, backend = Encoder(path), Tokenizer.from_file(str(path))
    listed = {number for first, last in NEW_LETTERS for number in range(first, last + 1)}
    characters = [chr(n) for n in range(0x80, 0x110000) if not 0xD800 <= n < 0xE000 and n not in listed]
    # Many in a document: the two are asked per word, and the time between documents would be most of the test.
    lines = [f"a{c}1{c}.{c} {c}" for c in characters]
    documents = ["\n".join(lines[first : first + 32]) for first in range(0, len(lines), 32)]
    for first in range(0, len(documents), 256):
        texts = documents[first : first + 256]
        ids, starts = encoder.encode([text.encode() for text in texts])
        rows = backend.encode_batch_fast(texts, add_special_tokens=False)
        assert ids.tolist() == [token for row in rows for token in row.ids]
        assert len(starts) == len(texts) + 1


def test_text_never_becomes_a_special_id(made: Any) -> None:
    _, tokenizer, encoder, _ = made
    for special in tokenizer.specials:
        ids, _ = encoder.encode([special.encode()])
        assert min(ids.tolist()) >= len(tokenizer.specials)
        assert tokenizer.encode(special) == ids.tolist()


def test_ids_are_specials_then_bytes_then_merges(made: Any) -> None:
    path, tokenizer, _, _ = made
    vocab = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    assert list(tokenizer.specials.values()) == list(range(16))
    assert tokenizer.end_of_text_id == 0
    assert tokenizer.vocab_size == 16 + 256 + 300
    assert sorted(vocab.values()) == list(range(tokenizer.vocab_size))
    assert [tokenizer.encode(chr(byte))[0] for byte in range(128)] == [16 + byte for byte in range(128)]


def test_token_bytes_add_up_to_the_text(made: Any) -> None:
    _, tokenizer, _, _ = made
    sizes = tokenizer.token_bytes()
    assert len(sizes) == tokenizer.vocab_size
    assert sizes[:16] == [0] * 16
    for text in AWKWARD:
        assert sum(sizes[token] for token in tokenizer.encode(text)) == len(text.encode())


def test_an_added_token_that_is_no_special_counts_the_bytes_of_what_it_spells(made: Any, tmp_path: Path) -> None:
    """As the marks of turns in DeepSeek's distilled Qwens: it is stored as text, not in the byte alphabet."""
    mark = "<\uff5cUser\uff5c>"
    backend = Tokenizer.from_file(str(made[0]))
    backend.add_tokens([mark])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = load_tokenizer(tmp_path), f"é {mark} ok"
    sizes, ids = tokenizer.token_bytes(), tokenizer.encode(text)
    assert tokenizer.vocab_size - 1 in ids
    assert sum(sizes[i] for i in ids) == len(text.encode())


def test_specials_show_by_name_and_can_be_skipped(made: Any) -> None:
    _, tokenizer, _, _ = made
    ids = [0, *tokenizer.encode("hi"), tokenizer.specials["<|im_end|>"]]
    assert tokenizer.decode(ids) == "<|endoftext|>hi<|im_end|>"
    assert tokenizer.decode(ids, skip_specials=True) == "hi"


def test_end_of_text_comes_first_by_the_post_processor_alone(made: Any) -> None:
    from tokenizers import Tokenizer

    path, tokenizer, _, _ = made
    backend = Tokenizer.from_file(str(path))
    assert backend.encode("hi").ids == [0, *tokenizer.encode("hi")]
    assert backend.encode("hi", add_special_tokens=False).ids == tokenizer.encode("hi")


@pytest.mark.slow
def test_transformers_opens_the_folder_and_applies_chatml(made: Any) -> None:
    from transformers import AutoTokenizer

    path, tokenizer, _, _ = made
    write_extras(path.parent)
    opened = AutoTokenizer.from_pretrained(str(path.parent))
    assert opened.encode("Größe", add_special_tokens=False) == tokenizer.encode("Größe")
    chat = opened.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|endoftext|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (opened.bos_token_id, opened.eos_token_id, opened.pad_token_id) == (0, 0, 3)


def test_vocab_and_merges_files_build_the_same_tokenizer(made: Any) -> None:
    from tokenizers import models

    path, _, _, _ = made
    write_extras(path.parent)
    vocab, merges = models.BPE.read_file(str(path.parent / "vocab.json"), str(path.parent / "merges.txt"))
    document = json.loads(path.read_text(encoding="utf-8"))
    assert vocab == document["model"]["vocab"]
    assert [list(pair) for pair in merges] == document["model"]["merges"]


def test_a_different_id_stops_the_run(made: Any, tmp_path: Path) -> None:
    path, _, _, _ = made
    document = json.loads(path.read_text(encoding="utf-8"))
    encoder = Encoder(path)
    document["model"]["merges"] = document["model"]["merges"][:100]
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(document), encoding="utf-8")
    encoder._path = str(other)  # as if gigatoken read the same file in another way
    with pytest.raises(IntegrityError, match="different ids"):
        encoder.prove([TRAINING.encode()]).check(is_last=True)
    Encoder(path).prove([TRAINING.encode()]).check(is_last=True)


def test_facts_of_our_own_are_read_back(made: Any) -> None:
    path, _, _, _ = made
    facts = read_facts(path)
    assert (facts.vocab_size, facts.num_merges, facts.specials) == (572, 300, SPECIALS["standard"])
    assert facts.split == name_of_split(json.loads(path.read_text(encoding="utf-8"))["pre_tokenizer"])


def _set(document: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {**document, key: value}


@pytest.mark.acceptance(27)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: _set(d, "added_tokens", []), "no special token"),
        (lambda d: _set(d, "pre_tokenizer", {"type": "Whitespace"}), "nothing in it converts text to bytes"),
        (lambda d: _set(d, "model", {**d["model"], "dropout": 0.1}), "dropout"),
        (lambda d: _set(d, "model", {"type": "WordPiece"}), "not the tokenizer.json of a BPE"),
    ],
)
def test_a_tokenizer_that_cannot_serve_is_refused_with_the_reason(
    made: Any, tmp_path: Path, change: Any, complaint: str
) -> None:
    path, _, _, _ = made
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_facts(other)
    assert complaint in caught.value.why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d, ""),
        (lambda d: _set(d, "added_tokens", d["added_tokens"][::2]), "do not have the ids 0, 1, 2"),
        (
            lambda d: _set(d, "added_tokens", [*d["added_tokens"][:-1], {**d["added_tokens"][-1], "special": False}]),
            "can match plain text",
        ),
        (lambda d: _set(d, "pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True}), "a custom pre-tokenizer"),
        (lambda d: _set(d, "normalizer", {"type": "NFC"}), "normalizes"),
        (lambda d: _set(d, "model", {**d["model"], "ignore_merges": True}), "whole words"),
    ],
)
def test_a_tokenizer_that_only_the_slow_encoder_knows_says_why(
    made: Any, tmp_path: Path, change: Any, why: str
) -> None:
    path, _, _, _ = made
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    facts = read_facts(other)
    assert why in facts.why_slow if why else not facts.why_slow
    assert (facts.vocab_size, facts.mark_id, facts.end_id) == (572, 0, None)


def test_no_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No tokenizer at") as caught:
        load_tokenizer(tmp_path)
    assert "homing prep" in caught.value.fix
