"""Runs the user's reward.py, `def reward(prompt, completion, answer) -> float`, isolated from the trainer.

    trainer -> a separate process (reward_process): no keys, no network if possible, limited memory
            <- a number for each sample, or the error and its line in the file

Each call has a deadline. If the deadline passes, the process and all its descendants are killed, and a new process is
started for the next call. If the reward function fails on a sample, that sample is ignored. If it fails on all samples
of a step, the run stops and reports why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from homing.errors import DataError, RunFailed
from homing.lm.ask_child_process import exchange
from homing.lm.rl.reward_process import kill_descendants

__all__ = ["OwnReward"]

_START_S = 60.0  # time limit for starting the process, including the imports in reward.py
_KILL_S = 5.0
_LAST_WORD_S = 2.0
_MOST_ANSWER_BYTES = 1 << 16  # maximum size of a response: a reward, or an error message of up to 500 characters
_PROCESS = Path(__file__).with_name("reward_process.py")


class OwnReward:
    """A context manager that runs the user's reward function. `notify(kind, text)` is called once for each problem."""

    def __init__(
        self, path: Path, *, sha256: str, timeout_s: float, memory_bytes: int, notify: Callable[[str, str], None]
    ) -> None:
        self.path, self._timeout_s, self._memory_bytes, self._notify = path, timeout_s, memory_bytes, notify
        self._reported: set[str] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        _check(path, sha256)

    def __enter__(self) -> OwnReward:
        # Run a copy of reward.py in a temporary folder, so that files it writes stay there, and editing the original
        # does not affect the run.
        self._folder = tempfile.TemporaryDirectory(prefix="homing-reward-")
        try:
            (Path(self._folder.name) / "reward.py").write_bytes(self.path.read_bytes())
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def judge(self, asked: Sequence[tuple[str, str, str]]) -> list[float | None]:
        """Return the reward for each (prompt, completion, answer), or None where the reward failed."""
        rewards = [self._judge_one(*one) for one in asked]
        if rewards and all(reward is None for reward in rewards):
            raise RunFailed(
                what=f"{self.path} returned no reward for any of {len(rewards)} samples.",
                why="\n".join(sorted(self._reported)),
                fix="Fix the reward file and start a new run. Old checkpoints cannot be resumed with the fixed file.",
            )
        return rewards

    def _judge_one(self, prompt: str, completion: str, answer: str) -> float | None:
        if self._child is None:
            self._start()
        line = json.dumps({"prompt": prompt, "completion": completion, "answer": answer}) + "\n"
        said = self._ask(line.encode(), self._timeout_s)
        if "reward" in said:
            return float(said["reward"])
        where = f"{self.path}, line {said['line']}" if said.get("line") else str(self.path)
        self._problem(f"{where}: {said['problem']}")
        return None

    def _problem(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._notify("reward_failed", f"warning: a reward failed; its sample is ignored. {text}")

    def _start(self) -> None:
        assert self._folder is not None, "use OwnReward in a `with` statement"
        inside = str(Path(self._folder.name) / "reward.py")
        # -I makes Python ignore its environment variables, the user's packages and the working directory. The trainer's
        # packages can still be imported.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-u", str(_PROCESS), inside, str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder.name,
            env={"PATH": os.defpath, "HOME": self._folder.name, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        said = self._ask(b"", _START_S)
        if not said.get("ready"):
            where = f"{self.path}, line {said['line']}" if said.get("line") else str(self.path)
            raise RunFailed(
                what=f"{self.path} cannot be used as a reward.",
                why=f"{where}: {said.get('problem')}",
                fix="Fix the file. It must define: def reward(prompt, completion, answer) -> float",
            )
        loose = ", ".join(said["not_bounded"])
        if loose and loose not in self._reported:
            self._reported.add(loose)
            self._notify(
                "reward_not_bounded",
                f"{self.path} runs in its own process, but this system does not limit its {loose}.",
            )

    def _ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        """Send one line to the process and return its response; kill the process if its response is late or invalid."""
        child = self._child
        assert child is not None
        try:
            answer = exchange(child, line, timeout_s=timeout_s, most_bytes=_MOST_ANSWER_BYTES)
            said = _answer(answer)
            if said:
                return said
            problem = "its process sent an invalid response and was killed"
        except TimeoutError:
            problem = f"no response within {timeout_s:g} s; its process was killed"
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_LAST_WORD_S)  # get its own exit status before `_end` kills what is left
            self._end()
            problem = f"its process exited ({_how_ended(child)})"
        self._end()
        return {"problem": problem, "line": 0}

    def _close(self) -> None:
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _end(self) -> None:
        """Kill the process and all its descendants, even those in other sessions."""
        child, self._child = self._child, None
        if child is None:
            return
        # Kill the supervisor last: while it runs, `kill_descendants` finds orphans, as they become its children.
        kill_descendants(child.pid, _KILL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        child.wait(timeout=30)


def _answer(line: bytes) -> dict[str, Any]:
    """Return the parsed response of `reward_process`, or {} if it is invalid."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    kinds = {"ready": bool, "reward": float, "problem": str}
    is_answer = isinstance(said, dict) and any(isinstance(said.get(name), kind) for name, kind in kinds.items())
    return said if is_answer else {}


def _check(path: Path, sha256: str) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as exc:
        raise DataError(
            what=f"The reward file {path} cannot be read.",
            why=str(exc),
            fix="In the task, set reward: to the path of the reward file.",
        ) from exc
    if sha256 and found != sha256:
        raise DataError(
            what=f"The reward file {path} has changed since this run was created.",
            why=f"Its sha256 is {found[:12]}..., but run.json says {sha256[:12]}...",
            fix="Restore the original file, or start a new run with the changed one.",
        )


def _how_ended(child: subprocess.Popen[bytes]) -> str:
    code = child.poll()
    if code is None:
        return "its output was closed"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
