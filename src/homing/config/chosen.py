"""`train.only`: some phases of a run file, such as mid+sft, with the weights that the first of them starts from.

The others are trained already, here or elsewhere: the final checkpoint of the phase before is looked for at home. One
of another folder's run of the same name is passed over: what a person wants of it they name by `init_from`.
"""

from __future__ import annotations

from pathlib import Path

from homing.config.models import MODELS, manifest_in
from homing.config.names import nearest
from homing.config.paths import home
from homing.config.projects import begun_elsewhere
from homing.config.trace import Trace
from homing.wire import names

__all__ = ["chosen_phases", "find_start", "newest_weights"]

ALL = "all"


def chosen_phases(trace: Trace) -> list[int]:
    """Their places in the run file, in its order. A name that is not there is a mistake, and then all are meant."""
    kinds = [phase.kind for phase in trace.file.phases]
    typed = [part.strip() for part in trace.file.train.only.lower().split("+")]
    if typed == [ALL]:
        return list(range(len(kinds)))
    for name in typed:
        if name not in kinds and trace.is_sound(("train", "only")):
            near = nearest(name, [*kinds, ALL])
            hint = f"Did you mean {near}? " if near else ""
            there = f"{hint}This run has {', '.join(kinds)}; join several by +, or say all."
            trace.wrong(("train", "only"), f"there is no phase {name!r} in this run.", there)
    return [number for number, kind in enumerate(kinds) if kind in typed] or list(range(len(kinds)))


def find_start(trace: Trace, first: int, name: str) -> str:
    """The folder of the newest final checkpoint of a phase before the first one; "" where it needs none."""
    phase = trace.file.phases[first]
    if first == 0 or phase.init_from:
        return ""
    before = [earlier.kind for earlier in reversed(trace.file.phases[:first])]
    found = {kind: _finals(name, kind) for kind in before}
    own = [folder for folders in found.values() for folder, theirs in folders if theirs is None]
    if own:
        return str(own[0])
    strangers = [(folder, theirs) for folders in found.values() for folder, theirs in folders]
    trace.wrong(
        ("train", "only"),
        f"{phase.kind} starts from {before[0]}, and no trained {' or '.join(before)} of {name} is here"
        f" (looked in ./models/{name}, ./models/{name}-{before[0]} and {home() / 'runs'})."
        + "".join(f" {folder} is of another {name}, begun in {theirs}." for folder, theirs in strangers[:1]),
        f"Train {before[0]} first, or begin with the other one: --set phases.{first}.init_from={strangers[0][0]}"
        if strangers
        else f"homing fetch {name}   or name the folder: phases.{first}.init_from",
    )
    return ""


def newest_weights(name: str, kind: str) -> Path | None:
    """The folder of the newest final checkpoint of this phase; of a phase that never ended, of its newest one."""
    found = [folder for folder, theirs in _checkpoints(name, kind, is_final=True) if theirs is None]
    found += [folder for folder, theirs in _checkpoints(name, kind, is_final=False) if theirs is None]
    return found[0] if found else None


def _finals(name: str, kind: str) -> list[tuple[Path, Path | None]]:
    return _checkpoints(name, kind, is_final=True)


def _checkpoints(name: str, kind: str, *, is_final: bool) -> list[tuple[Path, Path | None]]:
    """Each with the folder it was begun in, where that is another than this; the one to take comes first. Of what was
    fetched that is the one that was made last: under the run's name or, where another run has it, beside it."""
    fetched = [MODELS / name, MODELS / f"{name}-{kind}", *MODELS.glob(f"{name}-*-*")]
    fetched.sort(key=_made_at, reverse=True)
    runs = sorted((home() / "runs").glob(f"{name}-*"), reverse=True)
    trained = [step for run in runs for step in sorted((run / names.CHECKPOINTS / kind).glob("step-*"), reverse=True)]
    manifests = {folder.absolute(): manifest_in(folder) for folder in [*fetched, *trained]}
    return [
        (folder, begun_elsewhere(manifest.run_id))
        for folder, manifest in manifests.items()
        if manifest is not None and (manifest.run_name, manifest.phase, manifest.is_final) == (name, kind, is_final)
    ]


def _made_at(folder: Path) -> float:
    manifest = manifest_in(folder)
    return manifest.made_at if manifest is not None else 0.0
