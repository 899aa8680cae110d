"""Output of `homing prep` in the data directory: counts, hashes, vocabulary, and whether every file is present.

Reads manifest.json and, on request, the contents of the shards; does not know how they were made.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from homing.errors import DataError
from homing.tokenizer_file import read_tokenizer_bytes
from homing.wire import file_names
from homing.wire.codec import WireError, loads
from homing.wire.shard_manifest import DataManifest

__all__ = [
    "Prepared",
    "missing_files",
    "read_prepared",
    "sha256_of",
    "tokenizer_specials",
    "tokenizer_vocab_size",
    "unlisted_files",
]

_SHARD_ENDINGS = (".bin", ".idx", ".mask")


@dataclass(frozen=True)
class Prepared:
    dir: Path
    manifest: DataManifest
    manifest_sha256: str

    @property
    def num_train_tokens(self) -> int:
        return self._count("train")

    @property
    def num_val_tokens(self) -> int:
        return self._count("val")

    def _count(self, split: str) -> int:
        return self.manifest.splits[split].num_tokens if split in self.manifest.splits else 0


def read_prepared(data_dir: Path) -> Prepared | None:
    """Read the manifest; None if nothing is prepared. Raises DataError if the manifest cannot be used."""
    path = data_dir / file_names.MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise DataError(
            what=f"Cannot read {path}.", why=f"{exc.strerror or exc}.", fix="Prepare the data again: homing prep RUN"
        ) from exc
    try:
        manifest = loads(DataManifest, raw)
    except (WireError, UnicodeDecodeError) as exc:
        raise DataError(
            what=f"{path} is not a valid manifest.",
            why=str(exc),
            fix=f"Delete {path} and prepare the data again: homing prep RUN",
        ) from exc
    return Prepared(data_dir, manifest, hashlib.sha256(raw).hexdigest())


def tokenizer_vocab_size(path: Path) -> int:
    """Return the vocabulary size of a tokenizer.json, including added tokens."""
    return _read_tokenizer(path)[0]


def tokenizer_specials(path: Path) -> list[str]:
    """Return the added tokens of a tokenizer.json."""
    return _read_tokenizer(path)[1]


def _read_tokenizer(path: Path) -> tuple[int, list[str]]:
    try:
        document = json.loads(read_tokenizer_bytes(path))
        ids, added = list(document["model"]["vocab"].values()), document.get("added_tokens", [])
        ids += [token["id"] for token in added]
        return int(max(ids)) + 1, [str(token["content"]) for token in added]
    except FileNotFoundError as exc:
        raise DataError(
            what=f"No tokenizer found at {path}.",
            why="tokenizer.file refers to it.",
            fix="Set tokenizer.file to a tokenizer.json, or delete it to train one.",
        ) from exc
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DataError(
            what=f"{path} is not a supported tokenizer.",
            why=f"{type(exc).__name__}: {exc}",
            fix="Set tokenizer.file to a tokenizer.json with a BPE model, or delete it to train one.",
        ) from exc


def missing_files(prepared: Prepared, *, is_hashing: bool = False) -> list[str]:
    """Return one sentence per file that is missing, empty, of the wrong size, or (if hashing) of different content."""
    problems = []
    wanted: list[tuple[str, int | None, str]] = []
    if not prepared.manifest.template_sha256:  # conversations use the tokenizer of the run
        wanted.append((file_names.TOKENIZER, None, prepared.manifest.tokenizer_sha256))
    for split in prepared.manifest.splits.values():
        for shard in split.shards:
            wanted += shard.files()
    for name, num_bytes, digest in wanted:
        # Always hashed: the tokenizer is small, and a different one with the same name would change every token.
        if problem := _problem(
            prepared.dir / name, num_bytes, digest if is_hashing or name == file_names.TOKENIZER else ""
        ):
            problems.append(problem)
    return problems


def unlisted_files(prepared: Prepared) -> list[str]:
    """Return shard files that the manifest does not list, and that are therefore never read."""
    shards = [shard for split in prepared.manifest.splits.values() for shard in split.shards]
    listed = {name for shard in shards for name, _, _ in shard.files()}
    return sorted({path.name for path in prepared.dir.iterdir() if path.suffix in _SHARD_ENDINGS} - listed)


def _problem(path: Path, num_bytes: int | None, digest: str) -> str:
    if not path.is_file():
        return f"{path} is missing."
    found = path.stat().st_size
    if found == 0:
        return f"{path} is empty."
    if num_bytes is not None and found != num_bytes:
        return f"{path} has {found:,} bytes; the manifest says {num_bytes:,}."
    if digest and sha256_of(path) != digest:
        return f"{path} has changed: its sha256 differs from the manifest."
    return ""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
