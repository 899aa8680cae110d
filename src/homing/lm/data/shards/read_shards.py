"""Opens token shards as memory-mapped files: data directory -> manifest -> one split -> tokens of document i.

    read_manifest(data_dir)          the manifest that prep wrote
    open_split(data_dir, ..., name)  check every file, then map it; nothing is copied

Sizes and index bounds are always checked. Hashes are checked only on request, which requires reading every byte.
`pack_text` and `pack_chats` build rows and batches and determine their order.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from homing.errors import DataError, IntegrityError
from homing.wire import codec, file_names
from homing.wire.shard_manifest import DataManifest, Shard

__all__ = ["TokenSplit", "file_sha256", "map_file", "open_split", "read_manifest"]

Tokens = NDArray[np.unsignedinteger]

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_INDEX_DTYPE = np.dtype("<u8")


@dataclass(frozen=True)
class TokenSplit:
    """One split as a single sequence of tokens: all shards end to end, in the manifest's order."""

    name: str
    shards: list[Tokens]
    shard_starts: NDArray[np.int64]  # offset of each shard in the split; the last entry is the total length
    document_starts: NDArray[np.int64]  # offset of each document in the split; the last entry is the total length

    @property
    def num_tokens(self) -> int:
        return int(self.shard_starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    def documents(self) -> Iterator[Tokens]:
        """Yield the documents in shard order."""
        for start, end in zip(self.document_starts[:-1].tolist(), self.document_starts[1:].tolist(), strict=True):
            number = int(np.searchsorted(self.shard_starts, start, side="right")) - 1
            base = int(self.shard_starts[number])
            yield self.shards[number][start - base : end - base]


def read_manifest(data_dir: Path) -> DataManifest:
    path = data_dir / file_names.MANIFEST
    try:
        return codec.loads(DataManifest, path.read_bytes())
    except FileNotFoundError as exc:
        raise DataError(
            what=f"No prepared data in {data_dir}.", why=f"{path} is missing.", fix="Prepare the data: homing prep RUN"
        ) from exc
    except (OSError, codec.WireError) as exc:
        raise DataError(
            what=f"{path} cannot be read.", why=str(exc), fix="Prepare the data again: homing prep RUN --force"
        ) from exc


def open_split(data_dir: Path, manifest: DataManifest, name: str, *, checks_hashes: bool = False) -> TokenSplit:
    """Map every shard of a split into memory; raises one error that lists all problems with the split's files."""
    if manifest.dtype not in _DTYPES:
        raise DataError(
            what=f"{data_dir / file_names.MANIFEST}: unknown token type {manifest.dtype!r}.",
            why=f"This version of homing reads {' and '.join(_DTYPES)}.",
            fix="Prepare the data again: homing prep RUN --force",
        )
    if name not in manifest.splits:
        raise DataError(
            what=f"The data in {data_dir} has no split {name!r}.",
            why=f"Available splits: {', '.join(sorted(manifest.splits)) or 'none'}.",
            fix="Prepare the data again: homing prep RUN --force",
        )
    dtype, listed = _DTYPES[manifest.dtype], manifest.splits[name].shards
    _refuse(data_dir, [problem for shard in listed for problem in _wrong_files(data_dir, shard, dtype)])
    if checks_hashes:
        _refuse(data_dir, [problem for shard in listed for problem in _wrong_hashes(data_dir, shard)], IntegrityError)

    shards: list[Tokens] = []
    shard_starts, document_starts, wrong = [0], [], []
    for shard in listed:
        index = np.fromfile(data_dir / shard.index_name, dtype=_INDEX_DTYPE).astype(np.int64)
        if index[0] != 0 or index[-1] != shard.num_tokens or (np.diff(index) < 0).any():
            wrong.append(f"{data_dir / shard.index_name}: the document offsets do not run from 0 to {shard.num_tokens}")
        shards.append(map_file(data_dir / shard.name, dtype))
        document_starts.append(index[:-1] + shard_starts[-1])
        shard_starts.append(shard_starts[-1] + shard.num_tokens)
    _refuse(data_dir, wrong)
    if shard_starts[-1] == 0:
        _refuse(data_dir, [f"the split {name!r} contains no tokens"])
    return TokenSplit(
        name=name,
        shards=shards,
        shard_starts=np.array(shard_starts, dtype=np.int64),
        document_starts=np.concatenate([*document_starts, np.array(shard_starts[-1:], dtype=np.int64)]),
    )


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wrong_files(data_dir: Path, shard: Shard, dtype: np.dtype[Any]) -> Iterator[str]:
    expected = {
        shard.name: shard.num_tokens * dtype.itemsize,
        shard.index_name: (shard.num_documents + 1) * _INDEX_DTYPE.itemsize,
    }
    for name, num_bytes in expected.items():
        path = data_dir / name
        if not path.is_file():
            yield f"{path}: missing"
        elif (found := path.stat().st_size) != num_bytes:
            yield f"{path}: {'empty' if found == 0 else f'{found:,} bytes'}; the manifest says {num_bytes:,}"


def _wrong_hashes(data_dir: Path, shard: Shard) -> Iterator[str]:
    for name, sha256 in ((shard.name, shard.sha256), (shard.index_name, shard.index_sha256)):
        if file_sha256(data_dir / name) != sha256:
            yield f"{data_dir / name}: the sha256 does not match the manifest"


def _refuse(data_dir: Path, problems: list[str], error: type[DataError | IntegrityError] = DataError) -> None:
    if problems:
        count = "1 file is" if len(problems) == 1 else f"{len(problems)} files are"
        raise error(
            what=f"Cannot use the data in {data_dir}: {count} damaged or missing.",
            why="\n".join(problems),
            fix="Prepare it again: homing prep RUN --force"
            " (If this is a rented instance, the data transfer was incomplete.)",
        )


def map_file(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped, but a split may contain an empty shard
        return np.empty(0, dtype=dtype)
    with open(path, "rb") as file:
        # Wrap the memory map in a plain ndarray, because slicing an np.memmap (a subclass) takes microseconds.
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)
