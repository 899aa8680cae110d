"""What a phase trains with: its data opened, the model with the weights it starts from, and the optimizer.

weights of:   init_from, else the phase before, else the open weights of the run, else fresh ones
full          all of them learn, in fp32
lora, qlora   they stand still, in 16 or 4 bits, and the adapters beside them learn
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from homing.lm.device import pick_precision
from homing.lm.model import Decoder, lora
from homing.lm.open_weights import find_weights, read_tensors
from homing.lm.phases import PhaseWork, Remembers, open_phase
from homing.lm.train import checkpoint
from homing.lm.train.optim import Optimizer, build_optimizer
from homing.lm.train.run_dir import check_count
from homing.lm.train.session import Session
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest, Stage
from homing.wire.run import Phase, Run

__all__ = ["Built", "build"]


@dataclass(frozen=True)
class Built:
    work: PhaseWork
    model: Decoder
    optimizer: Optimizer
    start: Path | None  # the folder whose weights it starts from; None: fresh ones
    papers: dict[str, bytes] = field(default_factory=dict)  # that its checkpoints need beside those of the run
    lineage: tuple[Stage, ...] = ()  # what its weights went through before

    @property
    def weights_name(self) -> str:
        return names.WEIGHTS if self.model.lora is None else names.ADAPTER

    @property
    def checkpoint_bytes(self) -> int:
        """About: the weights, and two moments each, as AdamW has them."""
        return 3 * sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)


def build(session: Session, phase: Phase, previous: Path | None) -> Built:
    """`previous`: the final checkpoint of the phase before."""
    run = session.run
    work = open_phase(run, phase, data_dir=session.data_dir, run_dir=session.run_dir)
    start = _start(session, phase, previous)
    torch.manual_seed(run.seed)
    papers: dict[str, bytes] = {}
    if phase.method == "full":
        model = _whole_model(session, start)
    else:
        assert start is not None, "adapters without weights to stand beside were let through"
        model, papers = _adapted_model(session, phase, start)
    if isinstance(work, Remembers):
        work.keep_start(model)
    optimizer = build_optimizer(model, phase.optimizer, session.ranks)
    return Built(work, model, optimizer, start, papers, _lineage(session, start))


def _start(session: Session, phase: Phase, previous: Path | None) -> Path | None:
    if phase.init_from:
        return (session.run_dir / phase.init_from).resolve()
    if previous is not None:
        return previous
    return (session.run_dir / session.run.base.dir).resolve() if session.run.base else None


def _lineage(session: Session, start: Path | None) -> tuple[Stage, ...]:
    base = session.run.base
    if start is None:
        return ()
    if base and start == (session.run_dir / base.dir).resolve():
        return (Stage("base", address=base.address),)
    try:
        return tuple(codec.loads(CheckpointManifest, (start / names.MANIFEST).read_bytes()).lineage)
    except (OSError, ValueError):  # weights that others made
        return (Stage("base", address=str(start)),)


def _whole_model(session: Session, start: Path | None) -> Decoder:
    run = session.run
    if start is not None and (start / names.ADAPTER).is_file():
        return _merged_model(session, start)
    model = Decoder(run.model)
    check_count(run, model)
    model.init_weights(run.seed)
    if start is not None:
        model.load_weights(dict(_tensors(start)))
    return model.to(session.device)


def _adapted_model(session: Session, phase: Phase, start: Path) -> tuple[Decoder, dict[str, bytes]]:
    assert phase.lora is not None, "run.json names a method without its settings"
    precision = pick_precision(session.run.train.precision, session.device)
    storage = lora.storage_for(phase.method, precision)
    if (start / names.ADAPTER).is_file():
        model = _merged_model(session, start)
        base_sha256 = lora.freeze(model, storage)
    else:
        model, base_sha256 = _frozen_model(session, start, storage)
    lora.add_lora(model, phase.lora, seed=session.run.seed)
    base = session.run.base
    is_open = base is not None and start == (session.run_dir / base.dir).resolve()
    address = base.address.removeprefix("hf:").split("@")[0] if base and is_open else str(start)
    told = {
        **lora.adapter_config(phase.lora, address),
        **{"homing_base_sha256": base_sha256, "homing_base_dir": os.path.relpath(start, session.run_dir)},
    }
    return model, {names.ADAPTER_CONFIG: json.dumps(told, indent=1).encode()}


def _merged_model(session: Session, start: Path) -> Decoder:
    """The weights of a phase that trained adapters: theirs, put into those that they stood beside."""
    told = json.loads((start / names.ADAPTER_CONFIG).read_bytes())
    then = codec.loads(Run, (start / names.RUN).read_bytes())
    manifest = checkpoint.verify(start)
    phase = next(phase for phase in then.phases if phase.kind == manifest.phase)
    assert phase.lora is not None, "an adapter of a phase without settings for one"
    model, base_sha256 = _frozen_model(session, (session.run_dir / told["homing_base_dir"]).resolve(), "fp32")
    lora.check_base(str(told["homing_base_sha256"]), base_sha256)
    lora.add_lora(model, phase.lora, seed=then.seed)
    model.load_weights(checkpoint.load(start, manifest).weights)
    lora.merge(model)
    return model


def _frozen_model(session: Session, folder: Path, storage: str) -> tuple[Decoder, str]:
    with torch.device("meta"):
        model = Decoder(session.run.model)
    return model, lora.load_base(model, _tensors(folder), storage=storage, device=session.device)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Of a checkpoint of ours, vouched for by its manifest, or of a folder that others made."""
    if (folder / names.MANIFEST).is_file():
        yield from checkpoint.load_weights(folder).items()
    else:
        yield from read_tensors(find_weights(folder))
