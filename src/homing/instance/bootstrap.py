"""Prepares an instance: checks that the machine matches what was rented, and installs what the trainer needs.

    directories -> disk -> gpu -> code -> environment -> compiler -> probe        then the agent fetches the inputs

This program runs as `python -m homing.instance.bootstrap boot.json`, straight from the uploaded wheel. It is a separate
process, so that the agent can still enforce the limits if a stage hangs or runs out of memory. An event reports the
name and duration of each stage. A failed stage ends the run without a retry. A stage that crashes this process is
started at most MAX_TRIES times. The program needs only Python 3.8's standard library. If the machine's Python is too
old to train or cannot create environments, the program installs uv, which finds or downloads a suitable Python.
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

from homing.instance.agent.folder import Folder
from homing.redact import redact
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, Bootstrap
from homing.wire.event_lines import Outcome
from homing.world import HttpRequest, NetworkError, World

__all__ = ["StageFailed", "main", "run"]

# file in the work folder that records the current stage, the number of starts per stage, and any problem
NOTE = "bootstrap.json"
MAX_TRIES = 3
INSTALL_S, PROBE_S = 1800.0, 60.0
PAUSES_S = (10.0, 30.0)  # pauses before retrying to install packages or a Python
MIN_PYTHON = [3, 11]
PYTHON, MIN_UV = ">=3.11,<3.13", (0, 8)  # the Python versions that uv finds or downloads if python3 is too old
CHECK_BYTES = 1 << 20
# Every package must match its sha256 in boot.json. Nothing is built from source, because build dependencies have no
# hashes there.
VERIFIED = ("--require-hashes", "--only-binary", ":all:")
# Torch is the one package that may be installed without a hash check. If the driver is too old for PyPI's torch, torch
# comes from PyTorch's index for the driver's CUDA version, and boot.json has no hashes for that index. The version
# named in boot.json is tried first, then any in the allowed range. The stage reports which one was installed.
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
    spec, folder = boot.bootstrap or Bootstrap(), Folder(boot, world)
    path = folder.path(NOTE)
    note: Dict[str, Any] = json.loads(world.read(path)) if world.exists(path) else {"tries": {}}
    if note.get("is_whole") or note.get("problem"):
        # An earlier bootstrap on this machine already succeeded or failed.
        return 0 if note.get("is_whole") else 1
    for stage in (_directories, _disk, _gpu, _code, _environment, _compiler, _probe):
        name, began = stage.__name__[1:], world.monotonic()
        note["stage"], note["tries"][name] = name, note["tries"].get(name, 0) + 1
        try:
            world.write(path, json.dumps(note).encode())
            if note["tries"][name] > MAX_TRIES:
                raise StageFailed(f"it started {MAX_TRIES} times and never finished")
            done = stage(boot, spec, world)
        except (StageFailed, OSError, ValueError, zipfile.BadZipFile) as exc:
            problem = redact(f"Stage {name} failed after {world.monotonic() - began:.0f} s: {exc}")
            folder.event("stage_failed", problem, stage=name)
            world.write(path, json.dumps({**note, "problem": problem}).encode())
            folder.write(file_names.OUTCOME, Outcome("failed", problem, 1, "", 0, world.now()))
            if boot.mailbox:  # report the problem by HTTP, because the sync program may not be installed yet
                with contextlib.suppress(NetworkError):
                    # Set a content type: urllib's default is the content type of a form, so a store might parse the
                    # body as form fields.
                    world.http(HttpRequest("PUT", boot.mailbox, {"content-type": "text/plain"}, problem.encode()))
            return 1
        seconds, note["tries"][name] = round(world.monotonic() - began, 2), 0
        folder.event("stage_done", f"Stage {name}: {done} ({seconds:g} s)", stage=name, seconds=seconds)
    world.write(path, json.dumps({"is_whole": True}).encode())
    return 0


def _directories(boot: Boot, spec: Bootstrap, world: World) -> str:
    wanted = [os.path.join(boot.work_dir, name) for name in ("run", "data")] + spec.folders
    for folder in wanted:
        world.mkdir(folder)
    return f"{len(wanted)} folders ready"


def _disk(boot: Boot, spec: Bootstrap, world: World) -> str:
    for folder in dict.fromkeys([boot.work_dir, *spec.folders]):
        path = os.path.join(folder, f".check-{boot.mark}")
        data = world.random_hex(32).encode() * (CHECK_BYTES // 32)
        world.write(path, data)
        is_same = world.read(path) == data
        world.remove(path)
        if not is_same:
            raise StageFailed(f"{folder} does not read back as written: the data differs")
    free = world.free_bytes(boot.work_dir)
    if free < spec.disk_bytes:
        raise StageFailed(f"{boot.work_dir} has {free / 1e9:.1f} GB free; the run needs {spec.disk_bytes / 1e9:.1f} GB")
    return f"{free / 1e9:.1f} GB free, writable"


def _gpu(boot: Boot, spec: Bootstrap, world: World) -> str:
    if not spec.num_gpus:
        return "no GPU was rented"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = [line.strip() for line in _run(world, query, 30.0).splitlines() if line.strip()]
    plain = [re.sub("[^a-z0-9]", "", line.split(",")[0].lower()) for line in found]
    fitting = [name for name in plain if not spec.gpu_names or any(known in name for known in spec.gpu_names)]
    if len(fitting) < spec.num_gpus:
        wanted = f"{spec.num_gpus} x {' or '.join(spec.gpu_names) or 'any GPU'}"
        raise StageFailed(f"rented {wanted}, but the driver shows: {'; '.join(found) or 'nothing'}")
    return "; ".join(found)


def _code(boot: Boot, spec: Bootstrap, world: World) -> str:
    if not spec.code:
        return "homing is installed"
    wheel, sign = os.path.join(boot.work_dir, spec.code), os.path.join(spec.code_dir, ".whole")
    if world.exists(sign):
        return "already unpacked"
    if world.sha256(wheel) != spec.code_sha256:
        raise StageFailed(f"{spec.code} is not the file that was sent: its sha256 differs")
    with zipfile.ZipFile(io.BytesIO(world.read(wheel))) as archive:
        for name in archive.namelist():
            path = os.path.join(spec.code_dir, name)
            if os.path.isabs(name) or ".." in name.split("/"):
                raise StageFailed(f"{spec.code} contains {name!r}, which is outside its folder")
            world.mkdir(os.path.dirname(path))
            world.write(path, archive.read(name))
    world.write(sign, b"")
    return f"unpacked, {spec.code_sha256[:12]}"


def _environment(boot: Boot, spec: Bootstrap, world: World) -> str:
    if not spec.env_dir:
        return f"existing interpreter: {boot.trainer_argv[0]}"
    first, torch, folder = (*_run(world, [spec.python, "-c", ASK], 60.0).splitlines(), "", "")[:3]
    version = first.split()
    is_old = [int(part) for part in version] < MIN_PYTHON
    least, below = spec.torch_range or ("", "")
    older = _older_cuda(spec, world)
    uses_image_torch = (
        not is_old and bool(torch) and _parts(least) <= _parts(torch) < _parts(below) and _runs(torch, older)
    )
    older = "" if uses_image_torch else older
    ours = f"torch>={least},<{below}" if older else spec.torch
    wanted = "\n".join([*spec.lock, *([] if uses_image_torch or older else spec.torch_lock)]) + "\n"
    image = f"{torch} in {folder}" if uses_image_torch else f"{ours} {older}"
    print_ = hashlib.sha256(f"{spec.python} {version} {image}\n{wanted}".encode()).hexdigest()[:16]
    env, is_new = f"{spec.env_dir}{print_}", False
    whole = os.path.join(env, ".whole")
    if not world.exists(whole):
        world.mkdir(os.path.dirname(env))
        _take_turn(env + ".lock", world)
    if not world.exists(whole):  # another process may have created it while this one waited
        is_new = True
        uv = _make_env(spec, env, world, is_old=is_old)
        if uses_image_torch:
            # Append the folder that contains the image's torch (maybe a virtual environment), so that our own packages
            # come first on the path.
            site = os.path.join(env, "lib", f"python{'.'.join(version)}", "site-packages", "image.pth")
            world.write(site, f"import site; site.addsitedir({folder!r})\n".encode())
        world.write(os.path.join(env, "lock.txt"), wanted.encode())
        python, lock = os.path.join(env, "bin", "python"), os.path.join(env, "lock.txt")
        pip = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install", "--no-input"]
        _bring(world, [*pip, *VERIFIED, "-r", lock])
        if older:
            _bring_older_torch(spec, older, pip, ours, world)
        world.write(whole, b"")
    _run(world, ["ln", "-sfn", env, os.path.join(boot.work_dir, "env")], 20.0)
    unhashed = f" for a CUDA {older} driver, from PyTorch's index, without a hash check"
    torch_source = f"the image's torch {torch}" if uses_image_torch else ours + (unhashed if older else "")
    found = f"; Python {PYTHON} from uv, because {spec.python} is {'.'.join(version)}" if is_old else ""
    return f"{'created' if is_new else 'already created'}, {print_}, {torch_source}{found}"


def _older_cuda(spec: Bootstrap, world: World) -> str:
    """Return the driver's CUDA version if it is too old for PyPI's torch to use the GPU; else ""."""
    if not (spec.num_gpus and spec.cuda):
        return ""
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", world.run(["nvidia-smi"], 30.0).out)
    return found.group(1) if found and _parts(found.group(1)) < _parts(spec.cuda) else ""


def _runs(torch: str, older: str) -> bool:
    """Return True if this torch build can use the GPU with a driver for CUDA version `older`; "" allows every build.

    A driver can run builds for its own major version of CUDA and for older versions, but not for a newer major version.
    """
    built_for = re.search(r"\+cu(\d\d)\d", torch)
    return not older or (built_for is not None and int(built_for.group(1)) <= _parts(older)[0])


def _bring_older_torch(spec: Bootstrap, older: str, pip: List[str], ours: str, world: World) -> None:
    """Install torch built for the driver's CUDA version: the version in boot.json, else any in the allowed range.

    Never install a build without CUDA, which would train on the CPU of a machine that was rented for its GPU.
    """
    fitting = [cuda for cuda in spec.older_cuda if _parts(cuda)[0] == _parts(older)[0]]
    if not fitting:
        known = " and ".join(spec.older_cuda)
        raise StageFailed(f"the driver supports only CUDA {older}; torch is available for CUDA {spec.cuda}, {known}")
    indexes = [f"{spec.torch_index}/cu{cuda.replace('.', '')}" for cuda in fitting]
    for wanted in (spec.torch, ours):
        for index in indexes:
            if world.run([*pip, *UNHASHED_TORCH, index, wanted], INSTALL_S).code == 0:
                return
    _bring(world, [*pip, *UNHASHED_TORCH, indexes[0], ours])


def _make_env(spec: Bootstrap, env: str, world: World, *, is_old: bool) -> str:
    """Create the environment; return the path of uv if uv should install the packages, or "" if pip should.

    Ubuntu's Python often cannot create environments. In that case uv creates the environment.
    """
    world.rmtree(env)
    if not is_old:
        if world.run([spec.python, "-m", "venv", env], INSTALL_S).code == 0:
            return "uv" if world.run(["uv", "--version"], 20.0).code == 0 else ""
        world.rmtree(env)
    uv = _uv(spec, world)
    # Keep the Python that uv downloads in a folder next to the environments: environments on a volume outlive this
    # instance and still need that Python.
    uv_env = {**world.environment(), "UV_PYTHON_INSTALL_DIR": os.path.join(os.path.dirname(spec.env_dir), "python")}
    # --clear removes the remains of an interrupted attempt; otherwise uv refuses an existing environment.
    _bring(world, [uv, "venv", "--python", PYTHON if is_old else spec.python, "--clear", env], uv_env)
    return uv


def _uv(spec: Bootstrap, world: World) -> str:
    """Return the path of uv. If the machine's uv is missing or too old, install a pinned version, verified by hash."""
    if _parts(world.run(["uv", "--version"], 20.0).out) >= MIN_UV:
        return "uv"
    folder = os.path.join(os.path.dirname(spec.env_dir), "uv")
    path, pip = os.path.join(folder, "bin", "uv"), [spec.python, "-m", "pip"]
    # Run uv instead of only checking that the file exists: on a volume, uv may have been installed by an instance with
    # a different architecture.
    if world.exists(path) and _parts(world.run([path, "--version"], 20.0).out) >= MIN_UV:
        return path
    if world.run([*pip, "--version"], 60.0).code != 0:
        if not spec.may_add:
            raise StageFailed(
                f"{spec.python} cannot be used, and it has no pip with which to install uv: install uv on the host"
            )
        _add(world, "python3-pip")
    world.write(f"{folder}.txt", f"{spec.uv}\n".encode())
    _bring(world, [*pip, "install", "--no-input", "--upgrade", "--target", folder, *VERIFIED, "-r", f"{folder}.txt"])
    return path


def _add(world: World, *packages: str) -> None:
    """Install system packages with apt-get. Ignore failures, because the caller checks what is installed."""
    world.run([*APT, "update"], 300.0)
    world.run([*APT, "install", "-y", "--no-install-recommends", *packages], 600.0)


def _bring(world: World, argv: List[str], env: Any = None) -> None:
    """Run an install command with retries, so that a short network outage does not make the bootstrap fail.

    pip and uv give up within seconds, but they keep what they have already downloaded for the next try.
    """
    deadline = world.monotonic() + INSTALL_S
    for pause_s in PAUSES_S:
        try:
            _run(world, argv, max(1.0, deadline - world.monotonic()), env)
            return
        except StageFailed:
            world.sleep(pause_s)
    _run(world, argv, max(1.0, deadline - world.monotonic()), env)


def _take_turn(lock: str, world: World) -> None:
    """Acquire the lock, so that two launches on one machine do not create the same environment at once.

    The lock is held until this process ends. Raise StageFailed after waiting for INSTALL_S seconds.
    """
    deadline = world.monotonic() + INSTALL_S
    while not world.lock(lock):
        if world.monotonic() > deadline:
            raise StageFailed(f"another launch on this host has held {lock} for {INSTALL_S:g} s")
        world.sleep(1.0)


def _compiler(boot: Boot, spec: Bootstrap, world: World) -> str:
    """Make sure that a C compiler and Python.h are installed if a GPU was rented.

    Before its first kernel, Triton compiles C code against Python's headers, so training cannot start without them. If
    they cannot be installed, the stage reports that but does not fail, because a newer Triton may not need them.
    """
    if not (spec.num_gpus and spec.probe_argv):
        return "not needed"
    ask = [spec.probe_argv[0], "-c", LACKS]
    lacks = _run(world, ask, 60.0).strip()
    if not lacks:
        return "a C compiler and Python.h are installed"
    if spec.may_add:
        _add(world, "gcc", "libc6-dev", "python3-dev")
        if not _run(world, ask, 60.0).strip():
            return f"installed {lacks} with apt-get"
    return f"{lacks} is missing. If training fails at its first step: install gcc and python3-dev, or use another image"


def _probe(boot: Boot, spec: Bootstrap, world: World) -> str:
    if not spec.probe_argv:
        return "not requested"
    env = {**world.environment(), **boot.env}
    said = _run(world, spec.probe_argv, PROBE_S, env).splitlines()
    figures: Dict[str, Any] = json.loads(said[-1] if said else "")
    if spec.num_gpus and figures.get("device") == "cpu":
        raise StageFailed(f"torch {figures.get('torch')} sees no GPU: the driver is too old or broken")
    slow = [f"{name} {figures.get(name, 0):g} of {least:g}" for name, least in spec.probe_floor.items()
            if not figures.get(name, 0) >= least]  # fmt: skip
    if slow:
        raise StageFailed(f"the instance is far slower than its GPU should be: {', '.join(slow)}")
    return ", ".join(f"{name} {value}" for name, value in figures.items())


def _run(world: World, argv: List[str], timeout_s: float, env: Any = None) -> str:
    done = world.run(argv, timeout_s, env)
    if done.code:
        last = "\n".join((done.err or done.out).strip().splitlines()[-8:])
        raise StageFailed(f"{' '.join(argv[:4])} exited with code {done.code}: {last}")
    return done.out


def _parts(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2])


if __name__ == "__main__":
    sys.exit(main())
