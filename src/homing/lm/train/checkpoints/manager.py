"""Manages the checkpoints of one phase: finds the one to resume from, and saves new ones.

A save copies the state and writes it while training continues; training waits only for the last save of a run. If a
save fails, a warning is printed and training continues, unless the run cannot end without that checkpoint.

Tensors are copied to host memory, so that they can be written to disk while training continues:

    tensors on the device -> host buffers (pinned for CUDA, reused for the next save) -> the writing thread

Training waits only for the copy: a GPU copies gigabytes in a tenth of a second; writing and hashing take many seconds.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

import homing
from homing.errors import RunFailed
from homing.lm.device import free_host_bytes
from homing.lm.evals.bits_per_byte import Evaluation
from homing.lm.model import lora
from homing.lm.phases import Remembers
from homing.lm.train.build_phase import Built
from homing.lm.train.checkpoints import checkpoint_files
from homing.lm.train.checkpoints.checkpoint_files import Refused, TrainState
from homing.lm.train.checkpoints.compatibility import check_same, config_sha256
from homing.lm.train.checkpoints.shared_files import SharedFile
from homing.lm.train.metrics import Notify, finite
from homing.lm.train.open_session import Session
from homing.units import format_duration
from homing.wire import file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, Stage
from homing.wire.run_json import Phase

__all__ = ["CheckpointManager", "Snapshot"]


class Saving:
    """A checkpoint that is being written in a separate thread. The trainer waits for this thread before it exits."""

    def __init__(self, step: int, write: Callable[[], Path], begun: float, *, is_final: bool, is_needed: bool) -> None:
        self.step, self.is_final, self.is_needed = step, is_final, is_needed
        self.folder: Path | None = None
        self.error: BaseException | None = None
        self.took_s = 0.0
        self.held_s = 0.0  # how long training waited for this save
        self._write, self._begun = write, begun
        self._thread = threading.Thread(target=self._run, name="save")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.folder = self._write()
        except BaseException as error:  # `CheckpointManager.wait` handles the error in the main thread
            self.error = error
        self.took_s = time.monotonic() - self._begun

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()


class CheckpointManager:
    def __init__(self, session: Session, phase: Phase, notify: Notify) -> None:
        self.s, self.phase, self.notify = session, phase, notify
        self.dir = session.run_dir / file_names.CHECKPOINTS / phase.kind
        self.saved_step = -1  # step of the newest checkpoint, whose save may still be in progress
        self.saved_at = time.monotonic()
        self.took_s: float | None = None  # how long the last save took to reach the disk; read and reset by `loop`
        self._damaged: list[Refused] = []
        self._snapshot = Snapshot()
        self._saving: Saving | None = None

    def folder(self, step: int) -> Path:
        return self.dir / file_names.step_dir(step)

    def find(self) -> CheckpointManifest | None:
        """Return the manifest of the newest valid checkpoint, or None if there is none.

        Damaged checkpoints are reported and left in place. Raises UsageError if the configuration has changed.
        """
        return self.s.ranks.agree(self._find() if self.s.ranks.is_first else None)

    def _find(self) -> CheckpointManifest | None:
        stale = checkpoint_files.clean_up(self.dir)
        if stale:
            self.notify("cleaned_up", f"Removed folders left by an interrupted save or deletion: {', '.join(stale)}.")
        found = checkpoint_files.find_latest(self.dir)
        self._damaged = found.refused
        for refused in found.refused:
            problem = "; ".join(refused.why.splitlines())
            instead = found.folder.name if found.folder else "the beginning"
            text = f"Checkpoint {refused.folder.name} is damaged ({problem}); resuming from {instead}."
            self.notify("checkpoint_refused", text, notice=True, folder=refused.folder.name)
        if found.folder and found.manifest:
            check_same(found.folder, found.manifest.config_sha256, self.s.run, self.phase)
        return found.manifest

    def repair(self, manifest: CheckpointManifest) -> None:
        """Rewrite latest.json and best.json, in case a trainer was killed after a save and before updating them."""
        if self.s.ranks.is_first:
            checkpoint_files.repair_pointers(self.dir, manifest, damaged=self._damaged)

    def load(self, manifest: CheckpointManifest, built: Built) -> TrainState:
        folder = self.folder(manifest.step)
        loaded = checkpoint_files.load(folder, manifest)
        if built.model.lora is not None:
            saved, now = (
                json.loads((folder / file_names.ADAPTER_CONFIG).read_bytes()),
                json.loads(built.metadata_files[file_names.ADAPTER_CONFIG]),
            )
            lora.check_base(str(saved.get("homing_base_sha256", "")), str(now["homing_base_sha256"]))
        built.model.load_weights(loaded.weights)
        built.optimizer.load_state_tensors(loaded.optimizer)
        checkpoint_files.restore_rng(loaded.state.rng, self.s.device)
        if isinstance(built.work, Remembers):
            built.work.load_metadata_files(folder)
        self.repair(manifest)
        self.saved_step = manifest.step
        return loaded.state

    def save(
        self, state: TrainState, built: Built, evaluation: Evaluation | None, *, is_final: bool, is_needed: bool
    ) -> None:
        """Save a checkpoint, after any earlier save has finished.

        Training waits for the save only if `is_needed` is set or host memory has no room for a copy of the tensors.
        """
        self.wait()
        begun = self.saved_at = time.monotonic()
        self.saved_step = state.step
        state = dataclasses.replace(state, rng=checkpoint_files.rng_state(self.s.device))
        manifest = self._manifest(state, built, evaluation, is_final=is_final)
        if built.model.shards is not None:
            self._save_shared(state, manifest, built, begun, is_final=is_final, is_needed=is_needed)
            return
        weights, optimizer = built.model.weights_for_disk(), built.optimizer.state_tensors()
        metadata_files = self.s.metadata_files | built.metadata_files | _metadata_of(built)
        self.s.journal.sync()
        # If host memory has no room for a copy of the tensors, training must wait until they are on disk.
        is_held = is_needed or not self._snapshot.has_room(weights=weights, optimizer=optimizer)
        if not is_held:
            taken = self._snapshot.take(weights=weights, optimizer=optimizer)
            weights, optimizer = taken["weights"], taken["optimizer"]

        def write() -> Path:
            folder = checkpoint_files.save(
                self.dir, manifest, state, weights=weights, optimizer=optimizer, metadata_files=metadata_files,
                weights_name=built.weights_name,
            )  # fmt: skip
            self._settle_folder(folder, manifest)
            return folder

        self._start_saving(state.step, write, begun, is_held=is_held, is_final=is_final, is_needed=is_needed)

    def _save_shared(
        self, state: TrainState, manifest: CheckpointManifest, built: Built, begun: float, *, is_final: bool,
        is_needed: bool,
    ) -> None:  # fmt: skip
        """Save a checkpoint of a model that is divided among ranks. All ranks must call this at the same step."""
        ranks, weights, optimizer = self.s.ranks, built.model.weight_parts(), built.optimizer.state_parts()
        files = [SharedFile.of(built.weights_name, weights, {"format": "pt"}),
                 SharedFile.of(file_names.OPTIMIZER, optimizer)]  # fmt: skip
        problem = ""
        if ranks.is_first:
            self.s.journal.sync()
            try:
                checkpoint_files.begin(self.dir, state.step, sum(file.num_bytes for file in files), files)
            except OSError as error:
                problem = error.strerror or str(error)
        problem = ranks.agree(problem)  # without the files, no rank has anywhere to write
        tensors = {group: {name: part.tensor for name, part in parts.items()}
                   for group, parts in (("weights", weights), ("optimizer", optimizer))}  # fmt: skip
        is_held = is_needed or not self._snapshot.has_room(**tensors)
        if not is_held:
            tensors = self._snapshot.take(**tensors)

        def write_rows(temporary: Path) -> None:
            for file, parts, mine in zip(files, (weights, optimizer), tensors.values(), strict=True):
                file.write(temporary, parts, mine)

        def write() -> Path:
            if problem:
                raise checkpoint_files.unwritten(self.dir, state.step, problem)
            folder = checkpoint_files.save_shared(
                self.dir, manifest, state, write_rows, rank=ranks.rank, num_ranks=ranks.count,
                metadata_files=self.s.metadata_files | built.metadata_files,
            )  # fmt: skip
            if ranks.is_first:
                self._settle_folder(folder, manifest)
            return folder

        self._start_saving(state.step, write, begun, is_held=is_held, is_final=is_final, is_needed=is_needed)

    def _settle_folder(self, folder: Path, manifest: CheckpointManifest) -> None:
        self._damaged = [entry for entry in self._damaged if entry.folder != folder]  # it was just rewritten
        checkpoint_files.repair_pointers(self.dir, manifest, damaged=self._damaged)
        checkpoint_files.retain(self.dir, keep_last=self.phase.keep_last, damaged=self._damaged)

    def _start_saving(
        self, step: int, write: Callable[[], Path], begun: float, *, is_held: bool, is_final: bool, is_needed: bool
    ) -> None:
        self._saving = Saving(step, write, begun, is_final=is_final, is_needed=is_needed)
        if is_held:
            self._saving.join()
        self._saving.held_s = time.monotonic() - begun
        if is_held:
            self.wait()

    @property
    def is_saving(self) -> bool:
        return self._saving is not None

    def settle(self) -> None:
        """Report the current save if it has finished. Do not wait for it."""
        if self._saving is not None and self._saving.is_over:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress.

        If the save failed, report the failure, and also raise an error if the run cannot end without this checkpoint.
        """
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        with self.s.journal.still("saving", "saving", phase=self.phase.kind):
            saving.join()
        if saving.folder is None:
            # Print no notice if the run cannot end without this checkpoint, because the error raised below reports it.
            self.notify("save_failed", f"warning: {saving.error}", notice=not saving.is_needed, step=saving.step)
            if not isinstance(saving.error, RunFailed | OSError):
                raise saving.error or AssertionError("a save failed without recording an error")
            if saving.is_needed:
                raise self._cannot_end(saving.step, saving.error) from saving.error
            return
        self._damaged = []
        self.took_s = saving.took_s
        text = f"Saved {saving.folder.relative_to(self.s.run_dir)} in {format_duration(saving.took_s)}."
        data = {"folder": saving.folder.name, "is_final": saving.is_final, "seconds": round(saving.took_s, 3),
                "held_s": round(saving.held_s, 3)}  # fmt: skip
        self.notify("checkpoint_saved", text, notice=True, step=saving.step, **data)
        gc.collect()  # collect garbage now, because the garbage collector is disabled between saves

    def _cannot_end(self, step: int, error: RunFailed | OSError) -> RunFailed:
        last = max(checkpoint_files.list_steps(self.dir), default=None)
        after = f"resumes from step {last:,}" if last is not None else "starts over, since there is no other checkpoint"
        return RunFailed(
            what=f"The run cannot finish: its checkpoint for step {step:,} could not be written to {self.dir}.",
            why=error.why if isinstance(error, RunFailed) else str(error),
            fix=f"Free disk space there, or lower checkpoint.keep_last to keep fewer checkpoints. "
            f"Then run the same command again: it {after}.",
        )

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for a save in progress to finish, even after an error."""
        if kind is None:
            self.wait()
        elif self._saving is not None:
            self._saving.join()

    def _manifest(
        self, state: TrainState, built: Built, evaluation: Evaluation | None, *, is_final: bool
    ) -> CheckpointManifest:
        run, phase = self.s.run, self.phase
        stage = Stage(
            phase=phase.kind,
            method=phase.method,
            run_id=run.id,
            step=state.step,
            num_tokens=state.num_tokens,
            val_loss=finite(evaluation.loss) if evaluation else None,
            data_sha256=phase.data.manifest_sha256 if phase.data else run.data.manifest_sha256,
            config_sha256=config_sha256(run, phase),
        )
        return CheckpointManifest(
            run_name=self.s.run.name,
            run_id=self.s.run.id,
            phase=self.phase.kind,
            step=state.step,
            num_tokens=state.num_tokens,
            is_final=is_final,
            config_sha256=config_sha256(self.s.run, self.phase),
            seed=self.s.run.seed,
            files=[],
            val_loss=finite(evaluation.loss) if evaluation else None,
            val_bits_per_byte=finite(evaluation.bits_per_byte) if evaluation else None,
            val_exam=evaluation.exam if evaluation else "",
            code_version=homing.__version__,
            made_at=time.time(),
            choices=state.choices,
            lineage=[*built.lineage, stage],
        )


def _metadata_of(built: Built) -> dict[str, bytes]:
    return built.work.metadata_files() if isinstance(built.work, Remembers) else {}


_SPARE = 1.25  # free host memory must exceed the size of a copy by this factor, to leave room for other allocations


class Snapshot:
    """Copies of tensors in host memory. Only one set exists at a time: `take` overwrites the previous one."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def has_room(self, **groups: Mapping[str, Tensor]) -> bool:
        """Return whether a copy fits in host memory if the buffers of the previous copy are reused.

        The result is True if the amount of free memory is unknown.
        """
        missing = [t for group, tensors in groups.items() for name, t in tensors.items()
                   if self._buffer(f"{group}/{name}", t) is None]  # fmt: skip
        free = free_host_bytes()
        return free is None or free > _SPARE * sum(map(_host_bytes, missing))

    def take(self, **groups: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return group -> name -> copy in host memory. Each copy has its own storage, as safetensors requires."""
        taken = {group: {name: self._copy(f"{group}/{name}", t) for name, t in tensors.items()}
                 for group, tensors in groups.items()}  # fmt: skip
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies are asynchronous
        return taken

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffer(name, tensor)
        if buffer is None:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor | None:
        buffer = self._buffers.get(name)
        is_fit = buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype
        return buffer if is_fit else None


def _host_bytes(tensor: Tensor) -> int:
    """Return the size of the tensor's copy in host memory; torch rounds pinned allocations up to a power of two."""
    size = tensor.numel() * tensor.element_size()
    return 1 << (size - 1).bit_length() if size and tensor.is_cuda else size
