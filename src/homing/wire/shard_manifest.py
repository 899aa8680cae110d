"""Defines manifest.json, which lists a folder's token shards with their sizes, source texts and hashes.

A shard `train-00000.bin` contains only tokens, little-endian, of type `dtype`: concatenated documents, each preceded
by <|endoftext|>, or by the special tokens of the model family that the tokenizer comes from. `train-00000.idx` contains
little-endian uint64 values: the token offset at which each document starts, then the number of tokens in the shard. So
document i of the shard consists of tokens [idx[i], idx[i+1]).

Shards of conversations have a third file, `train-00000.mask`: one byte per token, 1 if the model is trained on the
token. In these shards, each document is a conversation, and begins with whatever the chat template puts first.
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
    mask_name: str = ""  # name of the mask file; if empty, the model is trained on every token
    mask_sha256: str = ""

    def files(self) -> List[Tuple[str, int, str]]:
        """Return the name, size and sha256 of each of the shard's files."""
        index = (self.index_name, 8 * (self.num_documents + 1), self.index_sha256)
        mask = [(self.mask_name, self.num_tokens, self.mask_sha256)] if self.mask_name else []
        return [(self.name, self.num_bytes, self.sha256), index, *mask]


@dataclass(frozen=True)
class Split:
    num_tokens: int
    num_documents: int
    num_text_bytes: int  # size in UTF-8 bytes of the text that the tokens encode
    shards: List[Shard]


def val_share(splits: Dict[str, Split]) -> float:
    """Return the fraction of all tokens that is held out for validation."""
    total = sum(split.num_tokens for split in splits.values())
    return splits["val"].num_tokens / total if total and "val" in splits else 0.0


@dataclass(frozen=True)
class SourceFile:
    path: str  # the path as the user typed it
    num_bytes: int
    sha256: str


@record("data", 1)
@dataclass(frozen=True)
class DataManifest:
    dtype: str  # uint16 | uint32
    vocab_size: int
    tokenizer_sha256: str
    specials: List[str]  # special tokens in the order of their ids, which are 0, 1, ... if homing trained the tokenizer
    splits: Dict[str, Split]  # train, val
    source: List[SourceFile]
    source_sha256: str  # sha256 of the list of source files, which changes if any of them changes
    settings: Dict[str, Any] = field(default_factory=dict)
    code_version: str = ""
    is_cut: bool = False  # whether long documents were cut into passages, which the splits count as documents
    template_sha256: str = ""  # sha256 of the chat template; "" for plain text
