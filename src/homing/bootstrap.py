"""Before training: is this the machine that was rented, and does it have what the trainer needs?

    directories -> disk -> gpu -> code -> environment -> compiler -> probe        then the agent fetches the inputs

`python -m homing.bootstrap boot.json`, a process of its own, straight from the wheel that travelled: what it runs may
hang or fill the memory, and the agent's limits go on. Each stage is told by name and seconds; one that failed ends the
run and is not tried again, and one that takes this process down is begun only a few times. Standard library only, and
Python 3.8: where the machine's own is too old to train or makes no environments, uv is brought, which finds or brings
what fits.
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
from homing.redact import redact
from homing.wire import codec, names
from homing.wire.boot import Boot, Bootstrap
from homing.wire.event import Outcome
from homing.world import HttpRequest, NetworkError, World

__all__ = ["StageFailed", "main", "run"]

NOTE = "bootstrap.json"  # in the work folder: the stage, how often each was begun, what went wrong
MAX_TRIES = 3
INSTALL_S, PROBE_S = 1800.0, 60.0
PAUSES_S = (10.0, 30.0)  # before packages, or a Python, are asked for again
MIN_PYTHON = [3, 11]
PYTHON, MIN_UV = ">=3.11,<3.13", (0, 8)  # what uv finds or brings where python3 is too old
CHECK_BYTES = 1 << 20
# Every package is compared with the sha256 that came from home. Sources are not built: what builds them has no hash.
VERIFIED = ("--require-hashes", "--only-binary", ":all:")
# The one exception: torch for a driver older than PyPI's torch comes from PyTorch's index for that CUDA version, whose
# hashes are not known at home. The version of home is asked for first, then any of its range, and the stage says so.
UNHASHED_TORCH = ("--only-binary", ":all:", "--index-url")
ASK = """import sys, importlib.metadata as m
print(*sys.version_info[:2])
found = [d for d in m.distributions() if d.metadata["Name"] == "torch"]
print(*(found and [found[0].version, found[0].locate_file("")]), sep="\\n")"""
LACKS = """import os, shutil, sysconfig
compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
headers = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
print(*(["a C compiler"] if not compiler else []), *(["Python.h"] if not headers else []), sep=" and ")"""
APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120")


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
    for stage in (_directories, _disk, _gpu, _code, _environment, _compiler, _probe):
        name, began = stage.__name__[1:], world.monotonic()
        note["stage"], note["tries"][name] = name, note["tries"].get(name, 0) + 1
        try:
            world.write(path, json.dumps(note).encode())
            if note["tries"][name] > MAX_TRIES:
                raise StageFailed(f"it was begun {MAX_TRIES} times and never came to an end")
            done = stage(boot, told, world)
        except (StageFailed, OSError, ValueError, zipfile.BadZipFile) as exc:
            problem = redact(f"Stage {name} failed after {world.monotonic() - began:.0f} s: {exc}")
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
    is_old = [int(part) for part in version] < MIN_PYTHON
    least, below = told.torch_range or ("", "")
    older = _older_cuda(told, world)
    is_theirs = not is_old and bool(torch) and _parts(least) <= _parts(torch) < _parts(below) and _runs(torch, older)
    older = "" if is_theirs else older
    ours = f"torch>={least},<{below}" if older else told.torch
    wanted = "\n".join([*told.lock, *([] if is_theirs or older else told.torch_lock)]) + "\n"
    image = f"{torch} in {folder}" if is_theirs else f"{ours} {older}"
    print_ = hashlib.sha256(f"{told.python} {version} {image}\n{wanted}".encode()).hexdigest()[:16]
    env, is_new = f"{told.env_dir}{print_}", False
    whole = os.path.join(env, ".whole")
    if not world.exists(whole):
        world.mkdir(os.path.dirname(env))
        _take_turn(env + ".lock", world)
    if not world.exists(whole):  # nobody made it while we waited
        is_new = True
        uv = _make_env(told, env, world, is_old=is_old)
        if is_theirs:  # by its folder, after our own: an image may keep it in an environment of its own
            site = os.path.join(env, "lib", f"python{'.'.join(version)}", "site-packages", "image.pth")
            world.write(site, f"import site; site.addsitedir({folder!r})\n".encode())
        world.write(os.path.join(env, "lock.txt"), wanted.encode())
        python, lock = os.path.join(env, "bin", "python"), os.path.join(env, "lock.txt")
        pip = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install", "--no-input"]
        _bring(world, [*pip, *VERIFIED, "-r", lock])
        if older:
            _bring_older_torch(told, older, pip, ours, world)
        world.write(whole, b"")
    _run(world, ["ln", "-sfn", env, os.path.join(boot.work_dir, "env")], 20.0)
    unhashed = f" for a driver of CUDA {older}, from PyTorch's own index and not checked by hash"
    whose = f"the image's torch {torch}" if is_theirs else ours + (unhashed if older else "")
    found = f"; a Python {PYTHON} by uv, for {told.python} is {'.'.join(version)}" if is_old else ""
    return f"{'made' if is_new else 'made before'}, {print_}, {whose}{found}"


def _older_cuda(told: Bootstrap, world: World) -> str:
    """What the driver knows, where the index's torch is built for a newer CUDA and would see no card; else ""."""
    if not (told.num_gpus and told.cuda):
        return ""
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", world.run(["nvidia-smi"], 30.0).out)
    return found.group(1) if found and _parts(found.group(1)) < _parts(told.cuda) else ""


def _runs(torch: str, older: str) -> bool:
    """Whether a driver that knows only the CUDA version `older` ("": all that we need) runs this torch: of one major
    version every driver runs every build, and a build for a newer one sees no card."""
    built_for = re.search(r"\+cu(\d\d)\d", torch)
    return not older or (built_for is not None and int(built_for.group(1)) <= _parts(older)[0])


def _bring_older_torch(told: Bootstrap, older: str, pip: List[str], ours: str, world: World) -> None:
    """Torch as it is at home, built for a CUDA that the driver runs; else any of its range. Never one without CUDA: it
    would train on the processor of a machine that was rented for its card."""
    fitting = [cuda for cuda in told.older_cuda if _parts(cuda)[0] == _parts(older)[0]]
    if not fitting:
        known = " and ".join(told.older_cuda)
        raise StageFailed(f"the driver knows CUDA {older} only; our torch is built for {told.cuda}, {known}")
    indexes = [f"{told.torch_index}/cu{cuda.replace('.', '')}" for cuda in fitting]
    for wanted in (told.torch, ours):
        for index in indexes:
            if world.run([*pip, *UNHASHED_TORCH, index, wanted], INSTALL_S).code == 0:
                return
    _bring(world, [*pip, *UNHASHED_TORCH, indexes[0], ours])


def _make_env(told: Bootstrap, env: str, world: World, *, is_old: bool) -> str:
    """Returns the uv to install with, or "" for pip. Ubuntu has a Python that makes no environments: then uv does."""
    world.rmtree(env)
    if not is_old:
        if world.run([told.python, "-m", "venv", env], INSTALL_S).code == 0:
            return "uv" if world.run(["uv", "--version"], 20.0).code == 0 else ""
        world.rmtree(env)
    uv = _uv(told, world)
    # A Python that it brings lies beside the environments: on a volume they outlive this machine, and need it.
    beside = {**world.environment(), "UV_PYTHON_INSTALL_DIR": os.path.join(os.path.dirname(told.env_dir), "python")}
    # What a try that was cut short has left is cleared: uv makes no environment over one that is there.
    _bring(world, [uv, "venv", "--python", PYTHON if is_old else told.python, "--clear", env], beside)
    return uv


def _uv(told: Bootstrap, world: World) -> str:
    """The machine's own, where it is new enough, else one version by its pip, checked by hash."""
    if _parts(world.run(["uv", "--version"], 20.0).out) >= MIN_UV:
        return "uv"
    folder = os.path.join(os.path.dirname(told.env_dir), "uv")
    path, pip = os.path.join(folder, "bin", "uv"), [told.python, "-m", "pip"]
    # Asked, not only found: on a volume it outlives its machine, and this one may be of another kind.
    if world.exists(path) and _parts(world.run([path, "--version"], 20.0).out) >= MIN_UV:
        return path
    if world.run([*pip, "--version"], 60.0).code != 0:
        if not told.may_add:
            raise StageFailed(f"{told.python} alone does not do, and it has no pip to bring uv: install uv there")
        _add(world, "python3-pip")
    world.write(f"{folder}.txt", f"{told.uv}\n".encode())
    _bring(world, [*pip, "install", "--no-input", "--upgrade", "--target", folder, *VERIFIED, "-r", f"{folder}.txt"])
    return path


def _add(world: World, *packages: str) -> None:
    """By the system's own means; whoever needs them finds out whether they came."""
    world.run([*APT, "update"], 300.0)
    world.run([*APT, "install", "-y", "--no-install-recommends", *packages], 600.0)


def _bring(world: World, argv: List[str], env: Any = None) -> None:
    """A line that breaks for a minute must not cost a machine; pip and uv give up after seconds, and keep what came."""
    deadline = world.monotonic() + INSTALL_S
    for pause_s in PAUSES_S:
        try:
            _run(world, argv, max(1.0, deadline - world.monotonic()), env)
            return
        except StageFailed:
            world.sleep(pause_s)
    _run(world, argv, max(1.0, deadline - world.monotonic()), env)


def _take_turn(lock: str, world: World) -> None:
    """Two launches on one machine must not make the same environment at once. Ours until this process ends."""
    deadline = world.monotonic() + INSTALL_S
    while not world.lock(lock):
        if world.monotonic() > deadline:
            raise StageFailed(f"another launch here holds {lock} for {INSTALL_S:g} s")
        world.sleep(1.0)


def _compiler(boot: Boot, told: Bootstrap, world: World) -> str:
    """Triton builds a little C against Python's headers before its first kernel: without them a card makes no step.
    What is missing ends nothing here, for a later Triton may do without."""
    if not (told.num_gpus and told.probe_argv):
        return "none is needed"
    ask = [told.probe_argv[0], "-c", LACKS]
    lacks = _run(world, ask, 60.0).strip()
    if not lacks:
        return "a C compiler and Python.h are there"
    if told.may_add:
        _add(world, "gcc", "libc6-dev", "python3-dev")
        if not _run(world, ask, 60.0).strip():
            return f"{lacks} came by apt-get"
    return (
        f"{lacks} is missing. If training fails at its first step: install gcc and python3-dev, or take another image"
    )


def _probe(boot: Boot, told: Bootstrap, world: World) -> str:
    if not told.probe_argv:
        return "not asked for"
    env = {**world.environment(), **boot.env}
    said = _run(world, told.probe_argv, PROBE_S, env).splitlines()
    figures: Dict[str, Any] = json.loads(said[-1] if said else "")
    if told.num_gpus and figures.get("device") == "cpu":
        raise StageFailed(f"torch {figures.get('torch')} sees no card here: its driver is too old for it, or ill")
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
