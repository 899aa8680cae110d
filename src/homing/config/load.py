"""Load a run file into a run: read -> --set -> check -> resolve (-> shrink and resolve again for --smoke).

    --set phases.0.lr=3e-4   phases[0].lr=3e-4   data.text=[a.txt, b.txt]   limits.spend=$12

The value of a --set option is parsed as YAML. The command line overrides the file: a length (such as `steps`) replaces
another length in the file (such as `epochs`), `steps` also replaces a warm-up that would fill the whole phase, and
`model.depth` replaces the file's shape keys. Each replacement is reported.

A resolved run.json is accepted too: `homing launch $HOMING_HOME/runs/ID/run.json --spend-limit 5` repeats that run
with exactly the same values, even if the presets have changed. Nothing is derived again. The data must be unchanged,
which is checked by the hash of its manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from homing.config.home_and_run_files import find_run_file, preset_dir, run_files, shares_with
from homing.config.parse.check import Trace, check
from homing.config.parse.source import KeyPath, Source, dotted, read_source, yaml_value
from homing.config.resolve.phase_data import PhasePrep
from homing.config.resolve.resolve import PrepSettings, Resolved, resolve
from homing.config.resolve.smoke_profile import shrink
from homing.config.schema.keys import key_at
from homing.config.schema.phase import LENGTHS
from homing.config.schema.run_file import NAME_PATTERN, SHAPE
from homing.config.weights.open_weights import Source as OpenWeights
from homing.errors import HomingError, Mistake, RunFileError, UsageError
from homing.redact import looks_like_secret_value
from homing.units import parse_count
from homing.wire import codec, file_names
from homing.wire.file_names import RUN_FILE
from homing.wire.run_json import Run

__all__ = [
    "Implied",
    "Loaded",
    "as_typed",
    "is_record",
    "load_run",
    "preset_dir",
    "read_record",
    "safe_set",
    "with_phases",
]


@dataclass(frozen=True)
class Loaded:
    run: Run
    file: Path
    text: str  # the unchanged text of the run file
    prep: PrepSettings
    warnings: list[str]
    is_prepared: bool
    phase_preps: list[PhasePrep] = field(default_factory=list)  # one entry for each phase that has its own data
    source: OpenWeights | None = None  # the open weights that model.from names, if any

    @property
    def needs_text(self) -> bool:
        """True if any phase trains on the run's own text."""
        own = {prep.phase for prep in self.phase_preps}
        return any(phase.kind in ("pretrain", "mid") and phase.kind not in own for phase in self.run.phases)


def load_run(
    name_or_path: str, sets: Sequence[str] = (), *, is_smoke: bool = False, is_for_prep: bool = False
) -> Loaded:
    """Return the run described by NAME (./runs/NAME.yaml) or by a path. Raise RunFileError, listing all mistakes.

    `is_for_prep` ignores existing prepared data: a user who changes the vocabulary and prepares again must not get an
    error because the old tokenizer does not match.
    """
    path = find_run_file(name_or_path)
    if is_record(path):
        return _repeat(path, sets, is_changed=is_smoke or is_for_prep)
    source = read_source(path)
    source.is_preset = path.resolve().parent == preset_dir().resolve()
    said = _apply_sets(source, sets)
    trace, resolved = _resolve(source, path, is_for_prep=is_for_prep or is_smoke)
    if is_smoke:
        keeps = bool(trace.file.tokenizer.file)
        shrink(source, resolved.run, keeps_vocabulary=keeps, take_bytes=resolved.prep.take_bytes)
        trace, resolved = _resolve(source, path, is_for_prep=is_for_prep, is_smoke=True)
    return Loaded(
        resolved.run, path, source.text, resolved.prep, said + trace.warnings, resolved.is_prepared,
        resolved.phase_preps, resolved.source,
    )  # fmt: skip


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
        # No warning is needed for a smoke run, because its name was just derived from the file's name.
        if not is_smoke and path.stem != typed and path == run_files().get(path.stem):
            other = shares_with(path, typed)
            also = (
                f", and so does {other}; set name: {path.stem} in {path}"
                if other is not None
                else f", because it sets name: {typed}"
            )
            trace.warn(f"{path} refers to run {typed}{also}.")
        return typed
    if not re.fullmatch(NAME_PATTERN, path.stem) and trace.is_sound(("name",)):
        trace.wrong(
            ("name",), f"is derived from the file's name, and {path.stem!r} is not a valid name.", "Set name: my-run."
        )
    return path.stem


def _by_line(mistake: Mistake) -> tuple[bool, int, str]:
    return mistake.line is None, mistake.line or 0, mistake.key


# --- --set ----------------------------------------------------------------------------------------------------------


def with_phases(sets: Sequence[str] | None, phases: str | None) -> list[str]:
    """Return the --set options. If --phase was given, add the `train.only` setting that it stands for."""
    return [*(sets or []), *([f"train.only={phases}"] if phases else [])]


def with_options(sets: Sequence[str] | None, *, phases: str | None, gpu: str | None) -> list[str]:
    """Return the --set options, with the settings that --phase and --gpu stand for."""
    return [*with_phases(sets, phases), *([f"cloud.gpu={gpu}"] if gpu else [])]


def as_typed(sets: Sequence[str] | None, *, is_smoke: bool = False) -> str:
    """Return these options as command-line text, so that a suggested next command refers to the same run."""
    return " --smoke" * is_smoke + "".join(f" --set {shlex.quote(change)}" for change in sets or [])


class Implied(str):
    """A change that follows from another option, such as --extend. It replaces other lengths without a notice."""


def _apply_sets(source: Source, sets: Sequence[str]) -> list[str]:
    """Apply the --set options to `source` and record their mistakes there. Return notices for the user."""
    given: set[KeyPath] = set()
    implied: set[KeyPath] = set()
    for text in sets:
        parsed = _parse_set(text)
        if isinstance(parsed, Mistake):
            source.mistakes.append(parsed)
            continue
        path, value = parsed
        new = [path[: number + 1] for number, part in enumerate(path) if isinstance(part, int)
               and source.get(path[: number + 1]) is None]  # fmt: skip
        problem = _put(source.data, path, value)
        if problem:
            source.mistakes.append(Mistake(_shown(text), None, dotted(path), problem))
            continue
        (implied if isinstance(text, Implied) else given).add(path)
        # If a --set option adds a list entry, such as a phase, attribute mistakes in that entry to the option.
        source.sets |= {each: _shown(text) for each in (*new, path)}
    _drop_replaced(source, implied)
    return _drop_replaced(source, {path for path in given if source.get(path) is not None})


def _parse_set(text: str) -> tuple[KeyPath, Any] | Mistake:
    name, equals, typed = text.partition("=")
    name = name.strip()
    file = _shown(text)
    if not equals:
        return Mistake(file, None, name or "?", "has no `=`.", "Write --set key=value, such as --set phases.0.lr=3e-4")
    parts = [part for part in re.split(r"[.\[\]]+", name) if part]
    if not parts or not re.fullmatch(r"[\w-]+(\.[\w-]+|\[\d+\])*", name):
        return Mistake(file, None, name or "?", "is not a key.", "For example: phases.0.lr or phases[0].lr")
    path: KeyPath = tuple(int(part) if part.isdigit() and number else part for number, part in enumerate(parts))
    try:
        value, wanted = yaml_value(typed), key_at(path)
        # The shell removes quotes, so a string that looks like a number is taken as it was typed: cloud.gpu=4090
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return path, typed.strip() if is_number and wanted is not None and wanted.kind == "a string" else value
    except (YAMLError, ValueError, HomingError) as exc:
        problem = getattr(exc, "problem", None) or str(exc).splitlines()[0]
        return Mistake(file, None, name, f"the value cannot be read: {problem}.", "Put quotes around the value.")


def _put(data: dict[str, Any], path: KeyPath, value: Any) -> str:
    """Set the value. Return the problem, or "" on success."""
    at: Any = data
    for number, part in enumerate(path):
        is_last = number == len(path) - 1
        if isinstance(part, int):
            if not isinstance(at, list):
                return f"{dotted(path[:number])} is not a list."
            if part > len(at):
                return f"there is no {dotted(path[: number + 1])}; {dotted(path[:number])} has {len(at)} entries."
            if part == len(at):
                at.append({})
        elif not isinstance(at, dict):
            hint = " Write its number, such as phases.0.lr." if isinstance(at, list) else ""
            return f"{dotted(path[:number])} is not a section.{hint}"
        if is_last:
            at[part] = value
        else:
            empty: Any = [] if isinstance(path[number + 1], int) else {}
            if isinstance(at, dict) and at.get(part) is None:
                at[part] = empty
            at = at[part]
    return ""


def _drop_replaced(source: Source, given: set[KeyPath]) -> list[str]:
    said = []
    for path in sorted(given, key=dotted):
        if len(path) == 3 and path[0] == "phases" and path[2] in LENGTHS:
            said += _drop_overridden(source, given, path, [(*path[:2], other) for other in LENGTHS if other != path[2]])
        if len(path) == 3 and path[0] == "phases" and path[2] == "steps":
            warmup = (*path[:2], "warmup_steps")
            # Drop a warm-up that would fill the whole phase, for example in a short trial of a long schedule.
            if _count(source.get(warmup)) >= _count(source.get(path)) > 0:
                said += _drop_overridden(source, given, path, [warmup])
        if path == ("model", "depth"):
            said += _drop_overridden(source, given, path, [("model", other) for other in SHAPE])
    return said


def _count(value: Any) -> int:
    """Parse a count. Return 0 if it is invalid; a later check reports the mistake."""
    try:
        return parse_count(value)
    except ValueError:
        return 0


def _drop_overridden(source: Source, given: set[KeyPath], winner: KeyPath, losers: Sequence[KeyPath]) -> list[str]:
    gone = [path for path in losers if path not in given and source.get(path) is not None]
    for path in gone:
        del source.get(path[:-1])[path[-1]]
    names = ", ".join(dotted(path) for path in gone)
    return [f"--set {dotted(winner)} replaces {names} from the run file."] if gone else []


def _shown(text: str) -> str:
    """Return the setting as the user typed it: `train.only` is almost always given as `--phase`."""
    name, _, value = safe_set(text).partition("=")
    return f"--phase {value}" if name == "train.only" else f"--set {safe_set(text)}"


def safe_set(text: str) -> str:
    """Return the text of a --set option for printing, with a secret value masked."""
    name, equals, value = text.partition("=")
    return f"{name}{equals}***" if looks_like_secret_value(value) else text[:120]


# --- the record of a run --------------------------------------------------------------------------------------------


def is_record(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # the run file reader reports the problem
    return isinstance(found, dict) and str(found.get("schema", "")).startswith("homing.run/")


def read_record(path: Path) -> tuple[Run, str]:
    """Return the run in run.json, without its id, and the text of the run file next to it. Verify the run's data."""
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
            what=f"The data that {path} uses is no longer in {data_dir}.",
            why=f"The run used a manifest with sha256 {run.data.manifest_sha256[:12]}; homing found {found[:12]}.",
            fix=f"Prepare it again from the same text: homing prep {run.name}",
        )
    run_file = path.with_name(file_names.RUN_FILE)
    text = run_file.read_text(encoding="utf-8") if run_file.is_file() else ""
    again = dataclasses.replace(run, id="", data=dataclasses.replace(run.data, dir=str(data_dir)))
    return again, text


def _repeat(path: Path, sets: Sequence[str], *, is_changed: bool) -> Loaded:
    if sets or is_changed:
        raise UsageError(
            what=f"{path} is the record of a run and cannot be changed.",
            why="Its values are final. If you changed one, homing would not recalculate the values derived from it.",
            fix=f"Change the run file next to it: {path.with_name(RUN_FILE)}",
        )
    run, text = read_record(path)
    nothing = PrepSettings([], [], 0.0, "text", run.model.vocab_size, "gpt4", "standard", "", 0, 0, Path(run.data.dir))
    return Loaded(run, path, text, nothing, [], is_prepared=True)
