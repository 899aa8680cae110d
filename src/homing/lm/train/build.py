"""What a phase trains with: its data opened, the model with the weights it starts from, and the optimizer.

weights of:   init_from, else the phase before, else the open weights of the run, else fresh ones
full          all of them learn, in fp32
lora, qlora   they stand still, in 16 or 4 bits, and the adapters beside them learn; after a phase that trained the same
              kind of adapters these go on, beside the weights they stood beside; after other ones the two are put
              together first
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
from homing.lm.device import describe_device, pick_precision
from homing.lm.generate.adapted import told_of_base
from homing.lm.generate.load import read_card, verify_files
from homing.lm.model import Decoder, lora
from homing.lm.open_weights import find_weights, read_tensors
from homing.lm.phases import PhaseWork, Remembers, open_phase
from homing.lm.train import checkpoint
from homing.lm.train.choices import what_else
from homing.lm.train.control import Hopeless
from homing.lm.train.host import free_bytes
from homing.lm.train.offload import HostPlace, Place
from homing.lm.train.optim import Optimizer, build_optimizer, state_bytes
from homing.lm.train.run_dir import check_count
from homing.lm.train.session import Session
from homing.same_tokenizer import gives_same_ids
from homing.units import format_bytes
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest, Stage, told_checkpoint
from homing.wire.run import Lora, Phase, Run

__all__ = ["Built", "Loading", "build", "load_model", "start_of", "told_start"]

OFFLOADS_FROM = ("cuda",)  # kinds of device whose memory is another than the host's
_HOST_SHARE = 0.9  # of what the host has free, at most: pinned memory is nobody else's


class Loading(Protocol):
    """What loading weights needs to know; a `Session` has it, and whoever only looks."""

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
    start = start_of(session, phase, previous)
    torch.manual_seed(run.seed)
    model, papers = load_model(session, phase, start)
    if isinstance(work, Remembers):
        work.keep_start(model)
    try:
        optimizer = build_optimizer(model, phase.optimizer, session.ranks, _place(session, phase, model))
    except torch.OutOfMemoryError as exc:
        raise Hopeless(
            what="Out of memory: the optimizer's state does not fit the card beside the weights.",
            why=str(exc).splitlines()[0],
            fix=what_else(phase, "take a smaller model"),
        ) from exc
    return Built(work, model, optimizer, start, papers, _lineage(session, start))


def _place(session: Session, phase: Phase, model: Decoder) -> Place:
    """Where the optimizer's state will live. An option that would have no effect, or no room, is refused."""
    if phase.offload == "none":
        return Place(model.device)
    number = session.run.phases.index(phase)
    if session.device.type not in OFFLOADS_FROM:
        raise UsageError(
            what=f"phases.{number}.offload is for CUDA cards, and this is {describe_device(session.device)}.",
            why="The optimizer's state is in the host's memory already.",
            fix=f"Set phases.{number}.offload: none, as in --set phases.{number}.offload=none",
        )
    ranks = session.ranks
    # As the first rank saw it, which nobody has taken anything of yet.
    needed, free = ranks.count * state_bytes(model, phase.optimizer), ranks.agree(free_bytes())
    if free is not None and needed > _HOST_SHARE * free:
        raise Hopeless(
            what=f"The optimizer's state does not fit the host's memory: it needs {format_bytes(needed)}, and"
            f" {format_bytes(free)} are free.",
            why=f"phases.{number}.offload keeps it there, where it cannot be swapped out; a tenth stays for the rest.",
            fix="Take a machine with more memory, use states: int8 with optimizer: adamw, or set offload: none.",
        )
    return HostPlace(session.device)


def load_model(session: Loading, phase: Phase, start: Path | None) -> tuple[Decoder, dict[str, bytes]]:
    """The model with the weights of `start`, or fresh ones, and the papers that its checkpoints need for them."""
    if start is not None:
        _check_tokenizer(session, start)
    papers = _papers_of_start(start)
    if phase.method == "full":
        return _whole_model(session, phase, start), papers
    assert start is not None, "adapters without weights to stand beside were let through"
    model, told = _adapted_model(session, phase, start, _lineage(session, start))
    return model, papers | told


def _check_tokenizer(session: Loading, start: Path) -> None:
    """Looked at before at home; this is the last place that can tell. Weights of others may come without the file."""
    theirs, ours = start / names.TOKENIZER, session.data_dir / names.TOKENIZER
    if theirs.is_file() and ours.is_file() and not gives_same_ids(theirs, ours):
        again = f"homing prep {session.run.name} --tokenizer FILE   or train the earlier phase again"
        raise DataError(
            what=f"The weights of {start} were trained with another tokenizer than the data.",
            why=f"{theirs} gives other ids than {ours}; in those the same text is noise to the weights.",
            fix=f"Prepare the data with theirs: {f'homing prep {session.run.name}' if session.run.base else again}",
        )


def start_of(session: Loading, phase: Phase, previous: Path | None) -> Path | None:
    """The folder of the weights that a phase begins with; None: fresh ones."""
    if phase.init_from:
        return (session.run_dir / phase.init_from).resolve()
    if previous is not None:
        return previous
    return (session.run_dir / session.run.base.dir).resolve() if session.run.base else None


def told_start(session: Loading, start: Path) -> str:
    """In a person's words: where the folder lies at home, not where it was sent to, and what trained it."""
    base, run_dir = session.run.base, session.run_dir.resolve()
    if base and start == (session.run_dir / base.dir).resolve():
        return base.address
    sent = next((item.source for item in session.run.inputs if item.path.startswith(f"{start.name}/")), "")
    folder = Path(sent).parent if sent else start
    is_fetched = folder.parent.name == "models"
    shown = Path(*folder.parts[-2:]) if is_fetched else folder
    shown = folder.relative_to(run_dir) if folder.is_relative_to(run_dir) else shown
    try:
        manifest = codec.loads(CheckpointManifest, (start / names.MANIFEST).read_bytes())
    except (OSError, ValueError):  # weights that others made
        return str(shown)
    return f"{shown}, {told_checkpoint(manifest)}"


def _papers_of_start(start: Path | None) -> dict[str, bytes]:
    """How whoever made the weights samples from them goes with the weights, from phase to phase."""
    path = None if start is None else start / names.GENERATION
    return {path.name: path.read_bytes()} if path is not None and path.is_file() else {}


def _lineage(session: Loading, start: Path | None) -> tuple[Stage, ...]:
    base = session.run.base
    if start is None:
        return ()
    if base and start == (session.run_dir / base.dir).resolve():
        return (Stage("base", address=base.address),)
    try:
        return tuple(codec.loads(CheckpointManifest, (start / names.MANIFEST).read_bytes()).lineage)
    except (OSError, ValueError):  # weights that others made
        return (Stage("base", address=str(start)),)


def _whole_model(session: Loading, phase: Phase, start: Path | None) -> Decoder:
    run = session.run
    if start is not None and (start / names.ADAPTER).is_file():
        return _merged_model(session, start, phase.init_base, session.device)[0]
    model = Decoder(run.model)
    check_count(run, model)
    model.init_weights(run.seed, phase.optimizer.kind)
    if start is not None:
        model.load_weights(dict(_tensors(start)))
    return model.to(session.device)


def _adapted_model(
    session: Loading, phase: Phase, start: Path, lineage: tuple[Stage, ...]
) -> tuple[Decoder, dict[str, bytes]]:
    assert phase.lora is not None, "run.json names a method without its settings"
    precision = pick_precision(session.run.train.precision, session.device)
    storage = lora.storage_for(phase.method, precision)
    before = _adapter_of(session, start, phase.init_base) if (start / names.ADAPTER).is_file() else None
    goes_on = before is not None and lora.is_same(before.settings, phase.lora)
    # Gone on with, they stand beside what they learned beside. Put into it they would be rounded with it, in four bits
    # mostly away; and one adapter beside open weights is what others can use.
    folder = before.base if before and goes_on else start
    model, base_sha256 = _frozen_model(session, folder, storage, base_dir="" if goes_on else phase.init_base)
    if before and goes_on:
        lora.check_base(before.base_sha256, base_sha256)
    lora.add_lora(model, phase.lora, seed=session.run.seed)
    if before and goes_on:
        model.load_weights(before.tensors)
    base = session.run.base
    is_open = base is not None and folder == (session.run_dir / base.dir).resolve()
    address = base.address.removeprefix("hf:").split("@")[0] if base and is_open else str(folder)
    told = {
        **lora.adapter_config(phase.lora, address),
        **{"homing_base_sha256": base_sha256, "homing_base_dir": os.path.relpath(folder, session.run_dir)},
        # Which stage of the lineage the base is; more than one later where adapters went on.
        "homing_base_stage": before.base_stage if before and goes_on else len(lineage) - 1,
    }
    return model, {names.ADAPTER_CONFIG: json.dumps(told, indent=1).encode()}


@dataclass(frozen=True)
class _Adapter:
    """Of a checkpoint, with where the weights lie that it stood beside."""

    settings: Lora
    seed: int
    tensors: dict[str, Tensor]
    base: Path
    base_sha256: str
    base_stage: int


def _adapter_of(session: Loading, start: Path, base_dir: str = "") -> _Adapter:
    """`base_dir`: where its base lies, of an adapter that another run trained; one of this run tells it itself."""
    card = read_card(start)
    verify_files(start, card)  # not the optimizer's: an adapter that was sent or fetched comes without
    base_sha256, told_dir = told_of_base(start)
    assert card.run is not None, "an adapter's checkpoint has its run"
    assert card.adapter_phase is not None, "asked of whole weights"
    assert card.adapter_phase.lora is not None, "an adapter of a phase without settings for one"
    base = (session.run_dir / (base_dir or told_dir)).resolve()
    told = json.loads((start / names.ADAPTER_CONFIG).read_bytes())
    stage = int(told.get("homing_base_stage", len(_lineage(session, start)) - 2))
    tensors = load_file(start / names.ADAPTER)
    return _Adapter(card.adapter_phase.lora, card.run.seed, tensors, base, base_sha256, stage)


def _merged_model(session: Loading, start: Path, base_dir: str, device: torch.device) -> tuple[Decoder, str]:
    """The weights of a phase that trained adapters: theirs, put into those that they stood beside; and their hash."""
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
    """`base_dir`: of `folder`, where that holds an adapter. Then the two are put together in the host's memory: on the
    card there may be room for them in 16 or 4 bits only."""
    device = device or session.device
    if (folder / names.ADAPTER).is_file():
        model, sha256 = _merged_model(session, folder, base_dir, torch.device("cpu"))
        lora.freeze(model, storage, device)
        return model, sha256
    with torch.device("meta"):
        model = Decoder(session.run.model)
    return model, lora.load_base(model, _tensors(folder), storage=storage, device=device)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Of a checkpoint of ours, vouched for by its manifest, or of a folder that others made."""
    if (folder / names.MANIFEST).is_file():
        yield from checkpoint.load_weights(folder).items()
    else:
        yield from read_tensors(find_weights(folder))
