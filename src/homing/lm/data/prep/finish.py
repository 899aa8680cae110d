"""Publishes the result of prep: the old manifest is removed first, the new one is written last.

In between there is no manifest, and shards without a manifest are not data: a prep that dies here looks unfinished to
every reader, and the next one finishes moving the files. `prep.json` records size and modification time of the inputs,
so that unchanged ones need not be read again.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.data.prep.prep_settings import Inputs, file_sha256
from homing.lm.data.prep.work_folder import Work, sync_folder, write_whole
from homing.lm.tokenizer.write_files import EXTRAS, METADATA_FILES
from homing.wire.codec import WireError, dumps, loads
from homing.wire.file_names import MANIFEST, TOKENIZER
from homing.wire.shard_manifest import DataManifest

__all__ = ["find_finished", "publish", "tokenizer_files"]

PREP = "prep.json"
_SHARD = re.compile(r"(train|val)-\d{5,}\.(bin|idx)")


def publish(work: Work, manifest: DataManifest, inputs: Inputs) -> None:
    names = [*tokenizer_files(manifest), *_shard_files(manifest)]
    work.save(manifest=dumps(manifest))
    (work.target / MANIFEST).unlink(missing_ok=True)
    sync_folder(work.target)
    for path in work.target.iterdir():
        if path.name not in names and (_SHARD.fullmatch(path.name) or path.name in _others_extras(manifest)):
            path.unlink()
    for name in names:
        # Absent means that a killed prep has already moved it: nothing else takes files out of this folder.
        if (work.folder / name).exists():
            os.replace(work.folder / name, work.target / name)
    sync_folder(work.target)
    if not _is_whole(work.target, manifest):
        work.discard()
        raise DataError(
            what=f"Shards disappeared from {work.target} before prep finished.",
            why="Another program deleted or changed files there while prep was running, or after it was killed.",
            fix="Run the same command again; it starts from the beginning.",
        )
    _remember(work.target, inputs)
    write_whole(work.target / MANIFEST, dumps(manifest, indent=2).encode() + b"\n")
    work.discard()


def find_finished(target: Path, settings: dict[str, Any], inputs: Inputs) -> DataManifest | None:
    """Return the manifest of a finished prep with the same settings and text, or None if missing or incomplete."""
    try:
        manifest = loads(DataManifest, (target / MANIFEST).read_bytes())
    except (OSError, WireError):
        return None
    # Round-trip through JSON, to compare what would have been written.
    if manifest.settings != json.loads(json.dumps(settings)) or not _is_whole(target, manifest):
        return None
    if _stamps(target) == json.loads(json.dumps(inputs.stamps)):
        return manifest
    # The modification times differ: compare the content, but read it only if the sizes agree.
    if [(s.path, s.num_bytes) for s in inputs.sources] != [(s.path, s.num_bytes) for s in manifest.source]:
        return None
    if any(file_sha256(source.path) != source.sha256 for source in manifest.source):
        return None
    _remember(target, inputs)
    return manifest


def _is_whole(target: Path, manifest: DataManifest) -> bool:
    width = 2 if manifest.dtype == "uint16" else 4
    for split in manifest.splits.values():
        for shard in split.shards:
            sizes = {shard.name: shard.num_tokens * width, shard.index_name: (shard.num_documents + 1) * 8}
            for name, size in sizes.items():
                path = target / name
                if not path.is_file() or path.stat().st_size != size:
                    return False
    tokenizer = target / TOKENIZER
    if not all((target / name).is_file() for name in tokenizer_files(manifest)):
        return False
    return file_sha256(tokenizer) == manifest.tokenizer_sha256


def tokenizer_files(manifest: DataManifest) -> list[str]:
    """Return tokenizer.json and its accompanying files: ours, or those of a third-party tokenizer."""
    return [TOKENIZER, *manifest.settings.get("metadata", EXTRAS)]


def _others_extras(manifest: DataManifest) -> tuple[str, ...]:
    """Return files of a previous tokenizer that would be mistaken for those of the new third-party one."""
    return (*EXTRAS, *METADATA_FILES) if "metadata" in manifest.settings else ()


def _shard_files(manifest: DataManifest) -> list[str]:
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return [name for shard in shards for name in (shard.name, shard.index_name)]


def _remember(target: Path, inputs: Inputs) -> None:
    write_whole(target / PREP, json.dumps({"stamps": inputs.stamps}).encode())


def _stamps(target: Path) -> Any:
    try:
        return json.loads((target / PREP).read_bytes()).get("stamps")
    except (OSError, ValueError, AttributeError):
        return None
