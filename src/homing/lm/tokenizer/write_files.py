"""Writes and reads tokenizer files: tokenizer.json and the accompanying files that other tools expect.

tokenizer.json          the complete tokenizer: special tokens first, then the 256 bytes, then merges; only the
                        post-processor puts <|endoftext|> before a text
tokenizer_config.json   names of the special tokens and the ChatML template, for transformers
vocab.json, merges.txt  the same vocabulary in GPT-2's two files

A third-party tokenizer keeps its own accompanying files (METADATA_FILES) instead.

Before merging, text is split into words by one of exactly two regular expressions. Every reader of tokenizer.json must
support them: rustbpe and `tokenizers` accept any expression, but gigatoken and llama.cpp know only certain expressions
by name. So a tokenizer with a custom expression could be trained here, but loaded nowhere else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.tokenizer.tokenizer import (
    BYTE_TO_CHAR,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IM_START,
    PAD,
    TEXT_ENDS,
    as_text,
    document_mark,
    read_tokenizer_json,
    specials_of,
)
from homing.wire.file_names import CHAT_TEMPLATE as TEMPLATE_FILE
from homing.wire.file_names import TOKENIZER, TOKENIZER_CONFIG

__all__ = [
    "EXTRAS",
    "METADATA_FILES",
    "SPLITS",
    "Facts",
    "build_tokenizer_json",
    "name_of_split",
    "pattern_named",
    "read_facts",
    "write_extras",
]

EXTRAS = (TOKENIZER_CONFIG, "vocab.json", "merges.txt")
METADATA_FILES = (TOKENIZER_CONFIG, TEMPLATE_FILE)
OWN_SPLIT = "its own"
# Exactly the expression in Llama 3's tokenizer.json; GPT-4's splits text in the same way.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {"gpt2": _GPT2, "gpt4": _GPT4}


@dataclass(frozen=True)
class Facts:
    """The properties of a tokenizer.json that `homing prep` needs, after validation."""

    vocab_size: int
    specials: list[str]  # ordered by id; in our own tokenizers the ids are 0, 1, ...
    split: str  # gpt4, gpt2, or OWN_SPLIT
    num_merges: int
    mark_id: int = 0  # id of the token placed before each document
    end_id: int | None = None  # id of the token placed after each document, if the model family has one
    why_slow: str = ""  # why gigatoken cannot encode with this tokenizer; "" if it can


def build_tokenizer_json(merges: Sequence[tuple[bytes, bytes]], specials: Sequence[str], split: str) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    vocab: dict[str, int] = {special: number for number, special in enumerate(specials)}
    for token in (bytes([byte]) for byte in range(256)):
        vocab[as_text(token)] = len(vocab)
    for left, right in merges:
        vocab[as_text(left + right)] = len(vocab)
    assert len(vocab) == len(specials) + 256 + len(merges), "a token occurs twice"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(as_text(left), as_text(right)) for left, right in merges]))
    tokenizer.pre_tokenizer = _pre_tokenizer_named(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in specials])
    before = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT}:1 $B:1",
        special_tokens=[(END_OF_TEXT, vocab[END_OF_TEXT])],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), before])
    return str(tokenizer.to_str(pretty=True))


def write_extras(folder: Path) -> None:
    """Write the EXTRAS, derived from the tokenizer.json in `folder`."""
    data = read_tokenizer_json(folder / TOKENIZER)
    specials = [entry["content"] for entry in data["added_tokens"]]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD if PAD in specials else END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    if IM_START in specials:
        config["chat_template"] = CHAT_TEMPLATE
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in data["model"]["merges"]]
    texts = {
        TOKENIZER_CONFIG: json.dumps(config, indent=2),
        "vocab.json": json.dumps(data["model"]["vocab"], ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *merges]),
    }
    for name, text in texts.items():
        with open(folder / name, "w", encoding="utf-8", newline="\n") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_facts(path: Path) -> Facts:
    """Read the properties of a byte-level BPE tokenizer: our own, which gigatoken supports, or a third-party one."""
    data = read_tokenizer_json(path)
    numbers = specials_of(data, path)
    _refuse_losing(data, path)
    specials = sorted(numbers, key=numbers.__getitem__)
    split = name_of_split(data.get("pre_tokenizer"))
    mark = document_mark(numbers)
    return Facts(
        vocab_size=1 + max([*data["model"]["vocab"].values(), *(int(entry["id"]) for entry in data["added_tokens"])]),
        specials=specials,
        split=split or OWN_SPLIT,
        num_merges=len(data["model"]["merges"]),
        mark_id=numbers[mark],
        end_id=next((numbers[end] for end in TEXT_ENDS if end in numbers and mark not in TEXT_ENDS), None),
        why_slow=_why_slow(data, [numbers[special] for special in specials], split, mark),
    )


def _why_slow(data: dict[str, Any], special_ids: list[int], split: str | None, mark: str) -> str:
    """Return why gigatoken cannot encode with this tokenizer, or "".

    gigatoken knows only two split patterns and is loaded without added tokens. Everything that could cause different
    ids is checked.
    """
    if split is None:
        return "it uses a custom pre-tokenizer"
    if data.get("normalizer"):
        return "it normalizes text first"
    if data["model"].get("ignore_merges"):
        return "it ignores merges for whole words"
    if not all(entry.get("special") for entry in data["added_tokens"]):
        return "it has added tokens that can match plain text"
    if special_ids != list(range(len(special_ids))) or mark != END_OF_TEXT or special_ids[0] != 0:
        return "its special tokens do not have the ids 0, 1, 2, ..."
    return ""


def _refuse_losing(data: dict[str, Any], path: Path) -> None:
    """Raise DataError if the tokenizer would silently lose some bytes, or if dropout makes its ids random."""
    why = ""
    if "ByteLevel" not in _types(data.get("pre_tokenizer")) + _types(data.get("normalizer")):
        why = "Its vocabulary is byte-level, but nothing in it converts text to bytes."
    elif missing := [byte for byte, letter in BYTE_TO_CHAR.items() if letter not in data["model"]["vocab"]]:
        why = f"Its vocabulary lacks {len(missing)} of the 256 bytes, such as 0x{missing[0]:02x}."
    elif data["model"].get("dropout"):
        why = "It drops merges at random (dropout), so the same text would give different ids each time."
    if why:
        raise DataError(
            f"homing cannot use {path}.",
            why=why,
            fix="Remove tokenizer.file (or --tokenizer), so that homing prep trains a new tokenizer.",
        )


def _types(part: Any) -> list[str]:
    """Return the types of a component of tokenizer.json and of the components nested in it."""
    if not isinstance(part, dict):
        return []
    inner = [*(part.get("pretokenizers") or []), *(part.get("normalizers") or [])]
    return [str(part.get("type")), *(name for each in inner for name in _types(each))]


# --- split patterns ---


def pattern_named(name: str) -> str:
    if name not in SPLITS:
        raise DataError(
            what=f"Unknown split pattern: {name!r}",
            why=f"Known patterns: {', '.join(SPLITS)}. The encoder and llama.cpp support no others.",
            fix="Set tokenizer.split to gpt4 or gpt2.",
        )
    return SPLITS[name]


def _pre_tokenizer_named(name: str) -> Any:
    """Return the pre-tokenizer for `tokenizers`: GPT-2's pattern is built in, the other is given as an expression."""
    from tokenizers import Regex, pre_tokenizers

    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern_named(name)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def name_of_split(pre_tokenizer: Any) -> str | None:
    """Return the name of the split pattern in tokenizer.json's `pre_tokenizer`, or None if it is not one of ours."""
    if not isinstance(pre_tokenizer, dict):
        return None
    if pre_tokenizer.get("type") == "ByteLevel":
        is_gpt2 = pre_tokenizer.get("use_regex", True) and not pre_tokenizer.get("add_prefix_space", True)
        return "gpt2" if is_gpt2 else None
    parts = pre_tokenizer.get("pretokenizers") or []
    if pre_tokenizer.get("type") != "Sequence" or [part.get("type") for part in parts] != ["Split", "ByteLevel"]:
        return None
    words, as_bytes = parts
    is_plain = words.get("behavior") == "Isolated" and not words.get("invert") and not as_bytes.get("use_regex", True)
    is_ours = is_plain and not as_bytes.get("add_prefix_space", True)
    return "gpt4" if is_ours and words.get("pattern") == {"Regex": _GPT4} else None
