"""Loads a folder as a usable model: weights + run.json or config.json + tokenizer.json.

    homing checkpoints                check that all files exist, match the manifest's hashes and have the same
                                      vocabulary -> load the weights onto the device
    exports and third-party models    the same, but hashes are checked only if they were recorded
    adapters (LoRA)                   the same, then merge the adapter into its base weights (`load_adapter`)

A folder without a tokenizer is rejected: with a different tokenizer, the model would run but produce garbage.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from homing.errors import DataError, IntegrityError
from homing.lm.data.shards.read_shards import file_sha256
from homing.lm.device import pick_device, pick_precision, use_device
from homing.lm.generate.load_adapter import load_adapted, read_base_record
from homing.lm.model import Decoder, check_shape, count_params, shape_from_config
from homing.lm.model.decoder import PRECISIONS
from homing.lm.model.open_weights import WeightFiles, find_weights, load_decoder
from homing.lm.model.open_weights.find_tensors import INDEX, has_weights
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.run_json import Model, Phase, Run

__all__ = ["Card", "check_files", "load_for_use", "read_card", "read_manifest", "template_owner", "verify_files"]

CONFIG = "config.json"
EXPORT = "export.json"  # file that every homing export contains


@dataclass(frozen=True)
class Card:
    """The metadata of a checkpoint folder, read without opening the weights."""

    folder: Path
    shape: Model
    run_name: str  # "" if the weights are not from a homing run
    phase: str
    step: int | None
    is_hashed: bool  # whether the folder has a manifest
    tokenizer_sha256: str
    run: Run | None = None
    base_sha256: str = ""  # hash of an adapter's base weights

    @property
    def adapter_phase(self) -> Phase | None:
        """The phase that trained the adapter, or None if the folder contains all weights."""
        phases = self.run.phases if self.run is not None else []
        return next((phase for phase in phases if phase.kind == self.phase and phase.method != "full"), None)


def load_for_use(
    checkpoint_dir: Path, device: str = "auto", *, precision: str = "auto", base: Path | None = None
) -> tuple[Decoder, Tokenizer]:
    """Load model and tokenizer.

    `base` is the folder with an adapter's base weights. It is needed only if the checkpoint does not record it.
    """
    folder = Path(checkpoint_dir)
    where = pick_device(device)
    use_device(where)
    card = read_card(folder)
    tokenizer = check_files(folder, card)
    files = find_weights(folder)
    precision = pick_precision(precision, where)
    dtype = PRECISIONS[precision]  # load the weights in the compute dtype, because only training needs them in fp32
    if card.adapter_phase is not None:
        assert card.run is not None, "the card of an adapter must contain its run"
        # Merge in fp32 on the CPU, because the GPU may have room only for the compute dtype.
        model = load_adapted(files, card.run, card.adapter_phase, card.base_sha256, torch.device("cpu"), base)
        for parameter in model.parameters():  # cast only the parameters, because RoPE stays in fp32
            parameter.data = parameter.data.to(dtype)
        model.to(where)
    else:
        _check_size(card, files)
        model = load_decoder(files, card.shape, device=where, dtype=dtype)
    model.set_precision(precision)
    return model.eval(), tokenizer


def check_files(folder: Path, card: Card) -> Tokenizer:
    """Check the hashes of the files and the size of the vocabulary; return the tokenizer."""
    verify_files(folder, card)
    tokenizer = load_tokenizer(folder / file_names.TOKENIZER)
    _check_vocabulary(card, tokenizer)
    return tokenizer


def read_card(folder: Path) -> Card:
    """Read a folder's metadata. If the folder is incomplete, raise an error that lists everything that is missing."""
    _check_present(folder)
    manifest = read_manifest(folder)
    if (folder / file_names.RUN).is_file():
        run = _read_run(folder / file_names.RUN)
        if manifest is None:
            raise IntegrityError(
                what=f"{folder} is not a complete checkpoint.",
                why=f"{file_names.MANIFEST} is written last and is missing, so the other files may be incomplete.",
                fix=f"Fetch the complete checkpoint: homing fetch {run.name}",
            )
        return Card(
            folder, run.model, run.name, manifest.phase, manifest.step, True, run.data.tokenizer_sha256, run,
            read_base_record(folder)[0],
        )  # fmt: skip
    try:
        shape = shape_from_config(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as exc:
        raise DataError(what=f"{folder / CONFIG} cannot be read.", why=str(exc), fix="Fetch the folder again.") from exc
    if manifest is None:
        record = _export_record(folder)
        return Card(
            folder, shape, str(record.get("name", "")), str(record.get("phase", "")), record.get("step"), False, ""
        )
    return Card(folder, shape, manifest.run_name, manifest.phase, manifest.step, True, "")


def _export_record(folder: Path) -> dict[str, Any]:
    """Return the record of a homing export, or {} if the folder has none.

    No other file of an export states whether the model was trained on chats.
    """
    try:
        record = json.loads((folder / EXPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _check_present(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(
            what=f"There is no checkpoint at {folder}.",
            why="A checkpoint is a folder that contains model.safetensors, run.json and tokenizer.json.",
            fix="Fetch a checkpoint: homing fetch RUN   List your runs: homing runs",
        )
    missing = [] if has_weights(folder) else [f"{file_names.WEIGHTS} (or {INDEX})"]
    if not (folder / file_names.RUN).is_file() and not (folder / CONFIG).is_file():
        missing.append(f"{file_names.RUN} (or {CONFIG})")
    if missing:
        raise DataError(
            what=f"{folder} is not a checkpoint.",
            why=f"It does not contain {' and '.join(missing)}.",
            fix="Fetch a checkpoint: homing fetch RUN   List your runs: homing runs",
        )
    if not (folder / file_names.TOKENIZER).is_file():
        raise DataError(
            what=f"The checkpoint {folder} has no {file_names.TOKENIZER}.",
            why="Weights are useless without the tokenizer they were trained with.",
            fix=_how_to_get_tokenizer(folder),
        )


def template_owner(card: Card) -> str:
    """Describe where to find the chat template that a model was trained with."""
    if card.run is None:
        return f"{file_names.CHAT_TEMPLATE}, or {file_names.TOKENIZER_CONFIG}, that came with these weights"
    if card.run.base is not None:
        return f"{file_names.CHAT_TEMPLATE}, or {file_names.TOKENIZER_CONFIG}, from {card.run.base.address}"
    return f"{file_names.TOKENIZER_CONFIG} in the run's data folder, which homing prep {card.run.name} creates"


def _how_to_get_tokenizer(folder: Path) -> str:
    run = _read_run(folder / file_names.RUN) if (folder / file_names.RUN).is_file() else None
    if run is None:
        return f"Copy the {file_names.TOKENIZER} that came with these weights to {folder}."
    note = f" (its sha256 is {run.data.tokenizer_sha256})" if run.data.tokenizer_sha256 else ""
    return (
        f"Fetch it together with the checkpoint (homing fetch {run.name}), "
        f"or copy {Path(run.data.dir) / file_names.TOKENIZER}{note} to {folder}."
    )


def verify_files(folder: Path, card: Card) -> None:
    """Check every file that will be read against the manifest, before any of the files is used."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    listed = {file.name: file for file in manifest.files}
    described_by = file_names.RUN if (folder / file_names.RUN).is_file() else CONFIG
    whole_or_adapter = (file_names.WEIGHTS, file_names.ADAPTER, file_names.ADAPTER_CONFIG)
    # Include files that the manifest lists but the folder lacks, so that they are reported as missing. Without its
    # config, for example, an adapter could be merged into the wrong weights.
    weights = [name for name in whole_or_adapter if name in listed or (folder / name).is_file()]
    if not weights:
        weights = [INDEX, *sorted(path.name for path in folder.glob("model-*.safetensors"))]
    problems = []
    for name in (*weights, described_by, file_names.TOKENIZER):
        num_bytes = (folder / name).stat().st_size if (folder / name).is_file() else None
        if num_bytes is None:
            problems.append(f"{name} is missing.")
        elif name not in listed:
            problems.append(f"{name} is not listed in {file_names.MANIFEST}.")
        elif num_bytes != listed[name].num_bytes:
            problems.append(f"{name} has {num_bytes:,} bytes instead of {listed[name].num_bytes:,}.")
        elif (found := file_sha256(folder / name)) != listed[name].sha256:
            problems.append(f"{name} has sha256 {found[:12]}... instead of {listed[name].sha256[:12]}...")
    if problems:
        raise IntegrityError(
            what=f"The checkpoint {folder} is damaged.",
            why="\n".join(problems),
            fix=f"Fetch it again: homing fetch {card.run_name or 'RUN'}, or use another one: --checkpoint STEP",
        )


def _check_vocabulary(card: Card, tokenizer: Tokenizer) -> None:
    path = card.folder / file_names.TOKENIZER
    # Open weights may have more embedding rows than their tokenizer has ids. Weights trained by homing never do.
    is_foreign = card.run is None or card.run.base is not None
    has_spare_rows = is_foreign and tokenizer.vocab_size < card.shape.vocab_size
    if tokenizer.vocab_size != card.shape.vocab_size and not has_spare_rows:
        raise DataError(
            what="The tokenizer does not match the weights.",
            why=f"{path} has {tokenizer.vocab_size:,} tokens, but "
            f"{card.folder / file_names.WEIGHTS} expects {card.shape.vocab_size:,}.",
            fix=_how_to_get_tokenizer(card.folder),
        )
    if card.tokenizer_sha256 and (found := file_sha256(path)) != card.tokenizer_sha256:
        raise DataError(
            what="The tokenizer does not match the weights.",
            why=f"{path} has sha256 {found[:12]}..., but the tokenizer used in training"
            f" has {card.tokenizer_sha256[:12]}...",
            fix=_how_to_get_tokenizer(card.folder),
        )


def _check_size(card: Card, files: WeightFiles) -> None:
    """Raise DataError if the declared shape has more parameters than the weight files have bytes.

    This check comes before the model is built, because building the wrong shape could exhaust memory.
    """
    num_params, num_bytes = sum(count_params(card.shape).values()), files.num_bytes
    if num_params > num_bytes:
        raise DataError(
            what="The weights do not fit the model.",
            why=f"The model has {num_params:,} parameters, but the weights in {card.folder} have "
            f"only {num_bytes:,} bytes.",
            fix="Use the run.json or config.json that belongs to these weights.",
        )


def read_manifest(folder: Path) -> CheckpointManifest | None:
    path = folder / file_names.MANIFEST
    if not path.is_file():
        return None
    try:
        return codec.loads(CheckpointManifest, path.read_bytes())
    except (OSError, codec.WireError) as exc:
        raise IntegrityError(
            what=f"{path} cannot be read.", why=str(exc), fix="Fetch the checkpoint again: homing fetch RUN"
        ) from exc


def _read_run(path: Path) -> Run:
    try:
        run = codec.loads(Run, path.read_bytes())
    except (OSError, codec.WireError) as exc:
        raise IntegrityError(
            what=f"{path} cannot be read.", why=str(exc), fix="Fetch the checkpoint again: homing fetch RUN"
        ) from exc
    check_shape(run.model)
    return run
