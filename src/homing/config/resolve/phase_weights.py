"""The weights that a phase starts from: a checkpoint named by `init_from`, or the newest one of an earlier phase.

    init_from (a folder, or hf:OWNER/REPO/path) -> a local folder -> same model? -> same tokenizer? -> an adapter's base
    train.only: sft, without init_from          -> the local final checkpoint of the phase before it

Checkpoints of a run with the same name in another project folder are skipped; to use one, set `init_from`. To start
from an adapter, a phase needs the base weights too. They are found by the lineage of the adapter's checkpoint:

    the base stage -> the run's open weights | our checkpoint | files sent at launch

This module only finds the folder. The trainer compares the sha256 of the tensors before it combines the two.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homing.config.home_and_run_files import MODELS, begun_elsewhere, home, manifest_in, shown, typed_name
from homing.config.parse.check import Trace
from homing.config.parse.source import KeyPath
from homing.config.weights.fetch_from_hub import init_folder
from homing.config.weights.open_weights import INDEX, Source
from homing.errors import DataError, HomingError
from homing.hf_config import model_of
from homing.tokenizer_json import gives_same_ids
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import Stage
from homing.wire.run_json import Model, Run

__all__ = ["find_adapter_base", "find_start", "loaded_tokenizer", "newest_weights", "resolve_init"]

_NOT_IN_WEIGHTS = ("context", "max_context", "rope_base", "rope_scaling", "norm_eps")
_OPEN = "base"  # the phase name that a checkpoint's lineage uses for open weights


# --- init_from -------------------------------------------------------------------------------------------------------


def resolve_init(
    trace: Trace, number: int, typed: str, model: Model, source: Source | None, tokenizer: Path | None
) -> tuple[str, str]:
    """Return the checkpoint folder and, if it holds an adapter, the folder of the base weights it was trained on.

    `typed`: the checkpoint's folder or address. `source`: open weights that the run starts from.
    `tokenizer`: tokenizer file of the data, if it exists.
    """
    path: KeyPath = ("phases", number, "init_from")
    try:
        folder = init_folder(typed).absolute()
    except HomingError as exc:
        trace.wrong(path, f"{exc.what} {exc.why}", exc.fix)
        return "", ""
    loaded = _model_in(trace, path, typed, folder)
    if loaded is None:
        return str(folder), ""
    if differing := _differences(loaded, model):
        keys = "model section" + (" and tokenizer.vocab_size" if loaded.vocab_size != model.vocab_size else "")
        trace.wrong(path, f"{typed} is a different model: {'; '.join(differing)}.", f"Change the {keys} to match it.")
    elif tokenizer is not None:
        _check_tokenizer(trace, path, folder, tokenizer, is_open=source is not None)
    if not (folder / file_names.ADAPTER).is_file():
        return str(folder), ""
    trace.note(f"phases.{number}.init_base", f"derived from phases.{number}.init_from")
    try:
        return str(folder), str(find_adapter_base(folder, source))
    except DataError as exc:
        trace.wrong(path, f"{exc.what} {exc.why}", exc.fix)
        return str(folder), ""


def loaded_tokenizer(typed: str) -> Path | None:
    """Return the tokenizer of the checkpoint at `typed`, if it has one."""
    try:
        path = init_folder(typed) / file_names.TOKENIZER
    except HomingError:
        return None  # the problem is reported when the phase is resolved
    return path if path.is_file() else None


def _model_in(trace: Trace, path: KeyPath, typed: str, folder: Path) -> Model | None:
    """Return the shape of the model in `folder`. If it is not a checkpoint folder, record a mistake and return None."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in (file_names.WEIGHTS, INDEX, file_names.ADAPTER)):
        missing.append(file_names.WEIGHTS)
    if missing:
        trace.wrong(path, f"{typed} has no {' and no '.join(missing)}.", "Use the folder of a checkpoint.")
        return None
    try:
        return model_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, DataError) as exc:
        trace.wrong(path, f"{folder / 'config.json'} cannot be used: {exc}", "Use the folder of a checkpoint.")
        return None


def _differences(loaded: Model, model: Model) -> list[str]:
    """Describe the fields in which the models differ, except those that do not affect weights, such as the context."""
    names = [field.name for field in dataclasses.fields(Model) if field.name not in _NOT_IN_WEIGHTS]
    return [
        f"{name} {getattr(loaded, name)} there, {getattr(model, name)} here"
        for name in names
        if getattr(loaded, name) != getattr(model, name)
    ]


def _check_tokenizer(trace: Trace, path: KeyPath, folder: Path, tokenizer: Path, *, is_open: bool) -> None:
    """Check that the weights to start from use the same token ids as the data.

    Text tokenized differently would be noise to the model, and no later check would notice. `tokenizer`: the tokenizer
    of the data, or that of the open weights, which the data must use.
    """
    its_tokenizer = folder / file_names.TOKENIZER
    where, mine, start = shown(its_tokenizer), shown(tokenizer), shown(folder)
    if not its_tokenizer.is_file():
        trace.warn(f"{start} has no {file_names.TOKENIZER}, so homing cannot check that its token ids match {mine}.")
        return
    if gives_same_ids(its_tokenizer, tokenizer):
        return
    again = f"homing prep {typed_name(Path(trace.source.file))} --tokenizer {shlex.quote(where)}"
    trace.wrong(
        path,
        f"{where} and {mine} give different token ids: weights and data use different tokenizers.",
        f"Use weights trained from {getattr(trace.file.model, 'from')}."
        if is_open
        else f"Prepare the data with the weights' tokenizer: {again}   or retrain the earlier phase with the new one.",
    )


# --- the checkpoints of earlier phases -------------------------------------------------------------------------------


def find_start(trace: Trace, first: int, name: str) -> str:
    """Return the newest final checkpoint of a phase before `first`.

    If there is no such checkpoint, record a mistake and return "".
    """
    phase = trace.file.phases[first]
    before = [earlier.kind for earlier in reversed(trace.file.phases[:first])]
    found = {kind: _finals(name, kind) for kind in before}
    own = [folder for folders in found.values() for folder, other_folder in folders if other_folder is None]
    if own:
        return str(own[0])
    strangers = [(folder, other_folder) for folders in found.values() for folder, other_folder in folders]
    trace.wrong(
        ("train", "only"),
        f"{phase.kind} starts from {before[0]}, but no {' or '.join(before)} checkpoint of {name} was found"
        f" (looked in ./models/{name}, ./models/{name}-{before[0]} and {home() / 'runs'})."
        + "".join(
            f" {folder} belongs to another run {name}, from {other_folder}." for folder, other_folder in strangers[:1]
        ),
        f"Train {before[0]} first, or start from that checkpoint: --set phases.{first}.init_from={strangers[0][0]}"
        if strangers
        else f"Train {before[0]} first: homing train {name} --phase {before[0]}"
        f"   If it is trained already: homing fetch {name}"
        f"   or set its folder: --set phases.{first}.init_from=FOLDER",
    )
    return ""


def newest_weights(name: str, kind: str, run_id: str = "") -> Path | None:
    """Return the newest final checkpoint folder of this phase, or its newest checkpoint if the phase never finished.

    `run_id`: look only at this run, which may have been started in another folder.
    """
    for is_final in (True, False):
        for folder, other_folder in _checkpoints(name, kind, is_final=is_final):
            manifest = manifest_in(folder)
            if (manifest is not None and manifest.run_id == run_id) if run_id else other_folder is None:
                return folder
    return None


def _finals(name: str, kind: str) -> list[tuple[Path, Path | None]]:
    return _checkpoints(name, kind, is_final=True)


def _checkpoints(name: str, kind: str, *, is_final: bool) -> list[tuple[Path, Path | None]]:
    """List checkpoint folders in order of preference, each with its project folder (None for the current folder).

    Fetched models come first, newest first. `homing fetch` stores a model under the run's name, or under NAME-PHASE or
    NAME-*-* if another run already uses that name.
    """
    fetched = [MODELS / name, MODELS / f"{name}-{kind}", *MODELS.glob(f"{name}-*-*")]
    fetched.sort(key=_made_at, reverse=True)
    runs = sorted((home() / "runs").glob(f"{name}-*"), reverse=True)
    trained = [
        step for run in runs for step in sorted((run / file_names.CHECKPOINTS / kind).glob("step-*"), reverse=True)
    ]
    manifests = {folder.absolute(): manifest_in(folder) for folder in [*fetched, *trained]}
    return [
        (folder, begun_elsewhere(manifest.run_id))
        for folder, manifest in manifests.items()
        if manifest is not None and (manifest.run_name, manifest.phase, manifest.is_final) == (name, kind, is_final)
    ]


def _made_at(folder: Path) -> float:
    manifest = manifest_in(folder)
    return manifest.made_at if manifest is not None else 0.0


# --- an adapter's base weights ----------------------------------------------------------------------------------------


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
