"""The part of `hand_over` that runs on the instance: reads a JSON request from stdin, writes a response to stdout.

    files -> boot.json -> secrets into memory (tmpfs, 0600) -> go        each step is atomic, so it may be repeated

The machine's startup script waits for `go`, loads the secrets into the agent's environment and removes their file. This
module is sent as source code and runs before homing is installed, so it needs only the standard library of Python 3.8
and uses no World.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shlex
import sys
from typing import Any

SIGN = "homing-answer: "  # marks our response among other output of a login shell


def main(order: dict[str, Any]) -> None:
    try:
        answer = receive(order)
    except (OSError, ValueError, KeyError) as exc:
        answer = {"state": "failed", "why": f"{type(exc).__name__}: {exc}"}
    sys.stdout.write("\n" + SIGN + json.dumps(answer) + "\n")


def receive(order: dict[str, Any]) -> dict[str, str]:
    root, work = order["root"], order["work"]
    if os.path.exists(os.path.join(root, "ended")):
        return {"state": "ended", "why": _last_words(os.path.join(root, "boot.log"))}
    if os.path.exists(os.path.join(work, "go")):
        return {"state": "done"}
    if not os.path.exists(os.path.join(root, "ready")):
        said = _last_words(os.path.join(root, "boot.log"))
        return {"state": "early", "why": f"its startup script is not ready: {said}"}
    os.umask(0o077)
    with open(os.path.join(root, "hand-over.lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a concurrent hand-over holds this lock while it writes its files
        if not os.path.exists(os.path.join(work, "go")):
            _take(order, work)
    return {"state": "done"}


def memory_dir(root: str) -> str:
    """Return the folder that keeps the secrets until the agent starts. The startup script computes the same path."""
    return "/dev/shm/homing" + root.replace("/", "-")


def _take(order: dict[str, Any], work: str) -> None:
    for name, data in order["files"].items():
        path = os.path.abspath(os.path.join(work, name))
        if os.path.commonpath([work, path]) != work:
            raise ValueError(f"{name} would be outside the work folder")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _write(path, base64.b64decode(data))
    _write(os.path.join(work, "boot.json"), order["boot"].encode())
    if order["secrets"]:
        _keep(order["secrets"], memory_dir(order["root"]))
    _write(os.path.join(work, "go"), b"")


def _keep(secrets: dict[str, str], folder: str) -> None:
    """Write the secrets as export lines for the shell that starts the agent.

    They are kept only in memory, because on a disk the data could remain after deletion.
    """
    with open("/proc/mounts", encoding="utf-8") as file:
        kinds = {words[1]: words[2] for words in (line.split() for line in file)}
    if kinds.get("/dev/shm") not in ("tmpfs", "ramfs"):
        raise OSError("/dev/shm is not in memory, so secrets cannot be stored safely")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items()]
    _write(os.path.join(folder, "secrets"), "".join(lines).encode())


def _write(path: str, data: bytes) -> None:
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _last_words(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return "; ".join(file.read().strip().splitlines()[-3:]) or "it has written nothing yet"
    except OSError as exc:
        return str(exc)
