"""What travels with a run beside its own text: data of single phases, weights to begin with, files of tasks.

    travelling(run)   every such file with its hash, named in run.json, so that another home can send them again
    relocated(run)    the run as the instance reads it: these files lie below ../data there

Open weights may come from the Hub instead (`from_hub`). What is missing is named before anything is rented.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator

from homing.cloud.from_hub import hub_inputs
from homing.cloud.words import Words
from homing.errors import DataError
from homing.units import format_bytes
from homing.wire import codec, names
from homing.wire.data import DataManifest
from homing.wire.run import Phase, Run, RunInput
from homing.world import World

__all__ = ["BESIDE_TOKENIZER", "DATA_DIR", "relocated", "told_inputs", "travelling"]

DATA_DIR = "data"
BESIDE_TOKENIZER = (names.TOKENIZER_CONFIG, names.CHAT_TEMPLATE, names.TURNS)  # no manifest vouches for them
BASE = "base"
_RL_FILES = ("file", "val_file", "reward")
# Of a folder with weights: what loading them reads. Optimizer, samples and logs of a checkpoint stay where they are.
_WEIGHT_ENDINGS = (".safetensors", ".json", ".jinja")
_NOT_WEIGHTS = (names.OPTIMIZER, names.STATE)


def travelling(
    run: Run, world: World, sha256: Callable[[str], str] | None = None, *, words: Words | None = None
) -> list[RunInput]:
    """Of a run resolved at home. All that is missing is said at once. `sha256`: of a file, where somebody remembers it
    (`hashes`); else it is read."""
    missing: list[str] = []
    sha256 = sha256 or world.sha256
    found = [item for phase in run.phases for item in _of_phase(phase, run, world, missing, sha256)]
    beside = [(name, os.path.join(run.data.dir, name)) for name in BESIDE_TOKENIZER]
    found += [RunInput(name, path, sha256(path)) for name, path in beside if world.exists(path)]
    if run.base:
        taken = hub_inputs(run, world, BASE)
        what, without = f"the open weights {run.base.address}", {item.path for item in taken}
        found += _folder(run.base.dir, BASE, world, missing, sha256, what=what, without=without) + taken
    if missing:
        fix = (words or Words(run.name)).to("prep")
        raise DataError(what=f"Not all that {run.name} needs is here.", why="\n".join(missing), fix=fix)
    return found


def told_inputs(run: Run, sizes: list[int]) -> str:
    """What lies in the store by now: files of these sizes, and every data of the run by its manifest's hash. A run on
    open weights may have conversations only, or no data at all."""
    digests = [run.data.manifest_sha256, *(phase.data.manifest_sha256 for phase in run.phases if phase.data)]
    told = ", ".join(dict.fromkeys(digest[:12] for digest in digests if digest))
    text = f"In the store by their hashes: {len(sizes)} files, {format_bytes(sum(sizes))}"
    return f"{text}; data {told}" if told else text


def relocated(run: Run) -> Run:
    """Paths as they are on the instance, where the run directory and the data folder lie side by side."""
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, dir=f"../{DATA_DIR}"),
        phases=[_phase_there(phase, run) for phase in run.phases],
        base=dataclasses.replace(run.base, dir=f"../{DATA_DIR}/{BASE}") if run.base else None,
    )


def _phase_there(phase: Phase, run: Run) -> Phase:
    if phase.data:
        there = dataclasses.replace(phase.data, dir=f"../{DATA_DIR}/{phase.kind}")
        phase = dataclasses.replace(phase, data=there)
    if phase.init_from:
        phase = dataclasses.replace(phase, init_from=f"../{DATA_DIR}/{_start_name(phase)}")
    if phase.init_base:
        beside = BASE if _is_beside_base(phase, run) else _beside_name(phase)
        phase = dataclasses.replace(phase, init_base=f"../{DATA_DIR}/{beside}")
    if phase.rl:
        tasks = [
            dataclasses.replace(
                task,
                file=_task_name(number, task.file),
                val_file=_task_name(number, task.val_file),
                reward=_task_name(number, task.reward),
            )
            for number, task in enumerate(phase.rl.tasks)
        ]
        phase = dataclasses.replace(phase, rl=dataclasses.replace(phase.rl, tasks=tasks))
    return phase


def _of_phase(
    phase: Phase, run: Run, world: World, missing: list[str], sha256: Callable[[str], str]
) -> Iterator[RunInput]:
    if phase.data:
        yield from _prepared(phase, world, missing)
    if phase.init_from:
        what = f"the weights that {phase.kind} starts from"
        yield from _folder(phase.init_from, _start_name(phase), world, missing, sha256, what=what)
    if phase.init_base and not _is_beside_base(phase, run):
        what = f"the weights of the adapter that {phase.kind} starts from"
        yield from _folder(phase.init_base, _beside_name(phase), world, missing, sha256, what=what)
    for number, task in enumerate(phase.rl.tasks if phase.rl else []):
        for name in _RL_FILES:
            path = getattr(task, name)
            if path and not world.exists(path):
                missing.append(f"{path}: a file of the tasks of rl")
            elif path:
                yield RunInput(_task_name(number, path), path, getattr(task, f"{name}_sha256"))


def _prepared(phase: Phase, world: World, missing: list[str]) -> Iterator[RunInput]:
    assert phase.data is not None, "asked of a phase that reads the run's own text"
    folder, path = phase.data.dir, os.path.join(phase.data.dir, names.MANIFEST)
    if not phase.data.manifest_sha256 or not world.exists(path):
        missing.append(f"{path}: the data of {phase.kind} is not prepared")
        return
    yield RunInput(f"{phase.kind}/{names.MANIFEST}", path, phase.data.manifest_sha256)
    manifest = codec.loads(DataManifest, world.read(path))
    files = [
        (name, digest) for split in manifest.splits.values() for s in split.shards for name, _, digest in s.files()
    ]
    if phase.data.kind == "text":
        files.append((names.TOKENIZER, manifest.tokenizer_sha256))
    for name, digest in files:
        source = os.path.join(folder, name)
        if not world.exists(source):
            missing.append(f"{source}: a shard of {phase.kind}")
        yield RunInput(f"{phase.kind}/{name}", source, digest)


def _folder(
    folder: str,
    into: str,
    world: World,
    missing: list[str],
    sha256: Callable[[str], str],
    *,
    what: str,
    without: Collection[str] = (),
) -> list[RunInput]:
    if not folder or not world.is_dir(folder):
        missing.append(f"{folder or what}: {what} are not here")
        return []
    chosen = [name for name in world.walk(folder) if _is_wanted(name) and f"{into}/{name}" not in without]
    paths = [(f"{into}/{name}", os.path.join(folder, name)) for name in chosen]
    return [RunInput(path, source, sha256(source)) for path, source in paths]


def _is_wanted(name: str) -> bool:
    is_top = os.sep not in name and not name.startswith(".")
    return is_top and name.endswith(_WEIGHT_ENDINGS) and name not in _NOT_WEIGHTS


def _start_name(phase: Phase) -> str:
    return f"start-{phase.kind}"


def _beside_name(phase: Phase) -> str:
    return f"{_start_name(phase)}-base"


def _is_beside_base(phase: Phase, run: Run) -> bool:
    """An adapter of the open weights that the run brings anyway: they are not sent twice."""
    return run.base is not None and phase.init_base == run.base.dir


def _task_name(number: int, path: str) -> str:
    return f"rl/{number}-{os.path.basename(path)}" if path else ""
