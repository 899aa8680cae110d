"""Program that is sent to the SSH host with every call: reads a JSON request on stdin and writes a JSON response.

    facts      report the machine's hardware       list       list every instance of one owner
    create     create the folder and files,        describe   describe one instance
               start the first process             log        return the end of the first process's output
    destroy    kill the process tree

    WORK_DIR/<mark>/   instance.json started.json destroy.json ended.json end_billing.py boot.log work/   as on `local`

Nothing is installed and nothing stays in memory: each call is a separate process. Files and secrets are part of the
request, on the encrypted stdin. Secrets go into the environment of the first process and are never written to disk.
This program needs Python 3.8 and end_billing.py, which is sent along as `local_end`. It accesses the machine directly,
without a World.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

try:
    import local_end  # type: ignore[import-not-found]  # on the host: in sys.modules, put there by the start command
except ImportError:
    from homing.cloud.providers.local import end_billing as local_end

Answer = dict[str, Any]
SIGN = "homing-answer: "  # prefix that marks the response, because a login shell may print other lines
LOG_BYTES = 4000
READ_BYTES = 1 << 20
TURN_S = 10.0
KEEP_S = 3 * 86400.0
# Environment variables that an instance inherits: an allowlist, so that no other variables are passed on.
ENV_NAMES = re.compile(
    r"(PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|DYLD_\w+|XDG_RUNTIME_DIR"
    r"|OMP_\w+|MKL_\w+|OPENBLAS_\w+|CUDA_\w+|NVIDIA_\w+|PIP_\w+|UV_\w+|SSL_CERT_\w+|https?_proxy|no_proxy)"
)


def main(order: Answer) -> None:
    try:
        answer = VERBS[order["verb"]](order)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as exc:
        answer = {"error": f"{type(exc).__name__}: {exc}"}
    sys.stdout.write("\n" + SIGN + json.dumps(answer) + "\n")


# --- instances ---


def create(order: Answer) -> Answer:
    """Create an instance. Safe to repeat, because the id is the mark. Concurrent calls wait for each other."""
    if order["proof_path"] and not _has(order["proof_path"], order["proof_sha256"]):
        return {"refused": "store"}
    folder = _folder(order)
    _sweep(order)
    os.makedirs(os.path.join(folder, "work"), exist_ok=True)
    with _turn(folder):
        if _exists(folder, "destroy.json", "ended.json"):
            return {"refused": "destroyed"}
        if not _exists(folder, "instance.json"):
            # Billing begins here, before anything runs. Once this file exists, `list` shows the instance even if this
            # process crashes.
            _write(os.path.join(folder, "instance.json"), dict(order["record"], created_at=time.time()))
        if not _exists(folder, "started.json") and not _pids(order["mark"]):
            _start(order, folder)
    if _exists(folder, "destroy.json"):
        # A destroy was requested after the check above, and it may have scanned for processes before ours started.
        return dict(destroy(order), refused="destroyed")
    return describe(order)


def describe(order: Answer) -> Answer:
    folder, num_pids = _folder(order), len(_pids(order["mark"]))
    answer: Answer = {"mark": order["mark"], "now": time.time(), "folder": folder, "is_running": True}
    try:
        made, ended = _read(folder, "instance.json"), _read(folder, "ended.json")
    except ValueError as exc:
        # The recorded rate and start time are lost, but whether the instance is running is still known, so destroy
        # still works.
        is_over = _exists(folder, "ended.json") and not num_pids
        return dict(answer, state="gone" if is_over else "unknown", detail=f"its record is corrupt: {exc}")
    answer.update(made=made, ended=ended)
    is_asked = _exists(folder, "destroy.json")
    if made is None:
        detail = (
            "processes with this mark are running, but their folder is missing" if num_pids else "never created here"
        )
        return dict(answer, state="unknown" if num_pids else "gone", detail=detail)
    if num_pids:
        return dict(answer, state="destroying" if ended or is_asked else "ready", detail=f"{num_pids} processes")
    if ended:
        return dict(answer, state="gone", detail=f"ended by {ended.get('by', '?')}")
    if is_asked:
        return dict(answer, state="destroying", detail="destroy was requested but has not finished")
    if not _exists(folder, "started.json"):
        return dict(answer, state="booting", detail="created but not started; billing until destroyed")
    return dict(
        answer, state="ready", is_running=False, detail="all its processes have exited; billing until destroyed"
    )


def list_(order: Answer) -> Answer:
    root = _root(order)
    names = set(os.listdir(root) if os.path.isdir(root) else [])
    names |= {mark for _, mark in local_end.marked(order["prefix"])}
    ours = sorted(name for name in names if name.startswith(order["prefix"]))
    found = [describe(dict(order, mark=mark)) for mark in ours]
    return {"instances": [answer for answer in found if answer["state"] != "gone"]}


def destroy(order: Answer) -> Answer:
    folder = _folder(order)
    with contextlib.suppress(OSError):
        # Ignore a full disk, so that the processes are still killed. Writing ended.json may then fail.
        os.makedirs(folder, exist_ok=True)
        with _turn(folder):
            if not _exists(folder, "destroy.json"):
                # Write the file even for an unknown mark, so that a create call in progress finds it and starts
                # nothing.
                _write(os.path.join(folder, "destroy.json"), {"asked_at": time.time()})
    if not local_end.fell(order["mark"]):
        return {"error": f"processes {_pids(order['mark'])} survived SIGKILL"}
    if _exists(folder, "instance.json"):
        local_end.write_ended(folder, "destroy")
    return describe(order)


def log(order: Answer) -> Answer:
    path = os.path.join(_folder(order), "boot.log")
    if not os.path.exists(path):
        return {"text": ""}
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - LOG_BYTES))
        return {"text": file.read().decode("utf-8", "replace")}


# --- hardware ---


def facts(order: Answer) -> Answer:
    root = _root(order)
    near = root
    while not os.path.exists(near):  # a folder that does not exist yet will be on its parent's disk
        near = os.path.dirname(near)
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    rows = [[word.strip() for word in line.split(",")] for line in _out(query).splitlines() if line.count(",") == 2]
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", _out(["nvidia-smi"])) if rows else None
    return {
        "home": os.path.expanduser("~"),
        "root": root,
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_bytes": shutil.disk_usage(near).free,
        "processor": _processor(),
        "gpus": [{"name": name, "mib": int(mib), "driver": driver} for name, mib, driver in rows if mib.isdigit()],
        "cuda": cuda.group(1) if cuda else "",
        "python": platform.python_version(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        model = re.search(r"model name\s*:\s*(.+)", file.read())
        if model:
            return model.group(1).strip()
    return platform.machine() or "processor"


def _out(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


# --- helpers, in the order they are called ---


def _has(path: str, sha256: str) -> bool:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(READ_BYTES)).hexdigest() == sha256
    except OSError:
        return False


def _sweep(order: Answer) -> None:
    """Delete the work folders of instances that ended more than KEEP_S ago.

    A rented machine does not need this, because its disk disappears with it.
    """
    root, prefix = _root(order), order["prefix"]
    for name in os.listdir(root) if os.path.isdir(root) else []:
        ended = os.path.join(root, name, "ended.json")
        if name.startswith(prefix) and os.path.exists(ended) and time.time() - os.path.getmtime(ended) > KEEP_S:
            shutil.rmtree(os.path.join(root, name, "work"), ignore_errors=True)


@contextlib.contextmanager
def _turn(folder: str) -> Iterator[None]:
    """Hold the folder's lock. If it is not free within TURN_S, continue without it, so that destroy never blocks."""
    deadline = time.monotonic() + TURN_S
    with open(os.path.join(folder, "lock"), "w", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released whenever this process ends
                break
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        yield


def _start(order: Answer, folder: str) -> None:
    work = os.path.join(folder, "work")
    for name, data in order["files"].items():
        path = os.path.join(work, name)
        if os.path.commonpath([work, os.path.abspath(path)]) != work:
            raise ValueError(f"{name} is outside the instance's folder")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        local_end.write_whole(path, base64.b64decode(data))
    local_end.write_whole(os.path.join(folder, "end_billing.py"), order["end_billing"].encode())
    env = {name: value for name, value in os.environ.items() if ENV_NAMES.fullmatch(name)}
    env.update(order["env"])
    env.update(order["secrets"])
    with open(os.path.join(folder, "boot.log"), "ab") as out:
        # The first process gets its own session, so that it outlives this program and the SSH connection.
        child = subprocess.Popen(
            order["argv"], env=env, cwd=work, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    child.returncode = 0  # avoids the ResourceWarning about a child process that is still running
    _write(os.path.join(folder, "started.json"), {"started_at": time.time()})


def _root(order: Answer) -> str:
    return os.path.join(os.path.expanduser("~"), os.path.expanduser(order["work_dir"]))


def _folder(order: Answer) -> str:
    if not re.match(r"^homing-[a-z0-9-]+$", order["mark"]):
        raise ValueError(f"{order['mark']!r} is not a valid mark")
    return os.path.join(_root(order), order["mark"])


def _pids(mark: str) -> list[int]:
    # Compare the whole value, because `marked` matches by prefix, and ...-1 is also a prefix of ...-10.
    return [pid for pid, found in local_end.marked(mark) if found == mark and pid != os.getpid()]


def _exists(folder: str, *names: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def _read(folder: str, name: str) -> Any:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def _write(path: str, body: Answer) -> None:
    local_end.write_whole(path, json.dumps(body).encode())


VERBS = {"create": create, "describe": describe, "destroy": destroy, "facts": facts, "list": list_, "log": log}
