"""Before training: is this the machine that was rented, and does it have what the trainer needs?

    directories -> disk -> gpu -> code -> environment -> probe        then the agent fetches the inputs

`python -m homing.bootstrap boot.json`, a process of its own, straight from the wheel that travelled: what it runs may
hang or fill the memory, and the agent's limits go on. Each stage is told by name and seconds; one that failed ends the
run and is not tried again, and one that takes this process down is begun only a few times. Standard library only, and
Python 3.8: it says itself that a machine's Python is too old.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import zipfile
from typing import Any, Dict, List, Tuple

from homing.agent.folder import Folder
from homing.wire import codec, names
from homing.wire.boot import Boot, Bootstrap
from homing.wire.event import Outcome
from homing.world import HttpRequest, NetworkError, World

__all__ = ["StageFailed", "main", "run"]

NOTE = "bootstrap.json"  # in the work folder: the stage, how often each was begun, what went wrong
MAX_TRIES = 3
INSTALL_S, PROBE_S = 1800.0, 60.0
PAUSES_S = (10.0, 30.0)  # before packages are asked for again
MIN_PYTHON = [3, 11]
CHECK_BYTES = 1 << 20
ASK = """import sys, importlib.metadata as m
print(*sys.version_info[:2])
found = [d for d in m.distributions() if d.metadata["Name"] == "torch"]
print(*(found and [found[0].version, found[0].locate_file("")]), sep="\\n")"""


class StageFailed(Exception):
    pass


def main() -> int:
    world = World()
    return run(codec.loads(Boot, world.read(sys.argv[-1])), world)


def run(boot: Boot, world: World) -> int:
    told, folder = boot.bootstrap or Bootstrap(), Folder(boot, world)
    path = folder.path(NOTE)
    note: Dict[str, Any] = json.loads(world.read(path)) if world.exists(path) else {"tries": {}}
    if note.get("is_whole") or note.get("problem"):  # an earlier agent here came to the end of it, one way or the other
        return 0 if note.get("is_whole") else 1
    for stage in (_directories, _disk, _gpu, _code, _environment, _probe):
        name, began = stage.__name__[1:], world.monotonic()
        note["stage"], note["tries"][name] = name, note["tries"].get(name, 0) + 1
        try:
            world.write(path, json.dumps(note).encode())
            if note["tries"][name] > MAX_TRIES:
                raise StageFailed(f"it was begun {MAX_TRIES} times and never came to an end")
            done = stage(boot, told, world)
        except (StageFailed, OSError, ValueError, zipfile.BadZipFile) as exc:
            problem = f"Stage {name} failed after {world.monotonic() - began:.0f} s: {exc}"
            folder.event("stage_failed", problem, stage=name)
            world.write(path, json.dumps({**note, "problem": problem}).encode())
            folder.write(names.OUTCOME, Outcome("failed", problem, 1, "", 0, world.now()))
            if boot.mailbox:  # a store that only an installed program could write to is out of reach
                with contextlib.suppress(NetworkError):
                    # With a type: without one it is called a form, and a store may keep its fields, which are none.
                    world.http(HttpRequest("PUT", boot.mailbox, {"content-type": "text/plain"}, problem.encode()))
            return 1
        seconds, note["tries"][name] = round(world.monotonic() - began, 2), 0
        folder.event("stage_done", f"Stage {name}: {done} ({seconds:g} s)", stage=name, seconds=seconds)
    world.write(path, json.dumps({"is_whole": True}).encode())
    return 0


def _directories(boot: Boot, told: Bootstrap, world: World) -> str:
    wanted = [os.path.join(boot.work_dir, name) for name in ("run", "data")] + told.folders
    for folder in wanted:
        world.mkdir(folder)
    return f"{len(wanted)} folders are there"


def _disk(boot: Boot, told: Bootstrap, world: World) -> str:
    for folder in dict.fromkeys([boot.work_dir, *told.folders]):
        path = os.path.join(folder, f".check-{boot.mark}")
        data = world.random_hex(32).encode() * (CHECK_BYTES // 32)
        world.write(path, data)
        is_same = world.read(path) == data
        world.remove(path)
        if not is_same:
            raise StageFailed(f"{folder} does not give back what was written to it")
    free = world.free_bytes(boot.work_dir)
    if free < told.disk_bytes:
        raise StageFailed(f"{free / 1e9:.1f} GB are free in {boot.work_dir}, {told.disk_bytes / 1e9:.1f} GB are needed")
    return f"{free / 1e9:.1f} GB free, writable"


def _gpu(boot: Boot, told: Bootstrap, world: World) -> str:
    if not told.num_gpus:
        return "none was rented"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = [line.strip() for line in _run(world, query, 30.0).splitlines() if line.strip()]
    plain = [re.sub("[^a-z0-9]", "", line.split(",")[0].lower()) for line in found]
    fitting = [name for name in plain if not told.gpu_names or any(known in name for known in told.gpu_names)]
    if len(fitting) < told.num_gpus:
        wanted = f"{told.num_gpus} x {' or '.join(told.gpu_names) or 'any card'}"
        raise StageFailed(f"{wanted} were rented, and the driver shows: {'; '.join(found) or 'nothing'}")
    return "; ".join(found)


def _code(boot: Boot, told: Bootstrap, world: World) -> str:
    if not told.code:
        return "homing is installed"
    wheel, sign = os.path.join(boot.work_dir, told.code), os.path.join(told.code_dir, ".whole")
    if world.exists(sign):
        return "unpacked before"
    if world.sha256(wheel) != told.code_sha256:
        raise StageFailed(f"{told.code} is not the file that left home: its sha256 is another")
    with zipfile.ZipFile(io.BytesIO(world.read(wheel))) as archive:
        for name in archive.namelist():
            path = os.path.join(told.code_dir, name)
            if os.path.isabs(name) or ".." in name.split("/"):
                raise StageFailed(f"{told.code} holds {name!r}, which would lie outside its folder")
            world.mkdir(os.path.dirname(path))
            world.write(path, archive.read(name))
    world.write(sign, b"")
    return f"unpacked, {told.code_sha256[:12]}"


def _environment(boot: Boot, told: Bootstrap, world: World) -> str:
    if not told.env_dir:
        return f"as it is: {boot.trainer_argv[0]}"
    first, torch, folder = (*_run(world, [told.python, "-c", ASK], 60.0).splitlines(), "", "")[:3]
    version = first.split()
    if [int(part) for part in version] < MIN_PYTHON:
        raise StageFailed(f"{told.python} is Python {'.'.join(version)}, and homing needs 3.11")
    least, below = told.torch_range or ("", "")
    is_theirs = bool(torch) and _parts(least) <= _parts(torch) < _parts(below)
    wanted = "\n".join([*told.lock, *([told.torch] if told.torch and not is_theirs else [])]) + "\n"
    image = f"{torch} in {folder}" if is_theirs else ""
    print_ = hashlib.sha256(f"{told.python} {version} {image}\n{wanted}".encode()).hexdigest()[:16]
    env, is_new = f"{told.env_dir}{print_}", False
    whole = os.path.join(env, ".whole")
    if not world.exists(whole):
        world.mkdir(os.path.dirname(env))
        _take_turn(env + ".lock", world)
    if not world.exists(whole):  # nobody made it while we waited
        is_new = True
        world.rmtree(env)
        _run(world, [told.python, "-m", "venv", env], INSTALL_S)
        if is_theirs:  # by its folder, after our own: an image may keep it in an environment of its own
            site = os.path.join(env, "lib", f"python{'.'.join(version)}", "site-packages", "image.pth")
            world.write(site, f"import site; site.addsitedir({folder!r})\n".encode())
        world.write(os.path.join(env, "lock.txt"), wanted.encode())
        python, lock = os.path.join(env, "bin", "python"), os.path.join(env, "lock.txt")
        has_uv = world.run(["uv", "--version"], 20.0).code == 0
        pip = ["uv", "pip", "install", "--python", python] if has_uv else [python, "-m", "pip", "install", "--no-input"]
        _install(world, [*pip, "-r", lock])
        world.write(whole, b"")
    _run(world, ["ln", "-sfn", env, os.path.join(boot.work_dir, "env")], 20.0)
    whose = f"the image's torch {torch}" if is_theirs else told.torch
    return f"{'made' if is_new else 'made before'}, {print_}, {whose}"


def _install(world: World, argv: List[str]) -> None:
    """A line that breaks for a minute must not cost a machine; pip and uv give up after seconds, and keep what came."""
    deadline = world.monotonic() + INSTALL_S
    for pause_s in PAUSES_S:
        try:
            _run(world, argv, max(1.0, deadline - world.monotonic()))
            return
        except StageFailed:
            world.sleep(pause_s)
    _run(world, argv, max(1.0, deadline - world.monotonic()))


def _take_turn(lock: str, world: World) -> None:
    """Two launches on one machine must not make the same environment at once. Ours until this process ends."""
    deadline = world.monotonic() + INSTALL_S
    while not world.lock(lock):
        if world.monotonic() > deadline:
            raise StageFailed(f"another launch here holds {lock} for {INSTALL_S:g} s")
        world.sleep(1.0)


def _probe(boot: Boot, told: Bootstrap, world: World) -> str:
    if not told.probe_argv:
        return "not asked for"
    env = {**world.environment(), **boot.env}
    said = _run(world, told.probe_argv, PROBE_S, env).splitlines()
    figures: Dict[str, Any] = json.loads(said[-1] if said else "")
    slow = [f"{name} {figures.get(name, 0):g} of {least:g}" for name, least in told.probe_floor.items()
            if not figures.get(name, 0) >= least]  # fmt: skip
    if slow:
        raise StageFailed(f"the machine is far slower than its card should be: {', '.join(slow)}")
    return ", ".join(f"{name} {value}" for name, value in figures.items())


def _run(world: World, argv: List[str], timeout_s: float, env: Any = None) -> str:
    done = world.run(argv, timeout_s, env)
    if done.code:
        last = "\n".join((done.err or done.out).strip().splitlines()[-8:])
        raise StageFailed(f"{' '.join(argv[:4])} ended with {done.code}: {last}")
    return done.out


def _parts(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2])


if __name__ == "__main__":
    sys.exit(main())
