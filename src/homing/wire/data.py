"""manifest.json beside token shards: what they are, how much, from which text, and their hashes.

A shard `train-00000.bin` is tokens and nothing else, little-endian, `dtype` wide, documents end to end, each with
<|endoftext|> before it. `train-00000.idx` is little-endian uint64: the token offset at which each document starts,
then the shard's token count, so document i of the shard is tokens [idx[i], idx[i+1]).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List

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


@dataclass(frozen=True)
class Split:
    num_tokens: int
    num_documents: int
    num_text_bytes: int  # UTF-8 bytes of the text behind the tokens
    shards: List[Shard]


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
    specials: List[str]  # ids 0, 1, ... in order
    splits: Dict[str, Split]  # train, val
    source: List[SourceFile]
    source_sha256: str  # of the source list, so that one string tells whether inputs changed
    settings: Dict[str, Any] = field(default_factory=dict)
    code_version: str = ""
