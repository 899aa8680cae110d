"""Reads and writes checkpoints. A checkpoint is either complete or absent; its files are hashed and never pickled.

    save         write to a hidden folder -> fsync -> hash what the disk returns -> manifest last -> rename
    find_latest  find the newest undamaged checkpoint; damaged ones are returned too, so that they can be reported
    load         read weights, optimizer and state of a verified checkpoint
    retain       delete old checkpoints, but never the best or the newest

A killed save leaves a hidden folder, which `clean_up` removes at the next start; readers never see it. A checkpoint is
renamed to a hidden name before it is deleted, so that a killed deletion never looks like a damaged checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from homing.errors import IntegrityError, RunFailed
from homing.lm.data.shards.read_shards import file_sha256
from homing.lm.model.open_weights.load_and_save import save_tensors
from homing.lm.train.checkpoints.shared_files import SharedFile, leave_marker, wait_for_markers
from homing.lm.train.optim.schedule import Landing
from homing.units import format_bytes
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash, Pointer
from homing.wire.codec import record

__all__ = [
    "Found",
    "LoadedCheckpoint",
    "Refused",
    "TrainState",
    "begin",
    "clean_up",
    "find_latest",
    "list_steps",
    "load",
    "load_weights",
    "repair_pointers",
    "restore_rng",
    "retain",
    "rng_state",
    "save",
    "save_shared",
    "unwritten",
    "verify",
]

_TEMPORARY = ".partial-"  # being written
_GONE = ".gone-"  # being deleted
_SPARE_BYTES = 4 * 2**20  # disk space that a save needs for everything but tensors: tokenizer, JSON files, folders


@record("train-state", 1)
@dataclass(frozen=True)
class TrainState:
    """The contents of state.json. With the weights and the optimizer state, this is all that resuming needs."""

    phase: str
    step: int  # number of optimizer steps taken, including skipped ones
    num_tokens: int
    rows_consumed: int  # number of rows of training data consumed; the data loader has no other state
    num_skipped: int = 0
    num_bad_in_a_row: int = 0
    rng: dict[str, str] = field(default_factory=dict)  # device type -> state of its random generator, in hex
    choices: dict[str, Any] = field(default_factory=dict)
    landing: Landing | None = None  # the shortened schedule, if its decay has begun
    warm_from: int = 0  # the step at which the warmup starts; above 0 if training continued after a cancelled landing


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
    metadata_files: Mapping[str, bytes],
    weights_name: str = file_names.WEIGHTS,
) -> Path:
    """Write one checkpoint atomically; on failure raise RunFailed and leave the disk unchanged.

    `metadata_files` maps the names of the small files (run, tokenizer, config) to their contents.
    """
    with _writing(phase_dir, state.step) as temporary:
        begin(phase_dir, state.step, _num_bytes([*weights.values(), *optimizer.values()]))
        save_tensors(_for_disk(weights), temporary / weights_name, metadata={"format": "pt"})
        save_tensors(_for_disk(optimizer), temporary / file_names.OPTIMIZER)
        return _finish(phase_dir, manifest, state, metadata_files)


def begin(phase_dir: Path, step: int, num_bytes: int, files: Sequence[SharedFile] = ()) -> Path:
    """Make the hidden folder in which a checkpoint is written, with `files` in it; return its path."""
    temporary = _temporary(phase_dir, step)
    phase_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    _need_space(phase_dir, num_bytes)
    temporary.mkdir()
    for file in files:
        file.create(temporary)
    return temporary


def save_shared(
    phase_dir: Path,
    manifest: CheckpointManifest,
    state: TrainState,
    write: Callable[[Path], None],
    *,
    rank: int,
    num_ranks: int,
    metadata_files: Mapping[str, bytes],
) -> Path:
    """Write this rank's part of a checkpoint after `begin`; the first rank waits for the others and completes it."""
    if rank:
        temporary, problem = _temporary(phase_dir, state.step), ""
        try:
            write(temporary)
        except OSError as exc:
            problem = exc.strerror or str(exc)
        with contextlib.suppress(OSError):  # the folder is gone if the first rank has failed
            leave_marker(temporary, rank, problem)
        if problem:
            raise RunFailed(f"Rank {rank} could not write its part of step {state.step:,}.", problem)
        return phase_dir / file_names.step_dir(state.step)
    with _writing(phase_dir, state.step) as temporary:
        write(temporary)
        wait_for_markers(temporary, num_ranks)
        return _finish(phase_dir, manifest, state, metadata_files)


def _temporary(phase_dir: Path, step: int) -> Path:
    return phase_dir / f"{_TEMPORARY}{file_names.step_dir(step)}"


@contextlib.contextmanager
def _writing(phase_dir: Path, step: int) -> Iterator[Path]:
    temporary = _temporary(phase_dir, step)
    try:
        yield temporary
    except OSError as exc:
        shutil.rmtree(temporary, ignore_errors=True)
        raise unwritten(phase_dir, step, exc.strerror or str(exc)) from exc


def unwritten(phase_dir: Path, step: int, problem: str) -> RunFailed:
    return RunFailed(
        what=f"The checkpoint for step {step:,} could not be written to {phase_dir}.",
        why=problem,
        fix="Free disk space there, or lower checkpoint.keep_last to keep fewer checkpoints.",
    )


def _finish(
    phase_dir: Path, manifest: CheckpointManifest, state: TrainState, metadata_files: Mapping[str, bytes]
) -> Path:
    folder, temporary = phase_dir / file_names.step_dir(state.step), _temporary(phase_dir, state.step)
    (temporary / file_names.STATE).write_text(codec.dumps(state, indent=1), encoding="utf-8")
    for name, data in metadata_files.items():
        (temporary / name).write_bytes(data)
    files = [_sync_and_hash(path) for path in sorted(temporary.iterdir())]
    _write_durably(temporary / file_names.MANIFEST, _seal(dataclasses.replace(manifest, files=files)))
    _sync_folder(temporary)
    _put_in_place(temporary, folder)
    return folder


def verify(folder: Path) -> CheckpointManifest:
    """Return the manifest after checking the size and sha256 of every file and of the manifest itself.

    Raises IntegrityError listing every problem found.
    """
    problems: list[str] = []
    manifest = _read_sealed(folder, problems)
    for file in manifest.files if manifest else []:
        path = folder / file.name
        if not path.is_file():
            problems.append(f"{file.name} is missing")
        elif path.stat().st_size != file.num_bytes:
            problems.append(f"{file.name} has {path.stat().st_size:,} bytes, but the manifest says {file.num_bytes:,}")
        elif file_sha256(path) != file.sha256:
            problems.append(f"the sha256 of {file.name} does not match the manifest")
    if manifest is None or problems:
        raise IntegrityError(
            what=f"The checkpoint {folder} is damaged.",
            why="\n".join(problems),
            fix="Use an earlier checkpoint, or fetch it again: homing fetch RUN",
        )
    return manifest


def find_latest(phase_dir: Path) -> Found:
    refused = []
    for step in sorted(list_steps(phase_dir), reverse=True):
        folder = phase_dir / file_names.step_dir(step)
        try:
            manifest = verify(folder)
        except IntegrityError as error:
            refused.append(Refused(folder, error.why))
        else:
            return Found(folder, manifest, refused)
    return Found(None, None, refused)


def load(folder: Path, manifest: CheckpointManifest) -> LoadedCheckpoint:
    """Load a checkpoint that `verify` accepted. It consists of safetensors and JSON, so loading never executes code."""
    return LoadedCheckpoint(
        manifest=manifest,
        state=codec.loads(TrainState, (folder / file_names.STATE).read_bytes()),
        weights=load_file(
            folder / (file_names.ADAPTER if (folder / file_names.ADAPTER).is_file() else file_names.WEIGHTS)
        ),
        optimizer=load_file(folder / file_names.OPTIMIZER),
    )


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Load model.safetensors from any folder, as initial weights.

    If the folder has a manifest, the file must match the sha256 in it. Unlike `load`, this
    function also accepts folders without optimizer state: third-party weights, and fetched models in models/NAME.
    Raises IntegrityError if the weights are unreadable or do not match.
    """
    path, problems = folder / file_names.WEIGHTS, list[str]()
    if (folder / file_names.MANIFEST).exists():
        manifest = _read_sealed(folder, problems)
        listed = {file.name: file.sha256 for file in manifest.files} if manifest else {}
        if manifest and (not path.is_file() or file_sha256(path) != listed.get(file_names.WEIGHTS)):
            problems.append(f"{file_names.WEIGHTS} is missing, or its sha256 does not match the manifest")
    try:
        if not problems:
            return load_file(path)
    except (OSError, SafetensorError) as exc:
        problems.append(f"{file_names.WEIGHTS} cannot be read: {exc}")
    raise IntegrityError(
        what=f"The weights in {folder} cannot be used as a starting point.",
        why="\n".join(problems),
        fix="Set init_from to a complete checkpoint, or fetch it again: homing fetch RUN",
    )


def list_steps(phase_dir: Path) -> list[int]:
    found = (file_names.parse_step(path.name) for path in phase_dir.glob("step-*") if path.is_dir())
    return sorted(step for step in found if step is not None)


def repair_pointers(phase_dir: Path, latest: CheckpointManifest, *, damaged: list[Refused] | None = None) -> None:
    """Rewrite latest.json and best.json from the manifests.

    Both files are outdated if an earlier process was killed after renaming a checkpoint and before updating them.
    """
    is_damaged = {entry.folder.name for entry in damaged or []}
    _point(phase_dir / file_names.LATEST, Pointer(step=latest.step, val_loss=latest.val_loss))
    best: CheckpointManifest | None = None
    for step in reversed(list_steps(phase_dir)):
        folder = phase_dir / file_names.step_dir(step)
        manifest = None if folder.name in is_damaged else _read_sealed(folder, [])
        if manifest is None or manifest.val_loss is None:
            continue
        # Only checkpoints evaluated on the same validation set as the newest evaluated one are compared. `<` makes the
        # later of two equal checkpoints win, because it has seen more data.
        is_better = best is not None and manifest.val_loss < (best.val_loss or 0.0)
        if best is None or (is_better and manifest.val_exam == best.val_exam):
            best = manifest
    if best is not None:
        _point(phase_dir / file_names.BEST, Pointer(step=best.step, val_loss=best.val_loss))
    else:
        (phase_dir / file_names.BEST).unlink(missing_ok=True)


def retain(phase_dir: Path, *, keep_last: int, damaged: list[Refused] | None = None) -> list[int]:
    """Delete all checkpoints except the best and the newest `keep_last` (at least one); return the deleted steps.

    Call this right after a save and its pointer update: then the checkpoint in latest.json has just been read back and
    hashed, so a verified checkpoint always remains. Checkpoints known to be damaged do not count towards `keep_last`
    and are deleted.
    """
    latest, best = _read_pointer(phase_dir / file_names.LATEST), _read_pointer(phase_dir / file_names.BEST)
    pointed = {pointer.step for pointer in (latest, best) if pointer}
    broken = {file_names.parse_step(entry.folder.name) for entry in damaged or []} - pointed
    whole = [step for step in list_steps(phase_dir) if step not in broken]
    kept = {*whole[-max(1, keep_last) :], *pointed}
    going = [step for step in list_steps(phase_dir) if step not in kept] if whole else []
    for step in going:
        _delete(phase_dir / file_names.step_dir(step))
    return going


def clean_up(phase_dir: Path) -> list[str]:
    """Remove what a killed save or deletion has left behind. Call this before anything writes to `phase_dir`."""
    stale = [path for prefix in (_TEMPORARY, _GONE) for path in phase_dir.glob(f"{prefix}*")]
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
    if device.type == "cuda" and "cuda" in states:  # a checkpoint written without a GPU has no CUDA state
        torch.cuda.set_rng_state(tensor("cuda"), device)


def _for_disk(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _alone(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a storage that contains only its own elements.

    safetensors rejects views of a shared storage, such as one matrix of a stacked Muon batch. The result wraps the same
    memory, because copying optimizer state that is in host memory would need twice the memory.
    """
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    if not is_view or not tensor.numel():
        return tensor.clone() if is_view else tensor
    return torch.frombuffer(tensor.view(-1).view(torch.uint8).numpy(), dtype=tensor.dtype).view(tensor.shape)


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _need_space(phase_dir: Path, num_bytes: int) -> None:
    needed = num_bytes + _SPARE_BYTES
    free = shutil.disk_usage(phase_dir).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"It needs {format_bytes(needed)}, but only {format_bytes(free)} are free.")


def _sync_and_hash(path: Path) -> FileHash:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileHash(name=path.name, num_bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


def _seal(manifest: CheckpointManifest) -> bytes:
    """Serialize the manifest with its own sha256 in it, which is computed over the same bytes with that field empty."""
    empty = codec.dumps(dataclasses.replace(manifest, sha256=""), indent=1).encode()
    return codec.dumps(dataclasses.replace(manifest, sha256=hashlib.sha256(empty).hexdigest()), indent=1).encode()


def _read_sealed(folder: Path, problems: list[str]) -> CheckpointManifest | None:
    try:
        data = (folder / file_names.MANIFEST).read_bytes()
        manifest = codec.loads(CheckpointManifest, data)
    except FileNotFoundError:
        problems.append(f"{file_names.MANIFEST} is missing")
        return None
    except (OSError, ValueError) as exc:
        problems.append(f"{file_names.MANIFEST} cannot be read: {exc}")
        return None
    if hashlib.sha256(data.replace(manifest.sha256.encode(), b"", 1)).hexdigest() != manifest.sha256:
        problems.append(f"the sha256 of {file_names.MANIFEST} does not match the one recorded in it")
        return None
    return manifest


def _put_in_place(temporary: Path, folder: Path) -> None:
    if folder.exists():  # a damaged checkpoint; training resumed from an earlier one
        _delete(folder)
    os.rename(temporary, folder)
    _sync_folder(folder.parent)


def _delete(folder: Path) -> None:
    gone = folder.with_name(f"{_GONE}{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone)


def _point(path: Path, pointer: Pointer) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    _write_durably(temporary, codec.dumps(pointer).encode())
    os.replace(temporary, path)


def _read_pointer(path: Path) -> Pointer | None:
    try:
        return codec.loads(Pointer, path.read_bytes())
    except (OSError, ValueError):  # the pointer is missing or damaged; `repair_pointers` will rewrite it
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
