"""Load a run file into a run: read -> --set -> check -> resolve (-> shrink and resolve again for --smoke).

A resolved run.json is accepted too: `homing launch $HOMING_HOME/runs/ID/run.json --spend-limit 5` repeats that run
with exactly the same values, even if the presets have changed. Nothing is derived again. The data must be unchanged,
which is checked by the hash of its manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from homing.config.parse.check import check
from homing.config.parse.overrides import apply_sets
from homing.config.parse.source import Source, read_source
from homing.config.paths import preset_dir, run_files
from homing.config.projects import find_run_file, shares_with
from homing.config.resolve.origins import Trace
from homing.config.resolve.phase_data import PhasePrep
from homing.config.resolve.resolve import PrepSettings, Resolved, resolve
from homing.config.resolve.smoke_profile import shrink
from homing.config.schema.run_file import NAME_PATTERN
from homing.config.weights.open_weights import Source as OpenWeights
from homing.errors import Mistake, RunFileError, UsageError
from homing.wire import codec, file_names
from homing.wire.file_names import RUN_FILE
from homing.wire.run_json import Run

__all__ = ["Loaded", "is_record", "load_run", "preset_dir", "read_record"]


@dataclass(frozen=True)
class Loaded:
    run: Run
    file: Path
    text: str  # as written in the file
    prep: PrepSettings
    warnings: list[str]
    is_prepared: bool
    phase_preps: list[PhasePrep] = field(default_factory=list)  # of phases with their own data
    source: OpenWeights | None = None  # the open weights of model.from


def load_run(
    name_or_path: str, sets: Sequence[str] = (), *, is_smoke: bool = False, is_for_prep: bool = False
) -> Loaded:
    """Return the run described by NAME (./runs/NAME.yaml) or by a path; raise RunFileError with every mistake at once.

    `is_for_prep` ignores existing prepared data: a user who changes the vocabulary and prepares again must not get an
    error because the old tokenizer does not match.
    """
    path = find_run_file(name_or_path)
    if is_record(path):
        return _repeat(path, sets, is_changed=is_smoke or is_for_prep)
    source = read_source(path)
    source.is_preset = path.resolve().parent == preset_dir().resolve()
    said = apply_sets(source, sets)
    trace, resolved = _resolve(source, path, is_for_prep=is_for_prep or is_smoke)
    if is_smoke:
        keeps = bool(trace.file.tokenizer.file)
        shrink(source, resolved.run, keeps_vocabulary=keeps, take_bytes=resolved.prep.take_bytes)
        trace, resolved = _resolve(source, path, is_for_prep=is_for_prep, is_smoke=True)
    return Loaded(
        resolved.run, path, source.text, resolved.prep, said + trace.warnings, resolved.is_prepared,
        resolved.phase_preps, resolved.source,
    )  # fmt: skip


def _repeat(path: Path, sets: Sequence[str], *, is_changed: bool) -> Loaded:
    if sets or is_changed:
        raise UsageError(
            what=f"{path} is the record of a run and cannot be changed.",
            why="Its values are already resolved; a change would not update values derived from it.",
            fix=f"Change the run file next to it: {path.with_name(RUN_FILE)}",
        )
    run, text = read_record(path)
    nothing = PrepSettings([], [], 0.0, "text", run.model.vocab_size, "gpt4", "standard", "", 0, 0, Path(run.data.dir))
    return Loaded(run, path, text, nothing, [], is_prepared=True)


def _resolve(source: Source, path: Path, *, is_for_prep: bool, is_smoke: bool = False) -> tuple[Trace, Resolved]:
    checked = check(source)
    trace = Trace(source, checked)
    name = _name(trace, path, is_smoke=is_smoke)
    resolved = resolve(trace, name, is_for_prep=is_for_prep)
    if trace.mistakes:
        raise RunFileError(sorted(dict.fromkeys(trace.mistakes), key=_by_line))
    return trace, resolved


def _name(trace: Trace, path: Path, *, is_smoke: bool) -> str:
    typed = trace.file.name
    if typed:
        # A smoke run's name was just derived from the file's name, so no warning is needed.
        if not is_smoke and path.stem != typed and path == run_files().get(path.stem):
            other = shares_with(path, typed)
            also = f", and so is {other}; give it name: {path.stem}" if other is not None else ", as its name: says"
            trace.warn(f"{path} is the run {typed}{also}.")
        return typed
    if not re.fullmatch(NAME_PATTERN, path.stem) and trace.is_sound(("name",)):
        trace.wrong(
            ("name",), f"is derived from the file's name, and {path.stem!r} is not a valid name.", "Set name: my-run."
        )
    return path.stem


def _by_line(mistake: Mistake) -> tuple[bool, int, str]:
    return mistake.line is None, mistake.line or 0, mistake.key


def is_record(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # the run file reader reports the problem
    return isinstance(found, dict) and str(found.get("schema", "")).startswith("homing.run/")


def read_record(path: Path) -> tuple[Run, str]:
    """Return the run, with no id and its data located and verified, and the text of the run file next to run.json."""
    try:
        run = codec.loads(Run, path.read_bytes())
    except codec.WireError as exc:
        raise UsageError(
            what=f"{path} is not a complete run record.", why=str(exc), fix="Use the run.yaml next to it."
        ) from exc
    data_dir = (path.parent / run.data.dir).resolve()
    manifest = data_dir / file_names.MANIFEST
    found = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else "nothing"
    if found != run.data.manifest_sha256:
        raise UsageError(
            what=f"The data of {path} is no longer in {data_dir}.",
            why=f"Its manifest had sha256 {run.data.manifest_sha256[:12]}, but found {found[:12]}.",
            fix=f"Prepare it again from the same text: homing prep {run.name}",
        )
    run_file = path.with_name(file_names.RUN_FILE)
    text = run_file.read_text(encoding="utf-8") if run_file.is_file() else ""
    again = dataclasses.replace(run, id="", data=dataclasses.replace(run.data, dir=str(data_dir)))
    return again, text
