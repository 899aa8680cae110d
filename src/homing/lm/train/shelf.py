"""The checkpoints of one phase, as the loop sees them: which one to go on from, and the next one to be put there.

A save copies what it needs and writes it while training goes on; the last one of a run is waited for. One that fails
is said aloud and training goes on, unless it is the one that the end hangs on.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import homing
from homing.errors import RunFailed
from homing.lm.evals.bits_per_byte import Evaluation
from homing.lm.model import lora
from homing.lm.phases import Remembers
from homing.lm.train import checkpoint
from homing.lm.train.build import Built
from homing.lm.train.checkpoint import Refused, TrainState
from homing.lm.train.metrics import Tell, finite
from homing.lm.train.resume import check_same, config_sha256
from homing.lm.train.session import Session
from homing.lm.train.snapshot import Snapshot
from homing.units import format_duration
from homing.wire import names
from homing.wire.checkpoint import CheckpointManifest, Stage
from homing.wire.run import Phase

__all__ = ["Shelf"]


class Saving:
    """A checkpoint on its way to the disk, in a thread of its own. Not a daemon: a trainer that ends waits for it."""

    def __init__(self, step: int, write: Callable[[], Path], begun: float, *, is_final: bool, is_needed: bool) -> None:
        self.step, self.is_final, self.is_needed = step, is_final, is_needed
        self.folder: Path | None = None
        self.error: BaseException | None = None
        self.took_s = 0.0
        self.held_s = 0.0  # of it, what training waited
        self._write, self._begun = write, begun
        self._thread = threading.Thread(target=self._run, name="save")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.folder = self._write()
        except BaseException as error:  # carried to the thread that joins
            self.error = error
        self.took_s = time.monotonic() - self._begun

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()


class Shelf:
    def __init__(self, session: Session, phase: Phase, tell: Tell) -> None:
        self.s, self.phase, self.tell = session, phase, tell
        self.dir = session.run_dir / names.CHECKPOINTS / phase.kind
        self.saved_step = -1  # of the newest one that was begun
        self.saved_at = time.monotonic()
        self.took_s: float | None = None  # of the last save, from its beginning until it was on disk; taken by `loop`
        self._damaged: list[Refused] = []
        self._snapshot = Snapshot()
        self._saving: Saving | None = None

    def folder(self, step: int) -> Path:
        return self.dir / names.step_dir(step)

    def find(self) -> CheckpointManifest | None:
        """The newest whole one of this very configuration. What is damaged is named and left alone."""
        return self.s.ranks.agree(self._find() if self.s.ranks.is_first else None)

    def _find(self) -> CheckpointManifest | None:
        stale = checkpoint.clean_up(self.dir)
        if stale:
            self.tell("cleaned_up", f"Removed what a killed save left: {', '.join(stale)}.")
        found = checkpoint.find_latest(self.dir)
        self._damaged = found.refused
        for refused in found.refused:
            problem = "; ".join(refused.why.splitlines())
            instead = found.folder.name if found.folder else "the beginning"
            text = f"Checkpoint {refused.folder.name} is damaged and refused ({problem}); going on from {instead}."
            self.tell("checkpoint_refused", text, aloud=True, folder=refused.folder.name)
        if found.folder and found.manifest:
            check_same(found.folder, found.manifest.config_sha256, self.s.run, self.phase)
        return found.manifest

    def mend(self, manifest: CheckpointManifest) -> None:
        """A trainer killed between its last save and the pointers left them at the checkpoint before."""
        if self.s.ranks.is_first:
            checkpoint.mend_pointers(self.dir, manifest, damaged=self._damaged)

    def load(self, manifest: CheckpointManifest, built: Built) -> TrainState:
        folder = self.folder(manifest.step)
        loaded = checkpoint.load(folder, manifest)
        if built.model.lora is not None:
            told, now = (
                json.loads((folder / names.ADAPTER_CONFIG).read_bytes()),
                json.loads(built.papers[names.ADAPTER_CONFIG]),
            )
            lora.check_base(str(told.get("homing_base_sha256", "")), str(now["homing_base_sha256"]))
        built.model.load_weights(loaded.weights)
        built.optimizer.load_state_tensors(loaded.optimizer)
        checkpoint.restore_rng(loaded.state.rng, self.s.device)
        if isinstance(built.work, Remembers):
            built.work.load_papers(folder)
        self.mend(manifest)
        self.saved_step = manifest.step
        return loaded.state

    def save(
        self, state: TrainState, built: Built, evaluation: Evaluation | None, *, is_final: bool, is_needed: bool
    ) -> None:
        """Begins to write one and lets training go on; one that is needed is waited for. One at a time."""
        self.wait()
        begun = self.saved_at = time.monotonic()
        self.saved_step = state.step
        state = dataclasses.replace(state, rng=checkpoint.rng_state(self.s.device))
        manifest = self._manifest(state, built, evaluation, is_final=is_final)
        weights, optimizer = built.model.weights_for_disk(), built.optimizer.state_tensors()
        papers = self.s.papers | built.papers | _papers_of(built)
        self.s.journal.sync()
        is_held = is_needed or not self._snapshot.has_room(
            weights=weights, optimizer=optimizer
        )  # then training waits for the disk
        if not is_held:
            taken = self._snapshot.take(weights=weights, optimizer=optimizer)
            weights, optimizer = taken["weights"], taken["optimizer"]

        def write() -> Path:
            folder = checkpoint.save(
                self.dir, manifest, state, weights=weights, optimizer=optimizer, papers=papers,
                weights_name=built.weights_name,
            )  # fmt: skip
            self._damaged = [entry for entry in self._damaged if entry.folder != folder]  # it was just written anew
            checkpoint.mend_pointers(self.dir, manifest, damaged=self._damaged)
            checkpoint.retain(self.dir, keep_last=self.phase.keep_last, damaged=self._damaged)
            return folder

        self._saving = Saving(state.step, write, begun, is_final=is_final, is_needed=is_needed)
        if is_held:
            self._saving.join()
        self._saving.held_s = time.monotonic() - begun
        if is_held:
            self.wait()

    @property
    def is_saving(self) -> bool:
        return self._saving is not None

    def settle(self) -> None:
        """Tells of a save that has ended since; costs nothing, and waits for nothing."""
        if self._saving is not None and self._saving.is_over:
            self.wait()

    def wait(self) -> None:
        """Until what is being written is on disk. A failure is told, and ends the run if the run's end hangs on it."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        with self.s.journal.still("saving", "saving", phase=self.phase.kind):
            saving.join()
        if saving.folder is None:
            # One that the run's end hangs on is told by whoever ends the run.
            self.tell("save_failed", f"warning: {saving.error}", aloud=not saving.is_needed, step=saving.step)
            if not isinstance(saving.error, RunFailed | OSError):
                raise saving.error or AssertionError("a save ended without a word")
            if saving.is_needed:
                raise self._cannot_end(saving.step, saving.error) from saving.error
            return
        self._damaged = []
        self.took_s = saving.took_s
        text = f"Saved {saving.folder.relative_to(self.s.run_dir)} in {format_duration(saving.took_s)}."
        told = {"folder": saving.folder.name, "is_final": saving.is_final, "seconds": round(saving.took_s, 3),
                "held_s": round(saving.held_s, 3)}  # fmt: skip
        self.tell("checkpoint_saved", text, aloud=True, step=saving.step, **told)
        gc.collect()  # the collector is off between saves

    def _cannot_end(self, step: int, error: RunFailed | OSError) -> RunFailed:
        last = max(checkpoint.list_steps(self.dir), default=None)
        after = f"goes on from step {last:,}" if last is not None else "begins anew, for none was saved before"
        return RunFailed(
            what=f"The run cannot end: its checkpoint of step {step:,} could not be written to {self.dir}.",
            why=error.why if isinstance(error, RunFailed) else str(error),
            fix=f"Free disk space there, or keep fewer (checkpoint.keep_last); the same command then {after}.",
        )

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """What is nearly written is not thrown away, whatever happened."""
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


def _papers_of(built: Built) -> dict[str, bytes]:
    return built.work.papers() if isinstance(built.work, Remembers) else {}
