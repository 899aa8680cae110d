"""What `homing prep` has left in the data directory: counts, hashes, vocabulary, and whether every file is there.

Reads manifest.json and, when asked, the shards' bytes; knows nothing of how they were made.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from homing.errors import DataError
from homing.tokenizer_file import read_tokenizer_bytes
from homing.wire import names
from homing.wire.codec import WireError, loads
from homing.wire.data import DataManifest

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
    """None where nothing is prepared; a manifest that cannot be used is an error, never the same as none."""
    path = data_dir / names.MANIFEST
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
            what=f"{path} is not a manifest that can be used.",
            why=str(exc),
            fix=f"Delete {path} and prepare the data again: homing prep RUN",
        ) from exc
    return Prepared(data_dir, manifest, hashlib.sha256(raw).hexdigest())


def tokenizer_vocab_size(path: Path) -> int:
    """Entries of a tokenizer.json: the model's own and those added to it."""
    return _read_tokenizer(path)[0]


def tokenizer_specials(path: Path) -> list[str]:
    """The names of the tokens that were added to the model's own."""
    return _read_tokenizer(path)[1]


def _read_tokenizer(path: Path) -> tuple[int, list[str]]:
    try:
        document = json.loads(read_tokenizer_bytes(path))
        ids, added = list(document["model"]["vocab"].values()), document.get("added_tokens", [])
        ids += [token["id"] for token in added]
        return int(max(ids)) + 1, [str(token["content"]) for token in added]
    except FileNotFoundError as exc:
        raise DataError(
            what=f"There is no tokenizer at {path}.",
            why="tokenizer.file names it.",
            fix="Give the path of a tokenizer.json, or delete tokenizer.file to train one.",
        ) from exc
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DataError(
            what=f"{path} is not a tokenizer that can be used.",
            why=f"{type(exc).__name__}: {exc}",
            fix="Give the path of a tokenizer.json with a BPE model, or delete tokenizer.file to train one.",
        ) from exc


def missing_files(prepared: Prepared, *, is_hashing: bool = False) -> list[str]:
    """One sentence per file that is absent, empty, of another size, or (when hashing) of other content."""
    problems = []
    wanted: list[tuple[str, int | None, str]] = []
    if not prepared.manifest.template_sha256:  # conversations are made with the tokenizer of the run
        wanted.append((names.TOKENIZER, None, prepared.manifest.tokenizer_sha256))
    for split in prepared.manifest.splits.values():
        for shard in split.shards:
            wanted += shard.files()
    for name, num_bytes, digest in wanted:
        # The tokenizer is small, and another one of the same name turns every word into another: always looked at.
        if problem := _problem(prepared.dir / name, num_bytes, digest if is_hashing or name == names.TOKENIZER else ""):
            problems.append(problem)
    return problems


def unlisted_files(prepared: Prepared) -> list[str]:
    """Shards that somebody put there: without a place in the manifest nobody reads them."""
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
        return f"{path} has changed: its sha256 is not the manifest's."
    return ""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
