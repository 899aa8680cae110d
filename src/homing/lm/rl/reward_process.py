"""Runs one reward.py in a separate process: a line of JSON in, a line of JSON out. Started by `user_reward`.

    argv: FILE, memory in bytes.  First line out: {"ready": true, "not_bounded": [...]} or {"problem": ...}
    then  {"prompt", "completion", "answer"} -> {"reward": 0.5} or {"problem": ..., "line": 12}

    trainer -> supervisor -> (first process of a new namespace, if the system allows one) -> worker: reward.py

The output of print() goes to stderr, so that it cannot be mistaken for a response. The process has limited memory, none
of the trainer's environment variables, and no network access if the system allows dropping it. It exits when its parent
exits. After the worker has exited, the supervisor kills every process that the reward left behind. It can find them,
because Linux reparents orphans to the supervisor, even after setsid(). This file is run by its path, without the homing
package, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

_NEW_USERS_AND_NO_NETWORK = 0x10000000 | 0x40000000  # CLONE_NEWUSER | CLONE_NEWNET
_OWN_PROCESS_NUMBERS = 0x20000000  # CLONE_NEWPID
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_TAKE_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_KILL_S = 5.0  # time limit for killing all descendants, which may start new processes meanwhile
_MOST_FILE_BYTES = 64 * 1024**2


def main() -> None:
    path, memory_bytes = sys.argv[1], int(sys.argv[2])
    not_bounded, has_namespace = isolate()

    def work() -> None:
        judge(path, not_bounded + bound(memory_bytes))

    # The first process of a namespace adopts orphans and ignores signals by default, so it must not run the reward.
    watch_over((lambda: watch_over(work)) if has_namespace else work, is_twice=has_namespace)


def isolate() -> tuple[list[str], bool]:
    """Drop privileges that a reward does not need, and create a process namespace if possible.

    Returns the names of what could not be isolated, and whether a namespace was created. All processes in a namespace
    end together with its first process.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        libc.prctl(_TAKE_ORPHANS, 1)
        if libc.unshare(_NEW_USERS_AND_NO_NETWORK | _OWN_PROCESS_NUMBERS) == 0:
            return [], True
        return ([] if libc.unshare(_NEW_USERS_AND_NO_NETWORK) == 0 else ["network"]), False
    except (OSError, AttributeError):  # not Linux
        return ["network", "life"], False


def watch_over(work: Callable[[], None], *, is_twice: bool = False) -> None:
    """Run `work` in a child, kill all its descendants, and exit with its status.

    `is_twice` means that the child is a supervisor too.
    """
    parent, child = os.getpid(), os.fork()
    if child == 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if parent != 1 and os.getppid() not in (parent, 0):
            os._exit(1)  # the parent exited before PDEATHSIG was set
        work()
        os._exit(0)
    for pipe in (0, 1):
        os.close(pipe)  # close the supervisor's copies, so that the trainer notices immediately when the worker exits
    while True:
        pid, status = os.wait()  # may return an orphan instead, because Linux reparents orphans to this process
        if pid == child:
            break
    if parent != 1:  # when pid 1 of a namespace exits, Linux kills all other processes in the namespace
        kill_descendants(parent, _KILL_S)
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if code > 128 and (is_twice or os.WIFSIGNALED(status)):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            if code - 128 != signal.SIGKILL:
                signal.signal(code - 128, signal.SIG_DFL)
            os.kill(os.getpid(), code - 128)  # the first process of a namespace ignores the signal and continues below
    os._exit(code)


def descendants(pid: int) -> list[int]:
    """Return the pids of all living descendants of `pid`, as listed in /proc; empty if there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(name))
    found, unseen = [], [pid]
    while unseen:
        below = children.pop(unseen.pop(), [])
        found += below
        unseen += below
    return found


def kill_descendants(pid: int, timeout_s: float) -> None:
    """Kill all descendants. Repeat until none is left, because a process that forks quickly would escape one pass."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and (found := descendants(pid)):
        for each in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.002)


def judge(path: str, not_bounded: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

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
                raise ValueError(f"reward() returned {value}, which is not a finite number")
            say({"reward": value})
        except BaseException as error:
            say(problem_of(error, path))


def bound(memory_bytes: int) -> list[str]:
    """Set resource limits; return the names of those that this system does not support."""
    not_bounded = []
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
    """Return the error as a response, with the number of the line in the user's file that caused it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
        lines.append(error.lineno)
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    return {"problem": f"{type(error).__name__}: {text}"[:500], "line": lines[-1] if lines else 0}


if __name__ == "__main__":
    main()
