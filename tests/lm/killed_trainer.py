"""Kills a real trainer process with SIGKILL soon after a given checkpoint, however fast or busy the machine is.

The trainer cannot outrun the kill: its first checkpoint after the given one blocks before it is renamed into place.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from homing.wire import file_names

__all__ = ["kill_trainer_after"]

_TRAINER = """
import os, runpy, sys, threading
from homing.wire import file_names

run_dir, phase, last_step = sys.argv[1], sys.argv[2], int(sys.argv[3])
rename = os.rename

def rename_up_to_the_last(source, target, **options):
    step = file_names.parse_step(os.path.basename(target))
    if step is not None and step > last_step and os.path.basename(os.path.dirname(target)) == phase:
        threading.Event().wait()
    rename(source, target, **options)

os.rename = rename_up_to_the_last
sys.argv = ["homing.lm.train", run_dir]
runpy.run_module("homing.lm.train", run_name="__main__", alter_sys=True)
"""


def kill_trainer_after(run_dir: Path, phase: str, step: int, *, timeout_s: float = 120.0) -> None:
    """Train in a process of its own and kill it once the checkpoint of this step exists and before a later one does."""
    reached = run_dir / file_names.CHECKPOINTS / phase / file_names.step_dir(step)
    argv = [sys.executable, "-c", _TRAINER, str(run_dir), phase, str(step)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as child:
        deadline = time.monotonic() + timeout_s
        while not reached.exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        child.kill()
    assert child.returncode == -signal.SIGKILL, "the trainer had ended before it could be killed"
    assert reached.exists(), "the trainer did not reach the checkpoint in time"
    assert not (run_dir / file_names.OUTCOME).exists()
