"""What compiling made, kept: on this machine for the next run, and beside the checkpoints for this one.

    keep_folders    TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR -> $HOMING_CACHE/compiled, unless a person set them
    CompileCache    RUN_DIR/compiled/<torch, card, shape>.bin, with its sha256 in the .json of the same name

Both hold code that will be run, so it is taken from nowhere else: the folder is its owner's alone, and the file must
lie in the run's own directory and be the one whose hash was written down when it was made. Nobody brings it back out of
a store, which others may be able to write to. What does not fit is left alone aloud; doing without costs a minute and
never ends a run.
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
from homing.lm.train.metrics import Tell
from homing.wire import codec
from homing.wire.codec import record
from homing.wire.run import Model

__all__ = ["FOLDER", "CompileCache", "Compiled", "Parts", "keep_folders"]

FOLDER = "compiled"  # in the run directory, and in the cache of the machine
_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_MOST_BYTES = 256 * 2**20  # of a file that is pushed with the run


def keep_folders(environment: MutableMapping[str, str]) -> str:
    """Before anything compiles: torch would then put its own choice, below /tmp, into these variables.

    Returns what is wrong, for people, or "". HOMING_CACHE is what a rented machine is told, so that the folder lies on
    the disk that outlives it, where there is one.
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
            os.chmod(folder, 0o700)  # whoever can write there can run code here
    except OSError as exc:
        return f"warning: what is compiled here is not kept for the next run: {exc}."
    environment.update(wanted)
    return ""


@dataclass(frozen=True)
class Parts:
    """Graphs that torch compiled so far in this process, by where their code came from."""

    num_kept: int = 0
    num_new: int = 0

    @classmethod
    def so_far(cls) -> Parts:
        compiler = sys.modules.get("torch._dynamo.utils")
        if compiler is None:  # nothing was compiled, and loading it would take seconds
            return cls()
        counts = compiler.counters["inductor"]
        return cls(counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"])

    def __sub__(self, before: Parts) -> Parts:
        return Parts(self.num_kept - before.num_kept, self.num_new - before.num_new)

    @property
    def is_warm(self) -> bool | None:
        """None where torch counted none."""
        return self.num_new == 0 if self.num_kept + self.num_new else None

    @property
    def sentence(self) -> str:
        if self.is_warm is None:
            return ""
        return f"{self.num_kept} of {self.num_kept + self.num_new} parts were in the cache."


@record("compiled", 1)
@dataclass(frozen=True)
class Compiled:
    """compiled/<name>.json: what the .bin beside it is for, and the hash without which it is not loaded."""

    torch: str
    device: str
    shape_sha256: str
    sha256: str
    num_bytes: int
    made_at: float


class CompileCache:
    def __init__(self, run_dir: Path, shape: Model, device: torch.device, tell: Tell) -> None:
        self._dir, self._tell = run_dir / FOLDER, tell
        self._torch, self._device = str(torch.__version__), describe_device(device)
        self._shape = hashlib.sha256(json.dumps(dataclasses.asdict(shape), sort_keys=True).encode()).hexdigest()
        words = re.sub(r"[^A-Za-z0-9.]+", "-", f"torch-{self._torch}-{self._device}").strip("-")
        self._path = self._dir / f"{words}-{self._shape[:12]}.bin"

    def load(self) -> None:
        """Gives torch what an earlier attempt compiled. Whether that was of use, `Parts` tell after the first step."""
        if not self._path.is_file():
            if others := [path.name for path in sorted(self._dir.glob("*.bin"))]:
                text = f"Not used, as it was compiled by another torch, card or shape: {', '.join(others)}."
                self._tell("compile_cache_left", text, aloud=True)
            return
        try:
            told = codec.loads(Compiled, self._path.with_suffix(".json").read_bytes())
            data = self._path.read_bytes()
        except (OSError, ValueError) as exc:
            self._refuse(f"its record cannot be read: {exc}")
            return
        if (told.torch, told.device, told.shape_sha256) != (self._torch, self._device, self._shape):
            self._refuse("its record is of another torch, card or shape")
        elif hashlib.sha256(data).hexdigest() != told.sha256:
            self._refuse("it is not the file whose sha256 was written down")
        elif torch.compiler.load_cache_artifacts(data) is None:
            self._refuse("torch cannot read it")
        else:
            text = f"Loaded what this run compiled before: {FOLDER}/{self._path.name}."
            self._tell("compile_cache_loaded", text, sha256=told.sha256, num_bytes=told.num_bytes)

    def save(self, new: Parts) -> None:
        """After the first step. `new`: what that step compiled; nothing is written where all of it was known."""
        if new.is_warm and self._path.is_file():
            return
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return
        data = made[0]
        if len(data) > _MOST_BYTES:
            text = (
                f"What was compiled is {len(data):,} bytes, too much to travel with the run; it stays on this machine."
            )
            self._tell("compile_cache_left", text, aloud=True, num_bytes=len(data))
            return
        digest = hashlib.sha256(data).hexdigest()
        told = Compiled(self._torch, self._device, self._shape, digest, len(data), time.time())
        try:
            self._dir.mkdir(exist_ok=True)
            # The record last: a file that is not yet the one it speaks of is refused.
            _write(self._path, data)
            _write(self._path.with_suffix(".json"), codec.dumps(told, indent=1).encode())
        except OSError as exc:
            self._tell("compile_cache_left", f"warning: what was compiled cannot be saved: {exc}.", aloud=True)
            return
        text = f"What was compiled lies in {FOLDER}/{self._path.name}, {len(data):,} bytes."
        self._tell("compile_cache_saved", text, sha256=digest, num_bytes=len(data))

    def _refuse(self, why: str) -> None:
        text = f"warning: {FOLDER}/{self._path.name} is not loaded: {why}. It is compiled anew."
        self._tell("compile_cache_refused", text, aloud=True)


def _write(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.aside")
    aside.write_bytes(data)
    os.replace(aside, path)
