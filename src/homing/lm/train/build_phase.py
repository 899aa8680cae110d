"""Builds everything a phase needs to train: its data, the model with its initial weights, and the optimizer.

Initial weights come from init_from, else the previous phase, else the run's open weights; otherwise they are random.

full          all weights are trained, in fp32
lora, qlora   the base weights are frozen, in 16 or 4 bits, and adapters are trained on top of them. If the previous
              phase trained adapters with the same settings, training continues with these adapters on the same base;
              other adapters are first merged into their base
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from homing.errors import DataError, UsageError
from homing.lm.device import describe_device, free_host_bytes, pick_precision
from homing.lm.generate.load_adapter import read_base_record
from homing.lm.generate.load_model import read_card, verify_files
from homing.lm.model import Decoder, lora
from homing.lm.model.open_weights import find_weights, read_tensors
from homing.lm.model.row_shards import local
from homing.lm.phases import PhaseWork, Remembers, open_phase
from homing.lm.train.checkpoints import checkpoint_files
from homing.lm.train.compute.hardware_choices import what_else
from homing.lm.train.distributed.shard_model import pick_parallel, shard_model
from homing.lm.train.open_session import Session
from homing.lm.train.optim.offload import HostPlace, Place
from homing.lm.train.optim.param_groups import Optimizer, build_optimizer, state_bytes
from homing.lm.train.read_run_dir import check_count
from homing.lm.train.stop_requests import FatalError
from homing.tokenizer_json import gives_same_ids
from homing.units import format_bytes
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, Stage, reported_checkpoint
from homing.wire.run_json import Lora, Phase, Run

__all__ = ["Built", "Loading", "build", "describe_start", "load_model", "start_of"]

OFFLOADS_FROM = ("cuda",)  # types of devices that have their own memory, separate from host memory
# maximum share of the host's free memory to use for optimizer state, because pinned memory cannot be swapped out
_HOST_SHARE = 0.9


class Loading(Protocol):
    """The information needed to load weights. A `Session` provides it, as do callers that only inspect the weights."""

    @property
    def run(self) -> Run: ...
    @property
    def run_dir(self) -> Path: ...
    @property
    def data_dir(self) -> Path: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class Built:
    work: PhaseWork
    model: Decoder
    optimizer: Optimizer
    start: Path | None  # folder of the initial weights; None: random initialization
    # name -> contents of small files that checkpoints of this phase need in addition to those of the run
    metadata_files: dict[str, bytes] = field(default_factory=dict)
    parallel: str = "ddp"  # how the ranks hold the model, and why, if there was a choice
    parallel_reason: str = ""
    lineage: tuple[Stage, ...] = ()  # the training stages that the initial weights went through

    @property
    def weights_name(self) -> str:
        return file_names.WEIGHTS if self.model.lora is None else file_names.ADAPTER

    @property
    def checkpoint_bytes(self) -> int:
        """The approximate size of what this rank writes: its trained weights, and two AdamW moments for each."""
        return 3 * sum(local(p).numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)


def build(session: Session, phase: Phase, previous: Path | None) -> Built:
    """Build a phase's data, model and optimizer. `previous` is the final checkpoint of the previous phase."""
    run = session.run
    work = open_phase(run, phase, data_dir=session.data_dir, run_dir=session.run_dir)
    start = start_of(session, phase, previous)
    torch.manual_seed(run.seed)
    parallel, reason = _pick_parallel(session, phase)
    if parallel == "ddp":
        model, metadata_files = load_model(session, phase, start)
    else:
        model, metadata_files = _divided_model(session, phase, start, parallel), _metadata_of_start(start)
    if isinstance(work, Remembers):
        work.keep_start(model)
    try:
        optimizer = build_optimizer(model, phase.optimizer, session.ranks, _place(session, phase, model))
    except torch.OutOfMemoryError as exc:
        raise FatalError(
            what="Out of memory: the optimizer state does not fit on the GPU next to the weights.",
            why=str(exc).splitlines()[0],
            fix=what_else(phase, "train a smaller model"),
        ) from exc
    return Built(work, model, optimizer, start, metadata_files, parallel, reason, _lineage(session, start))


def _pick_parallel(session: Session, phase: Phase) -> tuple[str, str]:
    run, device, free = session.run, session.device, None
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    # The first rank decides for all, because the others may have measured another amount of free memory.
    precision = pick_precision(run.train.precision, device)
    picked = pick_parallel(run.train.parallel, phase, run.sizes.num_params, session.ranks, free, precision)
    return session.ranks.agree(picked)


def _place(session: Session, phase: Phase, model: Decoder) -> Place:
    """Return where to keep the optimizer state.

    Raises an error if offloading would be useless on this device, or if host memory has no room for the state.
    """
    if phase.offload == "none":
        return Place(model.device)
    number = session.run.phases.index(phase)
    if session.device.type not in OFFLOADS_FROM:
        raise UsageError(
            what=f"phases.{number}.offload needs a CUDA GPU, but the device is {describe_device(session.device)}.",
            why="On this device the optimizer state is already in host memory.",
            fix=f"Use --set phases.{number}.offload=none",
        )
    ranks = session.ranks
    # Use the amount of free memory that the first rank measured before any rank allocated host memory.
    needed, free = ranks.local_count * state_bytes(model, phase.optimizer), ranks.agree(free_host_bytes())
    if free is not None and needed > _HOST_SHARE * free:
        raise FatalError(
            what=f"The optimizer state does not fit in host memory: it needs {format_bytes(needed)}, but only"
            f" {format_bytes(free)} are free.",
            why=f"phases.{number}.offload keeps this state in pinned host memory, a tenth of which must stay free.",
            fix="Use a machine with more memory, or set states: int8 with optimizer: adamw, or offload: none.",
        )
    return HostPlace(session.device)


def load_model(session: Loading, phase: Phase, start: Path | None) -> tuple[Decoder, dict[str, bytes]]:
    """Return the model with the weights of `start` (or random ones), and the small files that its checkpoints need."""
    if start is not None:
        _check_tokenizer(session, start)
    metadata_files = _metadata_of_start(start)
    if phase.method == "full":
        return _whole_model(session, phase, start), metadata_files
    assert start is not None, "adapters need base weights; run files without them are rejected earlier"
    model, adapter_config = _adapted_model(session, phase, start, _lineage(session, start))
    return model, metadata_files | adapter_config


def _check_tokenizer(session: Loading, start: Path) -> None:
    """Raise DataError if the weights in `start` were trained with a different tokenizer than the data.

    `homing launch` makes the same check, but this is the last chance to detect the mistake. Third-party weights that
    come without a tokenizer file are accepted.
    """
    upstream, ours = start / file_names.TOKENIZER, session.data_dir / file_names.TOKENIZER
    if upstream.is_file() and ours.is_file() and not gives_same_ids(upstream, ours):
        again = f"homing prep {session.run.name} --tokenizer FILE, or train the earlier phase again"
        raise DataError(
            what=f"The weights in {start} were trained with a different tokenizer than the one used for the data.",
            why=f"{upstream} produces different token ids than {ours}, so the data would be meaningless to the model.",
            fix=f"Use the tokenizer of the weights: {f'homing prep {session.run.name}' if session.run.base else again}",
        )


def start_of(session: Loading, phase: Phase, previous: Path | None) -> Path | None:
    """Return the folder of a phase's initial weights, or None for random initialization."""
    if phase.init_from:
        return (session.run_dir / phase.init_from).resolve()
    if previous is not None:
        return previous
    return (session.run_dir / session.run.base.dir).resolve() if session.run.base else None


def describe_start(session: Loading, start: Path) -> str:
    """Describe the initial weights in words for messages: where the user can find them, and what trained them."""
    base, run_dir = session.run.base, session.run_dir.resolve()
    if base and start == (session.run_dir / base.dir).resolve():
        return base.address
    sent = next((item.source for item in session.run.inputs if item.path.startswith(f"{start.name}/")), "")
    folder = Path(sent).parent if sent else start
    is_fetched = folder.parent.name == "models"
    shown = Path(*folder.parts[-2:]) if is_fetched else folder
    shown = folder.relative_to(run_dir) if folder.is_relative_to(run_dir) else shown
    try:
        manifest = codec.loads(CheckpointManifest, (start / file_names.MANIFEST).read_bytes())
    except (OSError, ValueError):  # third-party weights
        return str(shown)
    return f"{shown}, {reported_checkpoint(manifest)}"


def _metadata_of_start(start: Path | None) -> dict[str, bytes]:
    """Return the initial weights' generation settings (sampling defaults), to be copied to this phase's checkpoints."""
    path = None if start is None else start / file_names.GENERATION
    return {path.name: path.read_bytes()} if path is not None and path.is_file() else {}


def _lineage(session: Loading, start: Path | None) -> tuple[Stage, ...]:
    base = session.run.base
    if start is None:
        return ()
    if base and start == (session.run_dir / base.dir).resolve():
        return (Stage("base", address=base.address),)
    try:
        return tuple(codec.loads(CheckpointManifest, (start / file_names.MANIFEST).read_bytes()).lineage)
    except (OSError, ValueError):  # third-party weights
        return (Stage("base", address=str(start)),)


def _whole_model(session: Loading, phase: Phase, start: Path | None) -> Decoder:
    run = session.run
    if start is not None and (start / file_names.ADAPTER).is_file():
        return _merged_model(session, start, phase.init_base, session.device)[0]
    model = Decoder(run.model)
    check_count(run, model)
    model.init_weights(run.seed, phase.optimizer.kind)
    if start is not None:
        model.load_weights(dict(_tensors(start)))
    return model.to(session.device)


def _divided_model(session: Session, phase: Phase, start: Path | None, parallel: str) -> Decoder:
    """Return a model of which this rank holds a part. The whole model is never in this process's memory.

    Only if the initial weights have an adapter, it is merged into them first, in host memory.
    """
    if start is not None:
        _check_tokenizer(session, start)
    run, is_adapted = session.run, start is not None and (start / file_names.ADAPTER).is_file()
    if start is not None and is_adapted:
        model = _merged_model(session, start, phase.init_base, torch.device("cpu"))[0]
    else:
        model = Decoder(run.model)  # its memory is not used before something is written to it
    check_count(run, model)
    shard_model(model, parallel, session.ranks, session.device)
    if start is None:
        model.init_weights(run.seed, phase.optimizer.kind)
    elif not is_adapted:
        model.load_each(_tensors(start))
    return model


def _adapted_model(
    session: Loading, phase: Phase, start: Path, lineage: tuple[Stage, ...]
) -> tuple[Decoder, dict[str, bytes]]:
    assert phase.lora is not None, "run.json has no LoRA settings for this phase"
    precision = pick_precision(session.run.train.precision, session.device)
    storage = lora.storage_for(phase.method, precision)
    before = _adapter_of(session, start, phase.init_base) if (start / file_names.ADAPTER).is_file() else None
    continues = before is not None and lora.is_same(before.settings, phase.lora)
    # When training continues with existing adapters, leave them on the base they were trained on. If they were merged
    # into it, the sum would be rounded, and in 4 bits most of what they learned would be lost. Also, other tools can
    # load a single adapter on top of open weights.
    folder = before.base if before and continues else start
    model, base_sha256 = _frozen_model(session, folder, storage, base_dir="" if continues else phase.init_base)
    if before and continues:
        lora.check_base(before.base_sha256, base_sha256)
    lora.add_lora(model, phase.lora, seed=session.run.seed)
    if before and continues:
        model.load_weights(before.tensors)
    base = session.run.base
    is_open = base is not None and folder == (session.run_dir / base.dir).resolve()
    address = base.address.removeprefix("hf:").split("@")[0] if base and is_open else str(folder)
    adapter_config = {
        **lora.adapter_config(phase.lora, address),
        **{"homing_base_sha256": base_sha256, "homing_base_dir": os.path.relpath(folder, session.run_dir)},
        # Index of the base weights in the list of training stages. If training continued with earlier adapters, the
        # base weights are older than the last stage.
        "homing_base_stage": before.base_stage if before and continues else len(lineage) - 1,
    }
    return model, {file_names.ADAPTER_CONFIG: json.dumps(adapter_config, indent=1).encode()}


@dataclass(frozen=True)
class _Adapter:
    """A checkpoint's adapter, with the location of the base weights it was trained on."""

    settings: Lora
    seed: int
    tensors: dict[str, Tensor]
    base: Path
    base_sha256: str
    base_stage: int


def _adapter_of(session: Loading, start: Path, base_dir: str = "") -> _Adapter:
    """Load and verify a checkpoint's adapter.

    `base_dir` is the folder with the base weights. It is needed if the adapter is from another run; this run's own
    checkpoints record the folder.
    """
    card = read_card(start)
    verify_files(start, card)  # optimizer state is not checked, because an uploaded or fetched adapter has none
    base_sha256, recorded_dir = read_base_record(start)
    assert card.run is not None, "the checkpoint of an adapter must contain its run"
    assert card.adapter_phase is not None, "this checkpoint contains no adapter"
    assert card.adapter_phase.lora is not None, "the phase that trained this adapter has no LoRA settings"
    base = (session.run_dir / (base_dir or recorded_dir)).resolve()
    adapter_config = json.loads((start / file_names.ADAPTER_CONFIG).read_bytes())
    stage = int(adapter_config.get("homing_base_stage", len(_lineage(session, start)) - 2))
    tensors = load_file(start / file_names.ADAPTER)
    return _Adapter(card.adapter_phase.lora, card.run.seed, tensors, base, base_sha256, stage)


def _merged_model(session: Loading, start: Path, base_dir: str, device: torch.device) -> tuple[Decoder, str]:
    """Merge the adapter in `start` into its base weights; return the model and the hash of the merged weights."""
    found = _adapter_of(session, start, base_dir)
    model, base_sha256 = _frozen_model(session, found.base, "fp32", device)
    lora.check_base(found.base_sha256, base_sha256)
    lora.add_lora(model, found.settings, seed=found.seed)
    model.load_weights(found.tensors)
    lora.merge(model)
    return model, lora.merged_sha256(base_sha256, found.settings, found.tensors)


def _frozen_model(
    session: Loading, folder: Path, storage: str, device: torch.device | None = None, *, base_dir: str = ""
) -> tuple[Decoder, str]:
    """Load weights into a frozen model with the storage format `storage`; return the model and the hash of its weights.

    If `folder` contains an adapter, it is first merged into its base (in the folder `base_dir`). This happens in host
    memory, because the GPU may have room only for weights in 16 or 4 bits.
    """
    device = device or session.device
    if (folder / file_names.ADAPTER).is_file():
        model, sha256 = _merged_model(session, folder, base_dir, torch.device("cpu"))
        lora.freeze(model, storage, device)
        return model, sha256
    with torch.device("meta"):
        model = Decoder(session.run.model)
    return model, lora.load_base(model, _tensors(folder), storage=storage, device=device)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a verified checkpoint, or of a folder of third-party weights."""
    if (folder / file_names.MANIFEST).is_file():
        yield from checkpoint_files.load_weights(folder).items()
    else:
        yield from read_tensors(find_weights(folder))
