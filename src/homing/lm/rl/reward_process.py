"""Runs one reward.py in a process of its own: a line of JSON in, a line of JSON out. Started by `reward`, not imported.

    argv: FILE, memory in bytes.  First line out: {"ready": true, "not_bounded": [...]} or {"problem": ...}
    then  {"prompt", "completion", "answer"} -> {"reward": 0.5} or {"problem": ..., "line": 12}

What it prints goes to stderr, so that no print() of a reward can be taken for an answer. It has no network where the
system lets it be shut off, no environment of the trainer's, so much memory and no more, and ends with its parent.
Standard library only: it is started by its path, without homing.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

_NEW_USERS_AND_NO_NETWORK = 0x10000000 | 0x40000000  # CLONE_NEWUSER | CLONE_NEWNET
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_MOST_FILE_BYTES = 64 * 1024**2


def main() -> None:
    path, memory_bytes = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    not_bounded = bound(memory_bytes)
    try:
        reward = load(path)
    except BaseException as error:
        say(problem_of(error, path))
        return
    say({"ready": True, "not_bounded": not_bounded})
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            value = float(reward(asked["prompt"], asked["completion"], asked["answer"]))
            if not math.isfinite(value):
                raise ValueError(f"reward() returned {value}, which is no finite number")
            say({"reward": value})
        except BaseException as error:
            say(problem_of(error, path))


def bound(memory_bytes: int) -> list[str]:
    """Gives up what a reward does not need; names what this system does not let go of."""
    not_bounded = []
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if libc.unshare(_NEW_USERS_AND_NO_NETWORK) != 0:
            not_bounded.append("network")
    except (OSError, AttributeError):  # not Linux
        not_bounded += ["network", "life"]
    limits = {"memory": (resource.RLIMIT_AS, memory_bytes), "files": (resource.RLIMIT_FSIZE, _MOST_FILE_BYTES)}
    for name, (kind, most) in limits.items():
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):
            not_bounded.append(name)
    return not_bounded


def load(path: str) -> Callable[[str, str, str], Any]:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    space: dict[str, Any] = {"__name__": "reward", "__file__": path}
    exec(compile(text, path, "exec"), space)
    if not callable(space.get("reward")):
        raise TypeError("it defines no function reward(prompt, completion, answer)")
    reward: Callable[[str, str, str], Any] = space["reward"]
    return reward


def problem_of(error: BaseException, path: str) -> dict[str, Any]:
    """In words, with the last line of the person's own file that had a part in it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
        lines.append(error.lineno)
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    return {"problem": f"{type(error).__name__}: {text}"[:500], "line": lines[-1] if lines else 0}


if __name__ == "__main__":
    main()
