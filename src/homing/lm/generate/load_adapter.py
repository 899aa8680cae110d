"""Loads an adapter checkpoint as a usable model: its base weights, with the adapter merged in.

    base: given | recorded in the adapter | the initial weights of the phase that created the adapter
       -> read and hash tensor by tensor -> compare the hash with the checkpoint -> add the adapter -> merge

With different base weights the model would run, but it would not be the model that was trained.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch

from homing.errors import DataError
from homing.lm.model import Decoder
from homing.lm.model.frozen_linear import load_adapter
from homing.lm.model.lora import add_lora, check_base, freeze, is_same, load_base, merge, merged_sha256
from homing.lm.model.open_weights import WeightFiles, find_weights, read_tensors
from homing.lm.model.open_weights.find_tensors import has_weights
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.run_json import Phase, Run

__all__ = ["add_adapter", "find_base", "frozen_base", "load_adapted", "load_with_adapter", "read_base_record"]


def load_adapted(
    files: WeightFiles, run: Run, phase: Phase, base_sha256: str, device: torch.device, base: Path | None
) -> Decoder:
    """Return a plain fp32 decoder with the adapters merged in."""
    model = load_with_adapter(files, run, phase, base_sha256, device, base)
    merge(model)
    return model


def load_with_adapter(
    files: WeightFiles, run: Run, phase: Phase, base_sha256: str, device: torch.device, base: Path | None
) -> Decoder:
    """Return the frozen base with its adapters on top, all in fp32."""
    assert phase.lora is not None, f"a phase of method {phase.method} must have LoRA settings"
    model, sha256 = frozen_base(base or find_base(files.folder, run, phase), run, device)
    if base_sha256:
        check_base(base_sha256, sha256)
    add_adapter(model, files, run, phase)
    return model


def add_adapter(model: Decoder, files: WeightFiles, run: Run, phase: Phase) -> None:
    """Add the adapter in `files` to its frozen base."""
    assert phase.lora is not None, f"a phase of method {phase.method} must have LoRA settings"
    add_lora(model, phase.lora, seed=run.seed)
    load_adapter(model, dict(read_tensors(files)))


def frozen_base(folder: Path, run: Run, device: torch.device, storage: str = "fp32") -> tuple[Decoder, str]:
    """Return the base weights as a frozen model, and their hash, which does not depend on `storage`.

    If the base is itself an adapter checkpoint of an earlier phase, merge that adapter first.
    """
    files = find_weights(folder)
    if (folder / file_names.ADAPTER).is_file():
        then = codec.loads(Run, (folder / file_names.RUN).read_bytes())
        manifest = codec.loads(CheckpointManifest, (folder / file_names.MANIFEST).read_bytes())
        phase = next(phase for phase in then.phases if phase.kind == manifest.phase)
        assert phase.lora is not None, f"a phase of method {phase.method} must have LoRA settings"
        base_sha256 = read_base_record(folder)[0]
        # Merge on the CPU, because in fp32 the base may not fit on the GPU.
        model = load_adapted(files, then, phase, base_sha256, torch.device("cpu"), None)
        freeze(model, storage, device)
        return model, merged_sha256(base_sha256, phase.lora, dict(read_tensors(files)))
    with torch.device("meta"):
        model = Decoder(run.model)
    return model, load_base(model, read_tensors(files), storage=storage, device=device)


def read_base_record(checkpoint: Path) -> tuple[str, str]:
    """Return the hash and folder of the base, as recorded in adapter_config.json ("" if unknown).

    The folder is relative to the run directory.
    """
    try:
        config = json.loads((checkpoint / file_names.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return "", ""
    if not isinstance(config, dict):
        return "", ""
    return str(config.get("homing_base_sha256", "")), str(config.get("homing_base_dir", ""))


def _beginning(run: Run, phase: Phase) -> Phase:
    """Return the phase that created the adapter. Later phases with the same settings continue to train it."""
    while not phase.init_from and (number := run.phases.index(phase)):
        before = run.phases[number - 1]
        if before.lora is None or phase.lora is None or not is_same(before.lora, phase.lora):
            break
        phase = before
    return phase


def find_base(checkpoint: Path, run: Run, phase: Phase) -> Path:
    """Return the folder with the base weights of an adapter. Raises DataError listing every place that was searched."""
    run_dir = checkpoint.parents[2] if len(checkpoint.parents) > 2 else checkpoint
    base_dir = read_base_record(checkpoint)[1]
    candidates = [(run_dir / base_dir).resolve()] if base_dir else []
    phase = _beginning(run, phase)
    candidates += [run_dir / folder for folder in (phase.init_base, phase.init_from) if folder]
    before = [each.kind for each in itertools.takewhile(lambda each: each.kind != phase.kind, run.phases)]
    if before and not phase.init_from:
        steps = sorted((run_dir / file_names.CHECKPOINTS / before[-1]).glob("step-*"), reverse=True)
        candidates += steps[:1] or [run_dir / file_names.CHECKPOINTS / before[-1]]
    elif run.base is not None and (not phase.init_from or phase.init_base == run.base.dir):
        candidates += [run_dir / run.base.dir] if run.base.dir else []
        candidates += [Path(run.base.address).expanduser()] if not run.base.address.startswith("hf:") else []
    for candidate in candidates:
        if has_weights(candidate):
            return candidate
    named = f" ({run.base.address})" if run.base is not None else ""
    raise DataError(
        what=f"{checkpoint} contains an adapter, but the base weights it was trained on are missing.",
        why=f"Looked in {', '.join(map(str, candidates)) or 'no folder, because the run lists none'}{named}.",
        fix="Specify the folder of the base weights: --base FOLDER",
    )
