"""Finds a run's inputs other than its shared text: the data of individual phases, initial weights, and task files.

    travelling(run)   all these files with their hashes, recorded in run.json so that another computer can send them too
    relocated(run)    the run as the instance reads it: on the instance, these files are below ../data
    Hashes            a cache of hashes of large local files, so that open weights are not hashed on every launch
    push_object       pushes bytes into the store, as objects/<sha256>
    DryStore          the store for --dry-run: it reads as usual, but only records what would be pushed

Open weights may come from the Hub instead (`hub_weights`). Missing files are reported before anything is rented.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

from homing import progress
from homing.cloud.artifacts.hub_weights import hub_inputs
from homing.cloud.commands_to_type import Words
from homing.cloud.home import Home
from homing.errors import DataError, IntegrityError, StoreError
from homing.store.base import Entries, Entry, Files, Keys, Store
from homing.units import format_bytes
from homing.wire import codec, file_names
from homing.wire.run_json import Phase, Run, RunInput
from homing.wire.shard_manifest import DataManifest
from homing.world import World

__all__ = [
    "DATA_DIR",
    "TOKENIZER_EXTRAS",
    "DryStore",
    "Hashes",
    "describe_inputs",
    "object_key",
    "push_object",
    "read_object",
    "relocated",
    "travelling",
]

DATA_DIR = "data"
TOKENIZER_EXTRAS = (file_names.TOKENIZER_CONFIG, file_names.CHAT_TEMPLATE, file_names.TURNS)  # no manifest lists them
BASE = "base"
_RL_FILES = ("file", "val_file", "reward")
# From a weights folder, only the files needed to load the weights are sent: no optimizer state, samples or logs.
_WEIGHT_ENDINGS = (".safetensors", ".json", ".jinja")
_NOT_WEIGHTS = (file_names.OPTIMIZER, file_names.STATE)
_HASH_FILE = ("cache", "hashes.json")
_LEAST_HASHED_BYTES = 1 << 20  # hashes of smaller files are not cached, because hashing is as fast as a lookup
_SETTLED_S = 2.0  # hashes of newer files are not cached, because they may change again without a new timestamp
_MOST_HASHES = 2000  # maximum number of cached hashes; the oldest are dropped first


def travelling(
    run: Run, world: World, sha256: Callable[[str], str] | None = None, *, words: Words | None = None
) -> list[RunInput]:
    """Return the inputs of a run whose paths are on this computer. Raises a DataError that lists everything missing.

    `sha256` returns a file's hash, for example from a cache (`Hashes`). By default, each file is read and hashed.
    """
    missing: list[str] = []
    sha256 = sha256 or world.sha256
    found = [item for phase in run.phases for item in _of_phase(phase, run, world, missing, sha256)]
    extra = [(name, os.path.join(run.data.dir, name)) for name in TOKENIZER_EXTRAS]
    found += [RunInput(name, path, sha256(path)) for name, path in extra if world.exists(path)]
    if run.base:
        taken = hub_inputs(run, world, BASE)
        what, without = f"the open weights {run.base.address}", {item.path for item in taken}
        found += _folder(run.base.dir, BASE, world, missing, sha256, what=what, without=without) + taken
    if missing:
        fix = (words or Words(run.name)).to("prep")
        raise DataError(what=f"Some inputs of {run.name} are missing.", why="\n".join(missing), fix=fix)
    return found


def describe_inputs(run: Run, sizes: list[int]) -> str:
    """Describe the inputs in the store: the number and size of the files, and the manifest hash of each dataset.

    There may be no dataset: a run on open weights may use only conversations, or no data at all.
    """
    digests = [run.data.manifest_sha256, *(phase.data.manifest_sha256 for phase in run.phases if phase.data)]
    hashes = ", ".join(dict.fromkeys(digest[:12] for digest in digests if digest))
    text = f"Inputs in the store: {len(sizes)} files, {format_bytes(sum(sizes))}"
    return f"{text}; data {hashes}" if hashes else text


def relocated(run: Run) -> Run:
    """Return the run with the paths used on the instance, where the data folder is next to the run directory."""
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
        base = BASE if _uses_run_base(phase, run) else _base_name(phase)
        phase = dataclasses.replace(phase, init_base=f"../{DATA_DIR}/{base}")
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
    if phase.init_base and not _uses_run_base(phase, run):
        what = f"the weights of the adapter that {phase.kind} starts from"
        yield from _folder(phase.init_base, _base_name(phase), world, missing, sha256, what=what)
    for number, task in enumerate(phase.rl.tasks if phase.rl else []):
        for name in _RL_FILES:
            path = getattr(task, name)
            if path and not world.exists(path):
                missing.append(f"{path}: a file of an RL task is missing")
            elif path:
                yield RunInput(_task_name(number, path), path, getattr(task, f"{name}_sha256"))


def _prepared(phase: Phase, world: World, missing: list[str]) -> Iterator[RunInput]:
    assert phase.data is not None, "this phase reads the run's own text"
    folder, path = phase.data.dir, os.path.join(phase.data.dir, file_names.MANIFEST)
    if not phase.data.manifest_sha256 or not world.exists(path):
        missing.append(f"{path}: the data for phase {phase.kind} is not prepared")
        return
    yield RunInput(f"{phase.kind}/{file_names.MANIFEST}", path, phase.data.manifest_sha256)
    manifest = codec.loads(DataManifest, world.read(path))
    files = [
        (name, digest) for split in manifest.splits.values() for s in split.shards for name, _, digest in s.files()
    ]
    if phase.data.kind == "text":
        files.append((file_names.TOKENIZER, manifest.tokenizer_sha256))
    for name, digest in files:
        source = os.path.join(folder, name)
        if not world.exists(source):
            missing.append(f"{source}: a shard of phase {phase.kind} is missing")
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
        missing.append(f"{folder or what}: {what} are missing")
        return []
    chosen = [name for name in world.walk(folder) if _is_wanted(name) and f"{into}/{name}" not in without]
    paths = [(f"{into}/{name}", os.path.join(folder, name)) for name in chosen]
    return [RunInput(path, source, sha256(source)) for path, source in paths]


def _is_wanted(name: str) -> bool:
    is_top = os.sep not in name and not name.startswith(".")
    return is_top and name.endswith(_WEIGHT_ENDINGS) and name not in _NOT_WEIGHTS


def _start_name(phase: Phase) -> str:
    return f"start-{phase.kind}"


def _base_name(phase: Phase) -> str:
    return f"{_start_name(phase)}-base"


def _uses_run_base(phase: Phase, run: Run) -> bool:
    """Return True if the adapter's base model is the run's own open weights, so that they are not sent twice."""
    return run.base is not None and phase.init_base == run.base.dir


def _task_name(number: int, path: str) -> str:
    return f"rl/{number}-{os.path.basename(path)}" if path else ""


# --- hashes of large local files ---
#
#     path, size, mtime and ctime (ns), inode  ->  $HOMING_HOME/cache/hashes.json  ->  sha256
#
# This is only a cache. A file is hashed again while it is pushed to a store, and a lost cache is rebuilt.


class Hashes:
    """Gives a command access to the file hash cache. Saves new hashes immediately, in case the process is killed."""

    def __init__(self, home: Home) -> None:
        self._world, self._path = home.world, home.path.joinpath(*_HASH_FILE)
        self._known: dict[str, Any] | None = None

    def sha256(self, path: str) -> str:
        size, written_ns, *_ = stamp = self._world.stamp(path)
        if size < _LEAST_HASHED_BYTES:
            return self._world.sha256(path)
        full = os.path.abspath(path)
        known = self._read().get(full)
        if known is not None and known["stamp"] == list(stamp):
            return str(known["sha256"])
        with progress.working(f"Hashing {os.path.basename(path)}, {format_bytes(size)}"):
            digest = self._world.sha256(path)
        is_settled = written_ns / 1e9 + _SETTLED_S < self._world.now()
        if is_settled and self._world.stamp(path) == stamp:
            self._keep(full, {"stamp": list(stamp), "sha256": digest})
        return digest

    def _read(self) -> dict[str, Any]:
        if self._known is None:
            self._known = {}
            try:
                files = json.loads(self._world.read(self._path))["files"]
                self._known = {name: known for name, known in files.items() if {"stamp", "sha256"} <= set(known)}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                pass  # the cache is missing or unreadable, so start a new one
        return self._known

    def _keep(self, full: str, known: dict[str, Any]) -> None:
        files = self._read()
        files.pop(full, None)
        files[full] = known  # inserted again at the end, so that the newest entries are last
        for name in list(files)[: max(0, len(files) - _MOST_HASHES)]:
            del files[name]
        try:
            self._world.mkdir(self._path.parent)
            self._world.write(self._path, json.dumps({"schema": "homing.hashes/1", "files": files}, indent=1).encode())
        except OSError:
            return  # for example, the disk is full or read-only; the next command then hashes the file again


# --- content-addressed objects in the store: objects/<sha256> ---
#
# An object's key is its hash, which others may know in advance, so anyone with write access to the store could have put
# a wrong object there. So an existing object is hashed here, and rewritten if the hash differs. The instance verifies
# each object before use anyway, but without this check, a wrong object would make the launch fail.


def object_key(sha256: str) -> str:
    return f"{file_names.STORE_OBJECTS}/{sha256}"


def push_object(store: Store, data: bytes) -> str:
    """Make sure that the store contains these bytes under their hash, and return the hash."""
    digest = hashlib.sha256(data).hexdigest()
    key = object_key(digest)
    # Try to create the object without checking first, because a check fails in a store that was never written to.
    if not store.create_if_absent(key, data) and store.sha256(key) != digest:
        store.put_bytes(key, data)
    return digest


def read_object(store: Store, sha256: str) -> bytes:
    """Return the bytes with this hash; raises IntegrityError if the object has different content."""
    data = store.read(object_key(sha256))
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise IntegrityError(
            what=f"{object_key(sha256)} in {store.url} was replaced.",
            why=f"Its sha256 is {found}, but its name says {sha256}. Someone else may be writing to this store.",
            fix=f"Remove it, then launch again: homing store rm {object_key(sha256)} --store {store.url}",
        )
    return data


# --- the store for --dry-run ---


class DryStore:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.url, self.pace_s, self.batch_files = store.url, store.pace_s, store.batch_files
        self.progress = store.progress
        self.would_put: list[str] = []

    def put(self, key: str, path: str) -> Entry:
        self.would_put.append(key)
        return Entry(key, 0)

    def put_many(self, files: Files) -> Entries:
        return [self.put(key, path) for key, path in files]

    def put_bytes(self, key: str, data: bytes) -> Entry:
        self.would_put.append(key)
        return Entry(key, len(data), hashlib.sha256(data).hexdigest())

    def create_if_absent(self, key: str, data: bytes) -> bool:
        self.would_put.append(key)
        return True

    def delete(self, key: str) -> None:
        self.would_put.append(key)

    def delete_many(self, keys: Keys) -> None:
        self.would_put += keys

    def exists(self, key: str) -> bool:
        try:
            return self._store.exists(key)
        except StoreError:
            return False  # the first real push creates a store that does not exist yet

    def get(self, key: str, path: str, sha256: str | None = None) -> None:
        self._store.get(key, path, sha256)

    def read(self, key: str) -> bytes:
        return self._store.read(key)

    def sha256(self, key: str) -> str:
        return self._store.sha256(key)

    def is_same(self, key: str, path: str) -> bool:
        return self._store.is_same(key, path)

    def list(self, prefix: str) -> Entries:
        return self._store.list(prefix)
