"""Writes and reads tokenizer files: tokenizer.json and the accompanying files that other tools expect.

tokenizer.json          the complete tokenizer: special tokens first, then the 256 bytes, then merges; only the
                        post-processor puts <|endoftext|> before a text
tokenizer_config.json   names of the special tokens and the ChatML template, for transformers
vocab.json, merges.txt  the same vocabulary in GPT-2's two files

A third-party tokenizer keeps its own accompanying files (METADATA_FILES) instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.tokenizer.specials import CHAT_TEMPLATE, END_OF_TEXT, IM_START, PAD
from homing.lm.tokenizer.splits import name_of_split, pre_tokenizer_named
from homing.lm.tokenizer.tokenizer import (
    BYTE_TO_CHAR,
    TEXT_ENDS,
    as_text,
    document_mark,
    read_tokenizer_json,
    specials_of,
)
from homing.wire.file_names import CHAT_TEMPLATE as TEMPLATE_FILE
from homing.wire.file_names import TOKENIZER, TOKENIZER_CONFIG

__all__ = ["EXTRAS", "METADATA_FILES", "Facts", "build_tokenizer_json", "read_facts", "write_extras"]

EXTRAS = (TOKENIZER_CONFIG, "vocab.json", "merges.txt")
METADATA_FILES = (TOKENIZER_CONFIG, TEMPLATE_FILE)
OWN_SPLIT = "its own"


@dataclass(frozen=True)
class Facts:
    """The checked properties of a tokenizer.json that prep needs."""

    vocab_size: int
    specials: list[str]  # ordered by id; in ours the ids are 0, 1, ...
    split: str  # gpt4, gpt2, or OWN_SPLIT
    num_merges: int
    mark_id: int = 0  # put before each document
    end_id: int | None = None  # put after each document, if the model family has a token only for that
    why_slow: str = ""  # why only `tokenizers` can encode with it; "" if gigatoken can


def build_tokenizer_json(merges: Sequence[tuple[bytes, bytes]], specials: Sequence[str], split: str) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    vocab: dict[str, int] = {special: number for number, special in enumerate(specials)}
    for token in (bytes([byte]) for byte in range(256)):
        vocab[as_text(token)] = len(vocab)
    for left, right in merges:
        vocab[as_text(left + right)] = len(vocab)
    assert len(vocab) == len(specials) + 256 + len(merges), "a token occurs twice"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(as_text(left), as_text(right)) for left, right in merges]))
    tokenizer.pre_tokenizer = pre_tokenizer_named(split)
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
    """Read the facts of any byte-level BPE: ours, which the fast encoder supports, or a third-party one."""
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

    gigatoken knows two split patterns and is loaded without added tokens; everything that could then differ is checked.
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
    """Raise DataError for vocabularies that silently drop missing bytes, and for dropout, which makes ids random."""
    why = ""
    if "ByteLevel" not in _types(data.get("pre_tokenizer")) + _types(data.get("normalizer")):
        why = "Its vocabulary is byte-level, but nothing in it converts text to bytes."
    elif missing := [byte for byte, letter in BYTE_TO_CHAR.items() if letter not in data["model"]["vocab"]]:
        why = f"Its vocabulary lacks {len(missing)} of the 256 bytes, such as 0x{missing[0]:02x}."
    elif data["model"].get("dropout"):
        why = "It drops merges at random (dropout), so the same text would give different ids each time."
    if why:
        raise DataError(
            f"homing cannot use {path}.", why=why, fix="Remove it from the settings, and prep trains a new tokenizer."
        )


def _types(part: Any) -> list[str]:
    """Return the types of a component of tokenizer.json and of the components nested in it."""
    if not isinstance(part, dict):
        return []
    inner = [*(part.get("pretokenizers") or []), *(part.get("normalizers") or [])]
    return [str(part.get("type")), *(name for each in inner for name in _types(each))]
