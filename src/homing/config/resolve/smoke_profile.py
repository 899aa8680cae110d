"""The smoke profile: the same run file, reduced to take minutes, and a record of how that run ended.

  run file + --smoke -> part of the text, a few narrow layers, short context, small vocabulary, 200 steps, small batch
                     -> NAME-smoke

Everything else in the file is unchanged, so text, optimizer, schedule, store and providers are really tested. `homing
launch` refuses a large run until its smoke run has passed. The record is stored in $HOMING_HOME/smoke, in a file named
after the hash of the run file.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from homing.config.home_and_run_files import home
from homing.config.parse.source import KeyPath, Source
from homing.wire.run_json import Rl, Run

__all__ = ["PROFILE", "has_smoke_failed", "has_smoke_passed", "mark_smoke", "needs_smoke_first", "shrink"]

PROFILE = "smoke profile"
_LAYERS, _HEADS, _HEAD_SIZE, _CONTEXT, _VOCAB = 4, 4, 32, 128, 2048
_STEPS, _ROWS = 200, 16
# Size of the text to prepare (several times as much as the steps read), and of the sample that trains the tokenizer.
_TAKE_BYTES, _SAMPLE_BYTES = 20_000_000, 10_000_000

_BIG_PARAMS = 300_000_000
_BIG_TOKENS = 2_000_000_000


def needs_smoke_first(run: Run) -> bool:
    """Return True if the run is expensive enough that a smoke run should come first."""
    num_tokens = sum(phase.num_steps * phase.batch_tokens for phase in run.phases)
    return run.sizes.num_params >= _BIG_PARAMS or num_tokens > _BIG_TOKENS


def mark_smoke(file: Path, *, is_passed: bool, figures: dict[str, Any] | None = None) -> None:
    """Record how the smoke run of exactly this run file ended, replacing any earlier record."""
    note = _note(file)
    note.parent.mkdir(parents=True, exist_ok=True)
    temporary = note.with_suffix(f".{os.getpid()}.tmp")
    record = {"file": str(file), "is_passed": is_passed, "at": time.time(), "figures": figures or {}}
    document = {"schema": "homing.smoke/1", **record}
    temporary.write_text(json.dumps(document, default=str), encoding="utf-8")
    temporary.replace(note)


def has_smoke_passed(file: Path) -> bool:
    return _is_passed(file) is True


def has_smoke_failed(file: Path) -> bool:
    """Return True if the last smoke run of this file failed. A file that has changed since then counts as untested."""
    return _is_passed(file) is False


def _is_passed(file: Path) -> bool | None:
    """Return True if the recorded smoke run passed, False if it failed, None if there is no readable record."""
    try:
        found = json.loads(_note(file).read_bytes())
    except (OSError, ValueError):
        return None
    # Older versions wrote a record only on success, and without a result.
    return bool(found.get("is_passed", True)) if isinstance(found, dict) else None


def _note(file: Path) -> Path:
    # The record's name contains the hash of the file's text, so that a file changed since then counts as untested.
    return home() / "smoke" / f"{hashlib.sha256(Path(file).read_bytes()).hexdigest()}.json"


def shrink(source: Source, run: Run, *, keeps_vocabulary: bool, take_bytes: int) -> None:
    """Change `source` so that it describes a small version of the run, as a series of --set options would.

    `run`: the run at full size. `take_bytes`: the amount of text that the run file asks for; 0 for all text.
    """
    model = run.model
    heads = min(_HEADS, model.num_heads)
    share = model.num_heads // model.num_kv_heads
    kv_heads = max(1, heads // share) if heads % max(1, heads // share) == 0 else 1
    width = heads * _HEAD_SIZE
    context = min(_CONTEXT, model.context)
    changes: dict[KeyPath, Any] = {
        ("name",): f"{run.name[:26].rstrip('-')}-smoke",
        ("data", "dir"): f"{run.data.dir}-smoke",
        ("data", "take"): min(_TAKE_BYTES, take_bytes or _TAKE_BYTES),
        ("model", "context"): context,
    }
    if not run.base:  # the size of open weights cannot be changed
        changes |= {
            ("model", "layers"): min(_LAYERS, model.num_layers),
            ("model", "width"): width,
            ("model", "heads"): heads,
            ("model", "kv_heads"): kv_heads,
            ("model", "head_size"): _HEAD_SIZE,
            ("model", "ffn_width"): 3 * width,
            ("model", "tied"): model.is_tied,
            ("tokenizer", "sample"): _SAMPLE_BYTES,
        }
        if not keeps_vocabulary:
            changes[("tokenizer", "vocab_size")] = min(_VOCAB, model.vocab_size)
    kinds = [str((phase or {}).get("kind", "pretrain")) for phase in source.data.get("phases") or [{}]]
    numbers = [kinds.index(phase.kind) for phase in run.phases]
    for number, phase in zip(numbers, run.phases, strict=True):
        steps = min(_STEPS, phase.num_steps or _STEPS)
        changes |= {
            ("phases", number, "steps"): steps,
            **_shrunk_batch(number, phase.rl, context),
            ("phases", number, "micro_batch"): 0,
            ("phases", number, "warmup_steps"): min(max(1, steps // 20), steps - 1),
            ("phases", number, "eval"): {"every": max(1, steps // 4)} | ({} if phase.rl else {"tokens": 16 * context}),
            ("phases", number, "checkpoint"): {"every": max(1, steps // 2), "keep_last": 2},
        }
    if not isinstance(source.data.get("phases"), list):
        source.data["phases"] = [{}]
    for number in numbers:
        # A phase written as a dash without keys uses only defaults.
        source.data["phases"][number] = source.data["phases"][number] or {}
        for name in ("tokens", "epochs", "init_from"):  # init_from: the full model's weights do not fit the small model
            source.data["phases"][number].pop(name, None)
    if isinstance(source.data.get("model"), dict):
        source.data["model"].pop("depth", None)
    for path, value in changes.items():
        _put(source, path, value)


def _shrunk_batch(number: int, rl: Rl | None, context: int) -> dict[KeyPath, Any]:
    if rl is None:
        return {("phases", number, "batch_tokens"): _ROWS * context}
    at: KeyPath = ("phases", number, "rl")
    return {
        (*at, "prompts_per_step"): min(4, rl.prompts_per_step),
        (*at, "samples_per_prompt"): min(4, rl.samples_per_prompt),
        (*at, "answer_tokens"): min(rl.max_new_tokens, 16, context - 8),
        (*at, "eval_prompts"): min(8, rl.eval_prompts),
    }


def _put(source: Source, path: KeyPath, value: Any) -> None:
    at: Any = source.data
    for part in path[:-1]:
        if isinstance(part, str) and at.get(part) is None:
            at[part] = {}
        at = at[part]
    at[path[-1]] = value
    source.sets[path] = PROFILE
