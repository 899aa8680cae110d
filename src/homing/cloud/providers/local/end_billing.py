"""Ends the billing of a local instance: python -I end_billing.py INSTANCE_DIR MARK

    write ended.json atomically -> SIGTERM to everything with the mark -> SIGKILL after a grace period -> exit

`local` and `ssh` put this file into the instance's folder and pass the command to the agent as data. Like the HTTP call
that ends a rented machine, this script is self-contained: it needs neither homing, nor the agent's zip, nor a running
process of ours. That is why it accesses the machine directly, without a World. It must run on Python 3.8.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, Dict, Iterator, Tuple

GRACE_S = 1.0
DEADLINE_S = 20.0


def main(instance_dir: str, mark: str) -> int:
    with contextlib.suppress(OSError):
        # Ignore a full disk here: killing the processes below may free some space.
        write_ended(instance_dir, "agent")
    if not fell(mark):
        return 1
    write_ended(instance_dir, "agent")
    return 0


def fell(mark: str) -> bool:
    """Kill every other process with the mark; return False if any of them survives even SIGKILL."""
    started = time.monotonic()
    num_quiet = 0
    while True:
        others = [pid for pid, found in marked(mark) if found == mark and pid != os.getpid()]
        # Require two empty scans in a row, because the environment of a process is not visible during exec.
        num_quiet = 0 if others else num_quiet + 1
        if num_quiet == 2:
            return True
        waited_s = time.monotonic() - started
        if waited_s > DEADLINE_S:
            return False
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if waited_s < GRACE_S else signal.SIGKILL)
        time.sleep(0.2)


def write_ended(instance_dir: str, by: str) -> None:
    path = os.path.join(instance_dir, "ended.json")
    if os.path.exists(path):
        return  # the first end counts
    body = {"schema": "homing.local-ended/1", "ended_at": time.time(), "by": by, **boot_clock()}
    write_whole(path, json.dumps(body).encode())


def boot_clock() -> Dict[str, Any]:
    """Return the boot clock and boot id, to measure the billed time even if the wall clock is changed.

    This is a copy of the function in wire/control_files.py, which is not available here.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    return {"boottime": time.monotonic() if clock is None else time.clock_gettime(clock), "boot_id": boot_id}


def write_whole(path: str, data: bytes) -> None:
    """Write a file atomically: write a temporary file, sync and rename it, then sync the folder."""
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def marked(prefix: str) -> Iterator[Tuple[int, str]]:
    """Yield the pid and mark of each live process that has a mark starting with `prefix`."""
    wanted = f"HOMING_MARK={prefix}"
    if os.path.isdir("/proc/self"):
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    entries = file.read().split(b"\0")
                with open(f"/proc/{name}/stat", "rb") as file:
                    state = file.read().rsplit(b")", 1)[1].split()[0]
            except (OSError, IndexError):
                continue  # the process has ended or belongs to a different user
            for entry in entries:
                if entry.startswith(wanted.encode()) and state not in (b"Z", b"X"):
                    yield int(name), entry.split(b"=", 1)[1].decode("utf-8", "replace")
        return
    listing = subprocess.run(
        ["ps", "-axEww", "-o", "pid=,command="], stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S
    )
    for line in listing.stdout.decode("utf-8", "replace").splitlines():
        for word in line.split():
            if word.startswith(wanted):
                yield int(line.split()[0]), word.split("=", 1)[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
