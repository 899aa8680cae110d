"""Caches compiled code on the machine, for later runs, and in the run directory, for later attempts of the run.

    keep_folders    TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR -> $HOMING_CACHE/compiled, unless already set
    CompileCache    RUN_DIR/compiled/<torch, GPU, shape>.bin, with its sha256 in the .json of the same name

Both caches contain code that will be executed, so they are protected: only the owner can write to the machine's folder,
and the run's file must be in the run directory and match the hash recorded when it was written. That file is never
fetched from a store, because others may be able to write to the store. A cache that does not match is ignored with a
notice, and the code is compiled again, which takes about a minute.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch

from homing.lm.device import describe_device
from homing.lm.train.metrics import Notify
from homing.wire import codec
from homing.wire.codec import record
from homing.wire.run_json import Model

__all__ = ["FOLDER", "CompileCache", "Compiled", "Parts", "keep_folders"]

FOLDER = "compiled"  # name of the cache folder, both in the run directory and in the machine's cache
_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_MOST_BYTES = 256 * 2**20  # maximum size of a cache file that is stored in the run directory


def keep_folders(environment: MutableMapping[str, str]) -> str:
    """Point torch's compile caches at a persistent folder; return a warning for the user, or "".

    Call before anything compiles: torch would otherwise set these variables to a folder below /tmp. On a rented machine
    HOMING_CACHE is set to a disk that outlives the instance, if there is one.
    """
    cache = environment.get("HOMING_CACHE") or os.path.join(
        environment.get("HOMING_HOME") or os.path.expanduser("~/.homing"), "cache"
    )
    folder = os.path.join(cache, FOLDER)
    wanted = {name: os.path.join(folder, part) for name, part in _FOLDERS.items() if not environment.get(name)}
    try:
        for path in wanted.values():
            os.makedirs(path, exist_ok=True)
        if wanted:
            os.chmod(folder, 0o700)  # restrict access, because anyone who can write there can make us run their code
    except OSError as exc:
        return f"warning: the compile cache cannot be kept for the next run: {exc}."
    environment.update(wanted)
    return ""


@dataclass(frozen=True)
class Parts:
    """Counts the graphs that torch needed in this process: those found in the cache, and those newly compiled."""

    num_kept: int = 0
    num_new: int = 0

    @classmethod
    def so_far(cls) -> Parts:
        compiler = sys.modules.get("torch._dynamo.utils")
        if compiler is None:  # nothing has been compiled; do not import the compiler, which takes seconds
            return cls()
        counts = compiler.counters["inductor"]
        return cls(counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"])

    def __sub__(self, before: Parts) -> Parts:
        return Parts(self.num_kept - before.num_kept, self.num_new - before.num_new)

    @property
    def is_warm(self) -> bool | None:
        """True if every graph came from the cache; None if torch compiled nothing."""
        return self.num_new == 0 if self.num_kept + self.num_new else None

    @property
    def sentence(self) -> str:
        if self.is_warm is None:
            return ""
        return f"{self.num_kept} of {self.num_kept + self.num_new} compiled graphs came from the cache."


@record("compiled", 1)
@dataclass(frozen=True)
class Compiled:
    """The contents of compiled/<name>.json: what <name>.bin was compiled for, and its expected sha256."""

    torch: str
    device: str
    shape_sha256: str
    sha256: str
    num_bytes: int
    made_at: float


class CompileCache:
    def __init__(self, run_dir: Path, shape: Model, device: torch.device, notify: Notify) -> None:
        self._dir, self._notify = run_dir / FOLDER, notify
        self._torch, self._device = str(torch.__version__), describe_device(device)
        self._shape = hashlib.sha256(json.dumps(dataclasses.asdict(shape), sort_keys=True).encode()).hexdigest()
        words = re.sub(r"[^A-Za-z0-9.]+", "-", f"torch-{self._torch}-{self._device}").strip("-")
        self._path = self._dir / f"{words}-{self._shape[:12]}.bin"

    def load(self) -> None:
        """Load code that an earlier attempt compiled. After the first step, `Parts` shows whether torch used it."""
        if not self._path.is_file():
            if others := [path.name for path in sorted(self._dir.glob("*.bin"))]:
                text = f"Ignored compile caches for another torch version, GPU or model shape: {', '.join(others)}."
                self._notify("compile_cache_left", text, notice=True)
            return
        try:
            record = codec.loads(Compiled, self._path.with_suffix(".json").read_bytes())
            data = self._path.read_bytes()
        except (OSError, ValueError) as exc:
            self._refuse(f"its metadata cannot be read: {exc}")
            return
        if (record.torch, record.device, record.shape_sha256) != (self._torch, self._device, self._shape):
            self._refuse("its metadata is for another torch version, GPU or model shape")
        elif hashlib.sha256(data).hexdigest() != record.sha256:
            self._refuse("its sha256 does not match its metadata")
        elif torch.compiler.load_cache_artifacts(data) is None:
            self._refuse("torch cannot read it")
        else:
            text = f"Loaded the compile cache of this run: {FOLDER}/{self._path.name}."
            self._notify("compile_cache_loaded", text, sha256=record.sha256, num_bytes=record.num_bytes)

    def save(self, new: Parts) -> None:
        """Save the code compiled in the first step, unless all of it was in the cache already.

        `new` counts the graphs that the step needed.
        """
        if new.is_warm and self._path.is_file():
            return
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return
        data = made[0]
        if len(data) > _MOST_BYTES:
            text = (
                f"The compile cache ({len(data):,} bytes) is too large to store with the run; it stays on this machine."
            )
            self._notify("compile_cache_left", text, notice=True, num_bytes=len(data))
            return
        digest = hashlib.sha256(data).hexdigest()
        record = Compiled(self._torch, self._device, self._shape, digest, len(data), time.time())
        try:
            self._dir.mkdir(exist_ok=True)
            # Write the .json file last: the .bin file is ignored as long as no .json file matches it.
            _write(self._path, data)
            _write(self._path.with_suffix(".json"), codec.dumps(record, indent=1).encode())
        except OSError as exc:
            self._notify("compile_cache_left", f"warning: the compile cache cannot be saved: {exc}.", notice=True)
            return
        text = f"Saved the compile cache: {FOLDER}/{self._path.name}, {len(data):,} bytes."
        self._notify("compile_cache_saved", text, sha256=digest, num_bytes=len(data))

    def _refuse(self, why: str) -> None:
        text = f"warning: {FOLDER}/{self._path.name} is not loaded: {why}. Compiling again."
        self._notify("compile_cache_refused", text, notice=True)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(data)
    os.replace(temporary, path)
