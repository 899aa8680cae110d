"""`train.only`: train some phases of a run file, such as mid+sft, and find the weights to start from.

The other phases are already trained, here or elsewhere, so the final checkpoint of the previous phase is searched for
at home. Checkpoints of a run with the same name in another project folder are skipped; to use one, set `init_from`.
"""

from __future__ import annotations

from pathlib import Path

from homing.config.parse.key_suggestions import nearest
from homing.config.paths import MODELS, home, manifest_in
from homing.config.projects import begun_elsewhere
from homing.config.resolve.origins import Trace
from homing.wire import file_names

__all__ = ["chosen_phases", "find_start", "newest_weights"]

ALL = "all"


def chosen_phases(trace: Trace) -> list[int]:
    """Return the indices of the chosen phases in the run file's order.

    An unknown name is a mistake; then all are returned.
    """
    kinds = [phase.kind for phase in trace.file.phases]
    typed = [part.strip() for part in trace.file.train.only.lower().split("+")]
    if typed == [ALL]:
        return list(range(len(kinds)))
    for name in typed:
        if name not in kinds and trace.is_sound(("train", "only")):
            near = nearest(name, [*kinds, ALL])
            hint = f"Did you mean {near}? " if near else ""
            there = f"{hint}This run has {', '.join(kinds)}; join several with +, or use all."
            trace.wrong(("train", "only"), f"this run has no phase {name!r}.", there)
    return [number for number, kind in enumerate(kinds) if kind in typed] or list(range(len(kinds)))


def find_start(trace: Trace, first: int, name: str) -> str:
    """Return the folder of the newest final checkpoint of an earlier phase, or "" if the first phase needs none."""
    phase = trace.file.phases[first]
    if first == 0 or phase.init_from:
        return ""
    before = [earlier.kind for earlier in reversed(trace.file.phases[:first])]
    found = {kind: _finals(name, kind) for kind in before}
    own = [folder for folders in found.values() for folder, other_folder in folders if other_folder is None]
    if own:
        return str(own[0])
    strangers = [(folder, other_folder) for folders in found.values() for folder, other_folder in folders]
    trace.wrong(
        ("train", "only"),
        f"{phase.kind} starts from {before[0]}, but no trained {' or '.join(before)} of {name} was found"
        f" (looked in ./models/{name}, ./models/{name}-{before[0]} and {home() / 'runs'})."
        + "".join(
            f" {folder} belongs to another {name}, started in {other_folder}." for folder, other_folder in strangers[:1]
        ),
        f"Train {before[0]} first, or start from the other one: --set phases.{first}.init_from={strangers[0][0]}"
        if strangers
        else f"homing fetch {name}   or set the folder: phases.{first}.init_from",
    )
    return ""


def newest_weights(name: str, kind: str) -> Path | None:
    """Return the newest final checkpoint folder of this phase, or its newest checkpoint if the phase never finished."""
    found = [folder for folder, other_folder in _checkpoints(name, kind, is_final=True) if other_folder is None]
    found += [folder for folder, other_folder in _checkpoints(name, kind, is_final=False) if other_folder is None]
    return found[0] if found else None


def _finals(name: str, kind: str) -> list[tuple[Path, Path | None]]:
    return _checkpoints(name, kind, is_final=True)


def _checkpoints(name: str, kind: str, *, is_final: bool) -> list[tuple[Path, Path | None]]:
    """List checkpoint folders, preferred one first, each with the folder its run was started in if not this one.

    Fetched models come first, newest first. `homing fetch` stores a model under the run's name, or under NAME-PHASE or
    NAME-*-* if another run already uses that name.
    """
    fetched = [MODELS / name, MODELS / f"{name}-{kind}", *MODELS.glob(f"{name}-*-*")]
    fetched.sort(key=_made_at, reverse=True)
    runs = sorted((home() / "runs").glob(f"{name}-*"), reverse=True)
    trained = [
        step for run in runs for step in sorted((run / file_names.CHECKPOINTS / kind).glob("step-*"), reverse=True)
    ]
    manifests = {folder.absolute(): manifest_in(folder) for folder in [*fetched, *trained]}
    return [
        (folder, begun_elsewhere(manifest.run_id))
        for folder, manifest in manifests.items()
        if manifest is not None and (manifest.run_name, manifest.phase, manifest.is_final) == (name, kind, is_final)
    ]


def _made_at(folder: Path) -> float:
    manifest = manifest_in(folder)
    return manifest.made_at if manifest is not None else 0.0
