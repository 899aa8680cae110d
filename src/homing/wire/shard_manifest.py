"""Defines manifest.json next to token shards: what they contain, how much, from which text, and their hashes.

A shard `train-00000.bin` holds only tokens, little-endian, of type `dtype`: concatenated documents, each preceded
by <|endoftext|>, or by the special tokens of the model family that the tokenizer comes from. `train-00000.idx` is
little-endian uint64: the token offset at which each document starts, then the shard's token count, so document i of the
shard is tokens [idx[i], idx[i+1]).

Shards of conversations have a third file, `train-00000.mask`: one byte per token, 1 if the token is trained on. In
these shards, each document is a conversation and begins with whatever the chat template puts first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

from homing.wire.codec import record


@dataclass(frozen=True)
class Shard:
    name: str
    index_name: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    sha256: str
    index_sha256: str
    mask_name: str = ""  # if empty, every token is trained on
    mask_sha256: str = ""

    def files(self) -> List[Tuple[str, int, str]]:
        """Return name, size and sha256 of each file of the shard."""
        index = (self.index_name, 8 * (self.num_documents + 1), self.index_sha256)
        mask = [(self.mask_name, self.num_tokens, self.mask_sha256)] if self.mask_name else []
        return [(self.name, self.num_bytes, self.sha256), index, *mask]


@dataclass(frozen=True)
class Split:
    num_tokens: int
    num_documents: int
    num_text_bytes: int  # UTF-8 bytes of the text that the tokens encode
    shards: List[Shard]


def val_share(splits: Dict[str, Split]) -> float:
    """Return the fraction of all tokens that is held out."""
    total = sum(split.num_tokens for split in splits.values())
    return splits["val"].num_tokens / total if total and "val" in splits else 0.0


@dataclass(frozen=True)
class SourceFile:
    path: str  # the path as the user named it
    num_bytes: int
    sha256: str


@record("data", 1)
@dataclass(frozen=True)
class DataManifest:
    dtype: str  # uint16 | uint32
    vocab_size: int
    tokenizer_sha256: str
    specials: List[str]  # in the order of their ids, which are 0, 1, ... in a tokenizer that homing trained
    splits: Dict[str, Split]  # train, val
    source: List[SourceFile]
    source_sha256: str  # sha256 of the source list, which changes if any input changes
    settings: Dict[str, Any] = field(default_factory=dict)
    code_version: str = ""
    template_sha256: str = ""  # sha256 of the chat template; "" for plain text
