"""An adapter's checkpoint to a model that can be used: the weights it was trained on, with the adapter put into them.

    base: given | as the adapter tells | the start of the phase, or of the one whose adapters it went on with
       -> read one tensor at a time, hashed -> the base that the checkpoint names? -> adapter -> merged

An adapter on other weights than its own computes something, and nothing that anybody trained.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch

from homing.errors import DataError
from homing.lm.model import Decoder
from homing.lm.model.lora import add_lora, check_base, freeze, is_same, load_adapter, load_base, merge, merged_sha256
from homing.lm.open_weights import WeightFiles, find_weights, read_tensors
from homing.lm.open_weights.files import has_weights
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest
from homing.wire.run import Phase, Run

__all__ = ["find_base", "load_adapted", "load_with_adapter", "told_of_base"]


def load_adapted(
    files: WeightFiles, run: Run, phase: Phase, base_sha256: str, device: torch.device, base: Path | None
) -> Decoder:
    """A plain decoder, adapters merged in, in fp32."""
    model = load_with_adapter(files, run, phase, base_sha256, device, base)
    merge(model)
    return model


def load_with_adapter(
    files: WeightFiles, run: Run, phase: Phase, base_sha256: str, device: torch.device, base: Path | None
) -> Decoder:
    """The frozen base with its adapters beside it, all in fp32."""
    assert phase.lora is not None, f"a phase of method {phase.method} has its settings"
    model, sha256 = _frozen_base(base or find_base(files.folder, run, phase), run, device)
    if base_sha256:
        check_base(base_sha256, sha256)
    add_lora(model, phase.lora, seed=run.seed)
    load_adapter(model, dict(read_tensors(files)))
    return model


def _frozen_base(folder: Path, run: Run, device: torch.device) -> tuple[Decoder, str]:
    """The base and its hash. It may be an adapter's checkpoint itself, of the phase before: then the two together."""
    files = find_weights(folder)
    if (folder / names.ADAPTER).is_file():
        then = codec.loads(Run, (folder / names.RUN).read_bytes())
        manifest = codec.loads(CheckpointManifest, (folder / names.MANIFEST).read_bytes())
        phase = next(phase for phase in then.phases if phase.kind == manifest.phase)
        assert phase.lora is not None, f"a phase of method {phase.method} has its settings"
        base_sha256 = told_of_base(folder)[0]
        model = load_adapted(files, then, phase, base_sha256, device, None)
        freeze(model, "fp32")
        return model, merged_sha256(base_sha256, phase.lora, dict(read_tensors(files)))
    with torch.device("meta"):
        model = Decoder(run.model)
    return model, load_base(model, read_tensors(files), storage="fp32", device=device)


def told_of_base(checkpoint: Path) -> tuple[str, str]:
    """The base's hash, and its folder as seen from the run directory, as the adapter's own paper says; "" unknown."""
    try:
        told = json.loads((checkpoint / names.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return "", ""
    if not isinstance(told, dict):
        return "", ""
    return str(told.get("homing_base_sha256", "")), str(told.get("homing_base_dir", ""))


def _beginning(run: Run, phase: Phase) -> Phase:
    """The phase that added the adapters: one by the same kind of adapters after another goes on with them."""
    while not phase.init_from and (number := run.phases.index(phase)):
        before = run.phases[number - 1]
        if before.lora is None or phase.lora is None or not is_same(before.lora, phase.lora):
            break
        phase = before
    return phase


def find_base(checkpoint: Path, run: Run, phase: Phase) -> Path:
    """The folder of the weights that the phase began with; all that was looked at is named where there is none."""
    run_dir = checkpoint.parents[2] if len(checkpoint.parents) > 2 else checkpoint
    told = told_of_base(checkpoint)[1]
    candidates = [(run_dir / told).resolve()] if told else []
    phase = _beginning(run, phase)
    candidates += [run_dir / folder for folder in (phase.init_base, phase.init_from) if folder]
    before = [each.kind for each in itertools.takewhile(lambda each: each.kind != phase.kind, run.phases)]
    if before and not phase.init_from:
        steps = sorted((run_dir / names.CHECKPOINTS / before[-1]).glob("step-*"), reverse=True)
        candidates += steps[:1] or [run_dir / names.CHECKPOINTS / before[-1]]
    elif run.base is not None and (not phase.init_from or phase.init_base == run.base.dir):
        candidates += [run_dir / run.base.dir] if run.base.dir else []
        candidates += [Path(run.base.address).expanduser()] if not run.base.address.startswith("hf:") else []
    for candidate in candidates:
        if has_weights(candidate):
            return candidate
    named = f" ({run.base.address})" if run.base is not None else ""
    raise DataError(
        what=f"{checkpoint} holds an adapter, and the weights it was trained on are not here.",
        why=f"Looked at {', '.join(map(str, candidates)) or 'nothing: the run names no folder'}{named}.",
        fix="Name their folder: --base FOLDER",
    )
