"""How a local instance ends its own billing: python -I end_billing.py INSTANCE_DIR MARK

    write ended.json (whole or absent) -> SIGTERM everything with the mark -> SIGKILL after a grace -> itself last

`local` copies this file into the instance's folder and hands the command to the agent as data. It stands alone, like
the HTTP call of a rented machine: it needs neither homing, nor its zip, nor any process of ours to be alive or whole.
That is why it is the one file of the control plane that speaks to the machine directly. Python 3.8.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Iterator  # noqa: UP035 (collections.abc.Iterator[int] does not exist in 3.8)

GRACE_S = 1.0
DEADLINE_S = 20.0


def main(instance_dir: str, mark: str) -> int:
    write_ended(instance_dir)
    started = time.monotonic()
    num_quiet = 0
    while True:
        others = [pid for pid in marked(mark) if pid != os.getpid()]
        # Two empty looks: in the midst of its exec a process has no environment that we could see.
        num_quiet = 0 if others else num_quiet + 1
        if num_quiet == 2:
            return 0
        waited_s = time.monotonic() - started
        if waited_s > DEADLINE_S:
            return 1
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if waited_s < GRACE_S else signal.SIGKILL)
        time.sleep(0.2)


def write_ended(instance_dir: str) -> None:
    path = os.path.join(instance_dir, "ended.json")
    if os.path.exists(path):
        return  # the first end counts: billing does not end twice
    aside = f"{path}.tmp-{os.getpid()}"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump({"schema": "homing.local-ended/1", "ended_at": time.time(), "by": "agent"}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    folder = os.open(instance_dir, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def marked(mark: str) -> Iterator[int]:
    wanted = f"HOMING_MARK={mark}"
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
                continue  # it ended while we looked, or it is another person's
            if wanted.encode() in entries and state not in (b"Z", b"X"):
                yield int(name)
        return
    listing = subprocess.run(
        ["ps", "-axEww", "-o", "pid=,command="], stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S
    )
    for line in listing.stdout.decode("utf-8", "replace").splitlines():
        if wanted in line.split():
            yield int(line.split()[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
