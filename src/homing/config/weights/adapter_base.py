"""Find an adapter's base weights on this computer. To start from an adapter, a phase needs the base weights too.

lineage of the adapter's checkpoint -> the base stage -> the run's open weights | our checkpoint | files sent at launch

This module only finds the folder. The trainer compares the sha256 of the tensors before it combines the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homing.config.home_and_run_files import MODELS, home, manifest_in
from homing.config.weights.open_weights import INDEX, Source
from homing.errors import DataError
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import Stage
from homing.wire.run_json import Run

__all__ = ["find_adapter_base"]

_OPEN = "base"  # the phase name that a checkpoint's lineage uses for open weights


def find_adapter_base(adapter: Path, source: Source | None) -> Path:
    """Return the folder with the base weights.

    `source` is the run's `model.from`. Raise DataError, naming the base weights, if they are missing, differ from
    `source`, or are themselves an adapter.
    """
    before = _stage_before(adapter)
    if before.phase == _OPEN and source is not None:
        if before.address == source.address:
            return source.metadata_dir
        raise DataError(
            what=f"{adapter} is an adapter for different base weights.",
            why=f"It was trained on {before.address}, but model.from is {source.address}.",
            fix=f"Set model.from: {before.address}",
        )
    found = next((folder for folder in _places(adapter, before) if _is_it(folder, before)), None)
    if found is None:
        raise DataError(
            what=f"{adapter} is an adapter, and its base weights were not found.",
            why=f"The base weights are {_named(before)}.",
            fix=_way_to(before),
        )
    if not _is_whole(found):
        raise DataError(
            what=f"{adapter} is an adapter on top of another adapter.",
            why=f"It was trained on the adapter in {found}.",
            fix=f"Merge them: homing export {adapter} --to merged --out FOLDER   then init_from: FOLDER",
        )
    return found.absolute()


def _stage_before(adapter: Path) -> Stage:
    manifest = manifest_in(adapter)
    if manifest is None or len(manifest.lineage) < 2:
        raise DataError(
            what=f"{adapter} is an adapter without a record of its base weights.",
            why=f"Adapters trained by homing have a {file_names.MANIFEST} that identifies the base weights.",
            fix=f"Merge it: homing export {adapter} --to merged --base WEIGHTS --out FOLDER   then init_from: FOLDER",
        )
    # If this adapter continued another one, its config says which earlier stage produced the base weights.
    stage = _adapter_config(adapter).get("homing_base_stage")
    return manifest.lineage[stage if isinstance(stage, int) and 0 <= stage < len(manifest.lineage) else -2]


def _places(adapter: Path, before: Stage) -> Iterator[Path]:
    """Yield the folders to search for the base weights, in order."""
    base_dir = str(_adapter_config(adapter).get("homing_base_dir", ""))
    if base_dir and adapter.parent.parent.name == file_names.CHECKPOINTS:
        yield (adapter.parents[2] / base_dir).resolve()
    yield from _sent_from(adapter, Path(base_dir).name)
    if before.phase == _OPEN:
        yield Path(before.address).expanduser()
        return
    yield home() / "runs" / before.run_id / file_names.CHECKPOINTS / before.phase / file_names.step_dir(before.step)
    yield from sorted(MODELS.glob("*/"))


def _adapter_config(adapter: Path) -> dict[str, Any]:
    try:
        config = json.loads((adapter / file_names.ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _sent_from(adapter: Path, folder: str) -> Iterator[Path]:
    """Yield the local folders of the files that the launch sent to `folder` on the instance."""
    try:
        inputs = codec.loads(Run, (adapter / file_names.RUN).read_bytes()).inputs
    except (OSError, ValueError):
        return
    yield from dict.fromkeys(Path(item.source).parent for item in inputs if item.path.split("/")[0] == folder)


def _is_it(folder: Path, before: Stage) -> bool:
    if not _is_whole(folder) and not (folder / file_names.ADAPTER).is_file():
        return False
    if before.phase == _OPEN:
        return True
    manifest = manifest_in(folder)
    last = manifest.lineage[-1] if manifest and manifest.lineage else None
    return last is not None and (last.run_id, last.phase, last.step) == (before.run_id, before.phase, before.step)


def _is_whole(folder: Path) -> bool:
    """Return True if all weight files are present.

    An index alone is not enough: if the instance downloaded the weights from the Hub itself, only the config files are
    here.
    """
    if (folder / file_names.WEIGHTS).is_file():
        return True
    try:
        shards = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(shards) and all((folder / str(name)).is_file() for name in shards)


def _named(before: Stage) -> str:
    if before.phase == _OPEN:
        return before.address
    return f"those of {before.phase} at step {before.step:,} of {before.run_id}"


def _way_to(before: Stage) -> str:
    if before.phase == _OPEN:
        return f"Set model.from: {before.address}"
    target = MODELS / f"{before.run_id}-{before.phase}"
    return f"homing fetch {before.run_id} --checkpoint {before.phase}:{before.step} --to {target}"
