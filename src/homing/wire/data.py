"""manifest.json beside token shards: what they are, how much, from which text, and their hashes.

A shard `train-00000.bin` is tokens and nothing else, little-endian, `dtype` wide, documents end to end, each with
<|endoftext|> before it, or with the marks of the family that its tokenizer comes from. `train-00000.idx` is
little-endian uint64: the token offset at which each document starts, then the shard's token count, so document i of
the shard is tokens [idx[i], idx[i+1]).

Shards of conversations have a third file, `train-00000.mask`: one byte a token, 1 where it is learned from. Their
documents are conversations, each beginning as the chat template begins it.
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
    mask_name: str = ""  # "": every token is learned from
    mask_sha256: str = ""

    def files(self) -> List[Tuple[str, int, str]]:
        """Name, size and sha256 of all that belongs to it."""
        index = (self.index_name, 8 * (self.num_documents + 1), self.index_sha256)
        mask = [(self.mask_name, self.num_tokens, self.mask_sha256)] if self.mask_name else []
        return [(self.name, self.num_bytes, self.sha256), index, *mask]


@dataclass(frozen=True)
class Split:
    num_tokens: int
    num_documents: int
    num_text_bytes: int  # UTF-8 bytes of the text behind the tokens
    shards: List[Shard]


def val_share(splits: Dict[str, Split]) -> float:
    """The share of all tokens that is held out."""
    total = sum(split.num_tokens for split in splits.values())
    return splits["val"].num_tokens / total if total and "val" in splits else 0.0


@dataclass(frozen=True)
class SourceFile:
    path: str  # as the person named it
    num_bytes: int
    sha256: str


@record("data", 1)
@dataclass(frozen=True)
class DataManifest:
    dtype: str  # uint16 | uint32
    vocab_size: int
    tokenizer_sha256: str
    specials: List[str]  # by their ids; 0, 1, ... in a tokenizer of ours
    splits: Dict[str, Split]  # train, val
    source: List[SourceFile]
    source_sha256: str  # of the source list, so that one string tells whether inputs changed
    settings: Dict[str, Any] = field(default_factory=dict)
    code_version: str = ""
    template_sha256: str = ""  # of the chat template; "" for plain text
