"""A run directory with checkpoints in it, made without training: what generate and chat are pointed at."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors.torch import save_file
from tests.lm.tiny import make_data, make_run

from homing.lm.model import Decoder
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash, Pointer
from homing.wire.run_json import Run

__all__ = ["make_checkpoint", "make_trained_run"]


def make_checkpoint(
    folder: Path, data_dir: Path, *, phase: str = "pretrain", step: int = 12, seed: int = 0, run: Run | None = None
) -> Path:
    if not data_dir.exists():
        make_data(data_dir, num_documents=20)
    run = run or make_run(data_dir)
    model = Decoder(run.model)
    model.init_weights(seed)
    folder.mkdir(parents=True)
    save_file(model.weights_for_disk(), folder / file_names.WEIGHTS)
    (folder / file_names.RUN).write_text(codec.dumps(run))
    (folder / file_names.TOKENIZER).write_bytes((data_dir / file_names.TOKENIZER).read_bytes())
    files = [
        FileHash(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
    ]
    manifest = CheckpointManifest(run.name, run.id, phase, step, 1, True, "", 7, files)
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))
    return folder


def make_trained_run(run_dir: Path, data_dir: Path, *, phase: str = "pretrain", best: int | None = 4) -> Path:
    """Steps 4, 8 and 12 of one phase, each with weights of its own."""
    phase_dir = run_dir / file_names.CHECKPOINTS / phase
    for step in (4, 8, 12):
        make_checkpoint(phase_dir / file_names.step_dir(step), data_dir, phase=phase, step=step, seed=step)
    (phase_dir / file_names.LATEST).write_text(codec.dumps(Pointer(12)))
    if best is not None:
        (phase_dir / file_names.BEST).write_text(codec.dumps(Pointer(best, val_loss=1.0)))
    return run_dir
