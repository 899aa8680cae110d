"""Checks that a run may resume from a checkpoint: model, phase and data must be the same.

If not, the error names every difference. Settings that do not change what training computes (save, log and sample
intervals, micro-batch size) may differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from homing.errors import UsageError
from homing.wire import codec, file_names
from homing.wire.run_json import Phase, Run

__all__ = ["check_same", "config_sha256"]

_PHASE_KEYS = ("kind", "method", "num_steps", "batch_tokens", "optimizer", "schedule", "lora")
# rl settings that may differ when a run resumes, because they do not affect what is learned from the samples.
_RL_FREE = (
    *("rollout_rows", "graphs", "collapse_steps", "eval_prompts", "eval_samples"),
    *("reward_timeout_s", "reward_memory_bytes"),
)
# Paths are not compared, because the same file may have moved; the hashes of the files are compared instead.
_PATHS = ("file", "val_file", "reward")
_DATA_KEYS = ("manifest_sha256", "tokenizer_sha256")


def config_sha256(run: Run, phase: Phase) -> str:
    return hashlib.sha256(json.dumps(_identity(run, phase), sort_keys=True).encode()).hexdigest()


def check_same(folder: Path, found_sha256: str, run: Run, phase: Phase) -> None:
    """Raise UsageError, naming the differences, if the checkpoint was written with a different configuration.

    If the hashes differ although no value does, another version of homing wrote the checkpoint. The checkpoint is
    accepted if that version merely lacked some settings, because their defaults keep the old behavior.
    """
    if found_sha256 == config_sha256(run, phase):
        return
    before, strange = dict[str, Any](), list[str]()
    with contextlib.suppress(ValueError, RecursionError):  # an incompatible version may have written this run.json
        data = json.loads((folder / file_names.RUN).read_bytes())
        then = codec.load(Run, data)
        number = next((number for number, p in enumerate(then.phases) if p.kind == phase.kind), None)
        if number is not None:
            compared = ("model.", "data.", "base.", f"phases.{number}.")  # the sections in `_identity`
            strange = sorted(key for key in _keys(data) - _keys(codec.dump(then)) if key.startswith(compared))
            before = _flat(_identity(then, then.phases[number]))
    now = _flat(_identity(run, phase))
    if before == now and not strange:
        return
    differences = [
        f"{key}: {before.get(key, 'absent')} in the checkpoint, {now.get(key, 'absent')} in run.json"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    back = "restore the checkpoint's values, then run the same command to resume from the checkpoint"
    otherwise = back if differences else "resume with the version of homing that wrote it"
    raise UsageError(
        what=f"The checkpoint {folder} belongs to a different configuration.",
        why="\n".join(differences)
        or f"It was written with settings that this version of homing does not have: {', '.join(strange)}.",
        fix=f"Start over: homing train RUN --fresh   Or {otherwise}.",
    )


def _identity(run: Run, phase: Phase) -> dict[str, Any]:
    phase_values, data_values = codec.dump(phase), codec.dump(run.data)
    found: dict[str, Any] = {
        "seed": run.seed,
        "model": codec.dump(run.model),
        "phase": {key: phase_values[key] for key in _PHASE_KEYS},
        "data": {key: data_values[key] for key in _DATA_KEYS},
        "starts_elsewhere": bool(phase.init_from),
    }
    if run.base:
        found["base"] = run.base.address
    if phase.data:
        found["data"]["own"] = phase.data.manifest_sha256
    if phase_values["rl"]:
        found["rl"] = {key: value for key, value in phase_values["rl"].items() if key not in _RL_FREE}
        found["rl"]["tasks"] = [
            {key: value for key, value in task.items() if key not in _PATHS} for task in phase_values["rl"]["tasks"]
        ]
    return found


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return flat


def _keys(value: Any, prefix: str = "") -> set[str]:
    """Return the dotted paths of all keys in nested dicts and lists. The key of a list item is its index."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: set[str] = set()
    for key, inner in items:
        found |= {f"{prefix}{key}", *_keys(inner, f"{prefix}{key}.")}
    return found
