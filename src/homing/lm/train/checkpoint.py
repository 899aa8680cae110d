"""Checkpoints: whole or absent, hashed, never pickled.

    save         write aside -> fsync -> hash what the disk gives back -> manifest last -> rename
    find_latest  newest first, the first whose every hash holds; the refused ones are told, not hidden
    load         weights, optimizer and state of a checkpoint that was verified
    retain       the best and the newest stay, whatever else goes

A killed save leaves a hidden folder that `clean_up` removes at the next start; a reader never sees it. A checkpoint
is deleted by renaming it to a hidden name first, so that a killed deletion never looks like a damaged checkpoint.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from homing.errors import IntegrityError, RunFailed
from homing.lm.open_weights.save import save_tensors
from homing.lm.shards.read import file_sha256
from homing.lm.train.schedule import Landing
from homing.units import format_bytes
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest, FileHash, Pointer
from homing.wire.codec import record

__all__ = [
    "Found",
    "LoadedCheckpoint",
    "Refused",
    "TrainState",
    "clean_up",
    "find_latest",
    "list_steps",
    "load",
    "load_weights",
    "mend_pointers",
    "restore_rng",
    "retain",
    "rng_state",
    "save",
    "verify",
]

_ASIDE = ".aside-"  # being written
_GONE = ".gone-"  # being deleted
_SPARE_BYTES = 4 * 2**20  # what a save needs on disk beside its tensors: tokenizer, JSON, folders


@record("train-state", 1)
@dataclass(frozen=True)
class TrainState:
    """state.json: with weights and optimizer, all that going on needs."""

    phase: str
    step: int  # optimizer steps done, skipped ones included
    num_tokens: int
    rows_consumed: int  # the whole state of the data
    num_skipped: int = 0
    num_bad_in_a_row: int = 0
    rng: dict[str, str] = field(default_factory=dict)  # device -> state of its generator, in hex
    choices: dict[str, Any] = field(default_factory=dict)
    landing: Landing | None = None  # an end before the planned one, once its decay has begun
    warm_from: int = 0  # the step from which the rate warms up: later than 0 where a landed run went on


@dataclass(frozen=True)
class LoadedCheckpoint:
    manifest: CheckpointManifest
    state: TrainState
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Refused:
    folder: Path
    why: str


@dataclass(frozen=True)
class Found:
    folder: Path | None
    manifest: CheckpointManifest | None
    refused: list[Refused]


def save(
    phase_dir: Path,
    manifest: CheckpointManifest,
    state: TrainState,
    *,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    papers: Mapping[str, bytes],
    weights_name: str = names.WEIGHTS,
) -> Path:
    """One checkpoint, or RunFailed and nothing changed. `papers` are the small files: run, tokenizer, config."""
    folder = phase_dir / names.step_dir(state.step)
    aside = phase_dir / f"{_ASIDE}{folder.name}"
    try:
        phase_dir.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        _need_space(phase_dir, [*weights.values(), *optimizer.values()])
        aside.mkdir()
        save_tensors(_for_disk(weights), aside / weights_name, metadata={"format": "pt"})
        save_tensors(_for_disk(optimizer), aside / names.OPTIMIZER)
        (aside / names.STATE).write_text(codec.dumps(state, indent=1), encoding="utf-8")
        for name, data in papers.items():
            (aside / name).write_bytes(data)
        files = [_sync_and_hash(path) for path in sorted(aside.iterdir())]
        _write_durably(aside / names.MANIFEST, _seal(dataclasses.replace(manifest, files=files)))
        _sync_folder(aside)
        _put_in_place(aside, folder)
    except OSError as exc:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunFailed(
            what=f"The checkpoint of step {state.step:,} could not be written to {phase_dir}.",
            why=exc.strerror or str(exc),
            fix="Free disk space there, or keep fewer of them: checkpoint.keep_last.",
        ) from exc
    return folder


def verify(folder: Path) -> CheckpointManifest:
    """The manifest, once every file has the size and the sha256 that it says, itself included."""
    problems: list[str] = []
    manifest = _read_sealed(folder, problems)
    for file in manifest.files if manifest else []:
        path = folder / file.name
        if not path.is_file():
            problems.append(f"{file.name} is missing")
        elif path.stat().st_size != file.num_bytes:
            problems.append(f"{file.name} has {path.stat().st_size:,} bytes, its manifest says {file.num_bytes:,}")
        elif file_sha256(path) != file.sha256:
            problems.append(f"the sha256 of {file.name} is not its manifest's")
    if manifest is None or problems:
        raise IntegrityError(
            what=f"The checkpoint {folder} is damaged.",
            why="\n".join(problems),
            fix="Use the one before it, or fetch it again: homing fetch RUN",
        )
    return manifest


def find_latest(phase_dir: Path) -> Found:
    refused = []
    for step in sorted(list_steps(phase_dir), reverse=True):
        folder = phase_dir / names.step_dir(step)
        try:
            manifest = verify(folder)
        except IntegrityError as error:
            refused.append(Refused(folder, error.why))
        else:
            return Found(folder, manifest, refused)
    return Found(None, None, refused)


def load(folder: Path, manifest: CheckpointManifest) -> LoadedCheckpoint:
    """Of a folder that `verify` let pass: safetensors and JSON only, so that nothing in it can run."""
    return LoadedCheckpoint(
        manifest=manifest,
        state=codec.loads(TrainState, (folder / names.STATE).read_bytes()),
        weights=load_file(folder / (names.ADAPTER if (folder / names.ADAPTER).is_file() else names.WEIGHTS)),
        optimizer=load_file(folder / names.OPTIMIZER),
    )


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of any folder that holds model.safetensors, to start from. A manifest beside it must vouch for the file; weights
    that others made have none, and models/NAME has one that leaves the optimizer out."""
    path, problems = folder / names.WEIGHTS, list[str]()
    if (folder / names.MANIFEST).exists():
        manifest = _read_sealed(folder, problems)
        listed = {file.name: file.sha256 for file in manifest.files} if manifest else {}
        if manifest and (not path.is_file() or file_sha256(path) != listed.get(names.WEIGHTS)):
            problems.append(f"{names.WEIGHTS} is missing, or its sha256 is not its manifest's")
    try:
        if not problems:
            return load_file(path)
    except (OSError, SafetensorError) as exc:
        problems.append(f"{names.WEIGHTS} cannot be read: {exc}")
    raise IntegrityError(
        what=f"The weights in {folder} cannot be used to start from.",
        why="\n".join(problems),
        fix="Name a whole checkpoint in init_from, or fetch it again: homing fetch RUN",
    )


def list_steps(phase_dir: Path) -> list[int]:
    found = (names.parse_step(path.name) for path in phase_dir.glob("step-*") if path.is_dir())
    return sorted(step for step in found if step is not None)


def mend_pointers(phase_dir: Path, latest: CheckpointManifest, *, damaged: list[Refused] | None = None) -> None:
    """latest.json and best.json, made again from the manifests: a kill between rename and pointer loses nothing."""
    is_damaged = {entry.folder.name for entry in damaged or []}
    _point(phase_dir / names.LATEST, Pointer(step=latest.step, val_loss=latest.val_loss))
    best: CheckpointManifest | None = None
    for step in reversed(list_steps(phase_dir)):
        folder = phase_dir / names.step_dir(step)
        manifest = None if folder.name in is_damaged else _read_sealed(folder, [])
        if manifest is None or manifest.val_loss is None:
            continue
        # The newest says by which exam they are judged. `<`: of two equally good ones the later, which has seen more.
        is_better = best is not None and manifest.val_loss < (best.val_loss or 0.0)
        if best is None or (is_better and manifest.val_exam == best.val_exam):
            best = manifest
    if best is not None:
        _point(phase_dir / names.BEST, Pointer(step=best.step, val_loss=best.val_loss))
    else:
        (phase_dir / names.BEST).unlink(missing_ok=True)


def retain(phase_dir: Path, *, keep_last: int, damaged: list[Refused] | None = None) -> list[int]:
    """Deletes all but the best and the newest `keep_last` (at least one); returns the steps that went.

    Called right after a save and its pointers, so what latest.json names was just read back and hashed: a verified one
    always stays. Those known to be damaged never count among the kept ones, and go.
    """
    latest, best = _read_pointer(phase_dir / names.LATEST), _read_pointer(phase_dir / names.BEST)
    pointed = {pointer.step for pointer in (latest, best) if pointer}
    broken = {names.parse_step(entry.folder.name) for entry in damaged or []} - pointed
    whole = [step for step in list_steps(phase_dir) if step not in broken]
    kept = {*whole[-max(1, keep_last) :], *pointed}
    going = [step for step in list_steps(phase_dir) if step not in kept] if whole else []
    for step in going:
        _delete(phase_dir / names.step_dir(step))
    return going


def clean_up(phase_dir: Path) -> list[str]:
    """Removes what a killed save or deletion left behind; called before anyone writes there."""
    stale = [path for prefix in (_ASIDE, _GONE) for path in phase_dir.glob(f"{prefix}*")]
    for path in stale:
        shutil.rmtree(path)
    return sorted(path.name for path in stale)


def rng_state(device: torch.device) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: bytes(state.tolist()).hex() for name, state in states.items()}


def restore_rng(states: dict[str, str], device: torch.device) -> None:
    def tensor(name: str) -> torch.Tensor:
        return torch.tensor(list(bytes.fromhex(states[name])), dtype=torch.uint8)

    torch.set_rng_state(tensor("cpu"))
    if device.type == "cuda" and "cuda" in states:  # a checkpoint from another kind of device has none
        torch.cuda.set_rng_state(tensor("cuda"), device)


def _for_disk(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _alone(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """safetensors refuses views that share storage, such as one matrix's slice of Muon's batch. So it gets the same
    memory under a storage of its own: a copy of state that lives in the host's memory would need as much again."""
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    if not is_view or not tensor.numel():
        return tensor.clone() if is_view else tensor
    return torch.frombuffer(tensor.view(-1).view(torch.uint8).numpy(), dtype=tensor.dtype).view(tensor.shape)


def _need_space(phase_dir: Path, tensors: list[torch.Tensor]) -> None:
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors) + _SPARE_BYTES
    free = shutil.disk_usage(phase_dir).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"It needs {format_bytes(needed)} and {format_bytes(free)} are free.")


def _sync_and_hash(path: Path) -> FileHash:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileHash(name=path.name, num_bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


def _seal(manifest: CheckpointManifest) -> bytes:
    """The manifest with its own hash in it: of the same bytes with that one value empty."""
    empty = codec.dumps(dataclasses.replace(manifest, sha256=""), indent=1).encode()
    return codec.dumps(dataclasses.replace(manifest, sha256=hashlib.sha256(empty).hexdigest()), indent=1).encode()


def _read_sealed(folder: Path, problems: list[str]) -> CheckpointManifest | None:
    try:
        data = (folder / names.MANIFEST).read_bytes()
        manifest = codec.loads(CheckpointManifest, data)
    except FileNotFoundError:
        problems.append(f"{names.MANIFEST} is missing")
        return None
    except (OSError, ValueError) as exc:
        problems.append(f"{names.MANIFEST} cannot be read: {exc}")
        return None
    if hashlib.sha256(data.replace(manifest.sha256.encode(), b"", 1)).hexdigest() != manifest.sha256:
        problems.append(f"the sha256 of {names.MANIFEST} is not the one written in it")
        return None
    return manifest


def _put_in_place(aside: Path, folder: Path) -> None:
    if folder.exists():  # the same step again, after falling back behind a damaged one
        _delete(folder)
    os.rename(aside, folder)
    _sync_folder(folder.parent)


def _delete(folder: Path) -> None:
    gone = folder.with_name(f"{_GONE}{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone)


def _point(path: Path, pointer: Pointer) -> None:
    aside = path.with_name(f".{path.name}.aside")
    _write_durably(aside, codec.dumps(pointer).encode())
    os.replace(aside, path)


def _read_pointer(path: Path) -> Pointer | None:
    try:
        return codec.loads(Pointer, path.read_bytes())
    except (OSError, ValueError):  # absent, or damaged: `mend_pointers` makes it again
        return None


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
