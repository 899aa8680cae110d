"""A folder to a model that can be used: weights + run.json or config.json + tokenizer.json.

    a checkpoint of ours    present? -> hashes equal the manifest's? -> same vocabulary? -> weights onto the device
    an export, or anybody's the same, without hashes that nobody wrote down
    an adapter (LoRA)       the same, put into the weights it was trained on (`adapted`)

A folder without its tokenizer is refused: the weights would still run, and every word would be wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from homing.errors import DataError, IntegrityError
from homing.lm.device import pick_device, pick_precision, use_device
from homing.lm.generate.adapted import load_adapted, told_of_base
from homing.lm.model import Decoder, check_shape, count_params, shape_from_config
from homing.lm.model.decoder import PRECISIONS
from homing.lm.open_weights import WeightFiles, find_weights, load_decoder
from homing.lm.open_weights.files import INDEX, has_weights
from homing.lm.shards.read import file_sha256
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest
from homing.wire.run import Model, Phase, Run

__all__ = ["Card", "load_for_use", "read_card", "read_manifest", "verify_files", "whose_template"]

CONFIG = "config.json"
EXPORT = "export.json"  # beside every export of ours


@dataclass(frozen=True)
class Card:
    """What a checkpoint folder says of itself, without opening the weights."""

    folder: Path
    shape: Model
    run_name: str  # "" for weights that no run of ours wrote
    phase: str
    step: int | None
    is_hashed: bool  # a manifest lies beside the files
    tokenizer_sha256: str
    run: Run | None = None
    base_sha256: str = ""  # of the weights that an adapter was trained on

    @property
    def adapter_phase(self) -> Phase | None:
        """The phase that trained an adapter and no whole weights, or None."""
        phases = self.run.phases if self.run is not None else []
        return next((phase for phase in phases if phase.kind == self.phase and phase.method != "full"), None)


def load_for_use(
    checkpoint_dir: Path, device: str = "auto", *, precision: str = "auto", base: Path | None = None
) -> tuple[Decoder, Tokenizer]:
    """`base` is the folder of the weights that an adapter was trained on, where the folder does not say it itself."""
    folder = Path(checkpoint_dir)
    where = pick_device(device)
    use_device(where)
    card = read_card(folder)
    verify_files(folder, card)
    files = find_weights(folder)
    tokenizer = load_tokenizer(folder / names.TOKENIZER)
    _check_vocabulary(card, tokenizer)
    precision = pick_precision(precision, where)
    dtype = PRECISIONS[precision]  # kept as they are computed with: a master copy in fp32 is for training
    if card.adapter_phase is not None:
        assert card.run is not None, "an adapter's phase stands in its run"
        # Merged in fp32 beside the card: it may have room for what is computed with, and not for twice as much.
        model = load_adapted(files, card.run, card.adapter_phase, card.base_sha256, torch.device("cpu"), base)
        for parameter in model.parameters():  # these alone: positions are turned in fp32
            parameter.data = parameter.data.to(dtype)
        model.to(where)
    else:
        _check_size(card, files)
        model = load_decoder(files, card.shape, device=where, dtype=dtype)
    model.set_precision(precision)
    return model.eval(), tokenizer


def read_card(folder: Path) -> Card:
    """Refuses a folder that lacks something, naming all that it lacks."""
    _check_present(folder)
    manifest = read_manifest(folder)
    if (folder / names.RUN).is_file():
        run = _read_run(folder / names.RUN)
        if manifest is None:
            raise IntegrityError(
                what=f"{folder} is not a whole checkpoint.",
                why=f"{names.MANIFEST} is written last and is not there, so nothing vouches for the other files.",
                fix=f"homing fetch {run.name} brings the whole one.",
            )
        return Card(
            folder, run.model, run.name, manifest.phase, manifest.step, True, run.data.tokenizer_sha256, run,
            told_of_base(folder)[0],
        )  # fmt: skip
    try:
        shape = shape_from_config(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as exc:
        raise DataError(what=f"{folder / CONFIG} cannot be read.", why=str(exc), fix="Fetch the folder again.") from exc
    if manifest is None:
        told = _told_by_export(folder)
        return Card(folder, shape, str(told.get("name", "")), str(told.get("phase", "")), told.get("step"), False, "")
    return Card(folder, shape, manifest.run_name, manifest.phase, manifest.step, True, "")


def _told_by_export(folder: Path) -> dict[str, Any]:
    """What our own export says of itself: whether it was taught to answer cannot be seen in the weights."""
    try:
        told = json.loads((folder / EXPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _check_present(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(
            what=f"There is no checkpoint at {folder}.",
            why="A checkpoint is a folder that holds model.safetensors, run.json and tokenizer.json.",
            fix="`homing fetch RUN` brings one home; `homing runs` lists what there is.",
        )
    missing = [] if has_weights(folder) else [f"{names.WEIGHTS} (or {INDEX})"]
    if not (folder / names.RUN).is_file() and not (folder / CONFIG).is_file():
        missing.append(f"{names.RUN} (or {CONFIG})")
    if missing:
        raise DataError(
            what=f"{folder} is not a checkpoint.",
            why=f"It lacks {' and '.join(missing)}.",
            fix="`homing fetch RUN` brings one home; `homing runs` lists what there is.",
        )
    if not (folder / names.TOKENIZER).is_file():
        raise DataError(
            what=f"The checkpoint {folder} has no {names.TOKENIZER}.",
            why="Weights without the tokenizer they were trained with turn every word into another.",
            fix=_how_to_get_tokenizer(folder),
        )


def whose_template(card: Card) -> str:
    """Where the chat template lies that a model was trained with, in words."""
    if card.run is None:
        return f"{names.CHAT_TEMPLATE}, or {names.TOKENIZER_CONFIG}, that came with these weights"
    if card.run.base is not None:
        return f"{names.CHAT_TEMPLATE}, or {names.TOKENIZER_CONFIG}, of {card.run.base.address}"
    return f"{names.TOKENIZER_CONFIG} of the run's data, which homing prep {card.run.name} makes"


def _how_to_get_tokenizer(folder: Path) -> str:
    run = _read_run(folder / names.RUN) if (folder / names.RUN).is_file() else None
    if run is None:
        return f"Copy the {names.TOKENIZER} that came with these weights into {folder}."
    told = f" (its sha256 is {run.data.tokenizer_sha256})" if run.data.tokenizer_sha256 else ""
    return (
        f"homing fetch {run.name} brings it with the checkpoint; "
        f"or copy {Path(run.data.dir) / names.TOKENIZER}{told} into {folder}."
    )


def verify_files(folder: Path, card: Card) -> None:
    """Every file that will be read against the manifest, before any of it is believed."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    listed = {file.name: file for file in manifest.files}
    described_by = names.RUN if (folder / names.RUN).is_file() else CONFIG
    whole_or_adapter = (names.WEIGHTS, names.ADAPTER, names.ADAPTER_CONFIG)
    # Also one that is listed and gone: without its paper an adapter could be put on weights that are not its own.
    weights = [name for name in whole_or_adapter if name in listed or (folder / name).is_file()]
    if not weights:
        weights = [INDEX, *sorted(path.name for path in folder.glob("model-*.safetensors"))]
    problems = []
    for name in (*weights, described_by, names.TOKENIZER):
        num_bytes = (folder / name).stat().st_size if (folder / name).is_file() else None
        if num_bytes is None:
            problems.append(f"{name} is not there.")
        elif name not in listed:
            problems.append(f"{name} is not listed in {names.MANIFEST}.")
        elif num_bytes != listed[name].num_bytes:
            problems.append(f"{name} has {num_bytes:,} bytes, not {listed[name].num_bytes:,}.")
        elif (found := file_sha256(folder / name)) != listed[name].sha256:
            problems.append(f"{name} has sha256 {found[:12]}..., not {listed[name].sha256[:12]}...")
    if problems:
        raise IntegrityError(
            what=f"The checkpoint {folder} is damaged.",
            why="\n".join(problems),
            fix=f"homing fetch {card.run_name or 'RUN'} brings it again; or use another: --checkpoint STEP",
        )


def _check_vocabulary(card: Card, tokenizer: Tokenizer) -> None:
    path = card.folder / names.TOKENIZER
    # Open weights may have more rows than their tokenizer has ids; weights of our own never have.
    is_foreign = card.run is None or card.run.base is not None
    has_spare_rows = is_foreign and tokenizer.vocab_size < card.shape.vocab_size
    if tokenizer.vocab_size != card.shape.vocab_size and not has_spare_rows:
        raise DataError(
            what="Tokenizer and weights do not belong together.",
            why=f"{path} has {tokenizer.vocab_size:,} tokens, "
            f"{card.folder / names.WEIGHTS} is a model of {card.shape.vocab_size:,}.",
            fix=_how_to_get_tokenizer(card.folder),
        )
    if card.tokenizer_sha256 and (found := file_sha256(path)) != card.tokenizer_sha256:
        raise DataError(
            what="Tokenizer and weights do not belong together.",
            why=f"{path} has sha256 {found[:12]}..., the run was trained with {card.tokenizer_sha256[:12]}...",
            fix=_how_to_get_tokenizer(card.folder),
        )


def _check_size(card: Card, files: WeightFiles) -> None:
    """A shape is only a claim: one that would fill the memory is refused before anything is built."""
    num_params, num_bytes = sum(count_params(card.shape).values()), files.num_bytes
    if num_params > num_bytes:
        raise DataError(
            what="The weights do not fit the model.",
            why=f"The shape has {num_params:,} parameters, and the weights in {card.folder} are {num_bytes:,} bytes.",
            fix="Use the run.json or config.json that lies beside these weights.",
        )


def read_manifest(folder: Path) -> CheckpointManifest | None:
    path = folder / names.MANIFEST
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
