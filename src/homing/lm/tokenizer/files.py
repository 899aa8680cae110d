"""A vocabulary on disk: tokenizer.json, the exchange format, and what others look for beside it.

tokenizer.json          all of it: specials first, then the 256 bytes, then merges; <|endoftext|> before a text is
                        put there by the post-processor alone
tokenizer_config.json   names of the specials and the ChatML template, for transformers
vocab.json, merges.txt  the same vocabulary in GPT-2's two files
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.tokenizer.bytes_as_text import as_text
from homing.lm.tokenizer.load import read_tokenizer_json, specials_of
from homing.lm.tokenizer.specials import CHAT_TEMPLATE, END_OF_TEXT, IM_START, PAD
from homing.lm.tokenizer.splits import name_of_split, pre_tokenizer_named
from homing.wire.names import TOKENIZER, TOKENIZER_CONFIG

__all__ = ["EXTRAS", "Facts", "build_tokenizer_json", "read_facts", "write_extras"]

EXTRAS = (TOKENIZER_CONFIG, "vocab.json", "merges.txt")


@dataclass(frozen=True)
class Facts:
    """What prep must know of a tokenizer.json, checked."""

    vocab_size: int
    specials: list[str]  # ids 0, 1, ...
    split: str
    num_merges: int


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
    """The files of EXTRAS, from the tokenizer.json that lies in `folder`."""
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
    """Of a tokenizer that prep can encode with: byte-level, a split of ours, specials at ids 0, 1, ..."""
    data = read_tokenizer_json(path)
    numbers = specials_of(data, path)
    specials = sorted(numbers, key=numbers.__getitem__)
    split = name_of_split(data.get("pre_tokenizer"))
    why = ""
    if split is None:
        why = "It splits text in a way of its own; homing encodes with the gpt4 or the gpt2 split."
    elif [numbers[special] for special in specials] != list(range(len(specials))):
        why = "Its special tokens do not have the ids 0, 1, 2, ..., where homing keeps them."
    elif specials[0] != END_OF_TEXT:
        why = f"Its token 0 is {specials[0]}, not {END_OF_TEXT}."
    elif data.get("normalizer"):
        why = "It normalizes text first, so what comes back would not be what went in."
    if why:
        raise DataError(
            f"{path} cannot encode for homing.", why=why, fix="Leave it out, and prep trains one of its own."
        )
    assert split is not None
    return Facts(len(data["model"]["vocab"].keys() | numbers.keys()), specials, split, len(data["model"]["merges"]))
