"""The weights that an adapter stood beside, found at home: whoever starts from an adapter needs both.

    lineage of its checkpoint -> the stage that was its base -> the open weights of the run | a checkpoint of ours
                                                                | what was sent

Only looked for here; the trainer compares the sha256 of the tensors before it puts the two together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homing.config.models import MODELS, manifest_in
from homing.config.open_weights import INDEX, Source
from homing.config.paths import home
from homing.errors import DataError
from homing.wire import codec, names
from homing.wire.checkpoint import Stage
from homing.wire.run import Run

__all__ = ["find_adapter_base"]

_OPEN = "base"  # the stage of weights that others made


def find_adapter_base(adapter: Path, source: Source | None) -> Path:
    """The folder of the weights. `source`: of the run's `model.from`. A DataError says what was looked for."""
    before = _stage_before(adapter)
    if before.phase == _OPEN and source is not None:
        if before.address == source.address:
            return source.papers_dir
        raise DataError(
            what=f"{adapter} is an adapter of other weights.",
            why=f"It was trained on {before.address}, and model.from is {source.address}.",
            fix=f"Set model.from: {before.address}",
        )
    found = next((folder for folder in _places(adapter, before) if _is_it(folder, before)), None)
    if found is None:
        raise DataError(
            what=f"{adapter} holds an adapter, and the weights that it was trained on are not here.",
            why=f"They are {_named(before)}.",
            fix=_way_to(before),
        )
    if not _is_whole(found):
        raise DataError(
            what=f"{adapter} is an adapter on top of another adapter.",
            why=f"The other one is {found}.",
            fix=f"Put all of them together: homing export {adapter} --to merged --out FOLDER   then init_from: FOLDER",
        )
    return found.absolute()


def _stage_before(adapter: Path) -> Stage:
    manifest = manifest_in(adapter)
    if manifest is None or len(manifest.lineage) < 2:
        raise DataError(
            what=f"{adapter} holds an adapter, and nothing says which weights it was trained on.",
            why=f"The lineage is in {names.MANIFEST}, beside an adapter that homing trained.",
            fix=f"homing export {adapter} --to merged --base WEIGHTS --out FOLDER   then init_from: FOLDER",
        )
    told = _told(adapter).get("homing_base_stage")  # earlier than the one before, where adapters went on with others
    return manifest.lineage[told if isinstance(told, int) and 0 <= told < len(manifest.lineage) else -2]


def _places(adapter: Path, before: Stage) -> Iterator[Path]:
    """As the adapter's own paper says, where the run that trained it took them from, and where fetched ones lie."""
    told = str(_told(adapter).get("homing_base_dir", ""))
    if told and adapter.parent.parent.name == names.CHECKPOINTS:
        yield (adapter.parents[2] / told).resolve()
    yield from _sent_from(adapter, Path(told).name)
    if before.phase == _OPEN:
        yield Path(before.address).expanduser()
        return
    yield home() / "runs" / before.run_id / names.CHECKPOINTS / before.phase / names.step_dir(before.step)
    yield from sorted(MODELS.glob("*/"))


def _told(adapter: Path) -> dict[str, Any]:
    try:
        told = json.loads((adapter / names.ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _sent_from(adapter: Path, folder: str) -> Iterator[Path]:
    """Where the files lay at home that a launch sent into this folder of the instance."""
    try:
        inputs = codec.loads(Run, (adapter / names.RUN).read_bytes()).inputs
    except (OSError, ValueError):
        return
    yield from dict.fromkeys(Path(item.source).parent for item in inputs if item.path.split("/")[0] == folder)


def _is_it(folder: Path, before: Stage) -> bool:
    if not _is_whole(folder) and not (folder / names.ADAPTER).is_file():
        return False
    if before.phase == _OPEN:
        return True
    manifest = manifest_in(folder)
    last = manifest.lineage[-1] if manifest and manifest.lineage else None
    return last is not None and (last.run_id, last.phase, last.step) == (before.run_id, before.phase, before.step)


def _is_whole(folder: Path) -> bool:
    """An index alone is not: of weights that a machine took from the Hub itself only the papers are here."""
    if (folder / names.WEIGHTS).is_file():
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
