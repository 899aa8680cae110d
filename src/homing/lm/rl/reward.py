"""A person's own reward.py: `def reward(prompt, completion, answer) -> float`, run where it can do no harm.

    trainer -> a process of its own (reward_process): no keys, no network where that can be had, a bound on memory
            <- a number for each sample, or what went wrong and in which line of the file

One call has a deadline; past it the process is ended with everything it started, and a new one takes its place. A
sample whose reward failed counts for nothing; when all of a step failed, the run stops and says where.
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
from homing.lm.child_process import exchange
from homing.lm.rl.reward_process import kill_descendants

__all__ = ["OwnReward"]

_START_S = 60.0  # importing what a reward imports
_KILL_S = 5.0
_LAST_WORD_S = 2.0
_MOST_ANSWER_BYTES = 1 << 16  # an answer is a number, or a problem in 500 characters
_PROCESS = Path(__file__).with_name("reward_process.py")


class OwnReward:
    """`tell(kind, text)` gets each new problem once. Opened with `with`."""

    def __init__(
        self, path: Path, *, sha256: str, timeout_s: float, memory_bytes: int, tell: Callable[[str, str], None]
    ) -> None:
        self.path, self._timeout_s, self._memory_bytes, self._tell = path, timeout_s, memory_bytes, tell
        self._told: set[str] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        _check(path, sha256)

    def __enter__(self) -> OwnReward:
        # A copy in a folder of its own: what it writes stays there, and editing the file changes no run under way.
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
        """Of (prompt, completion, answer); None where it failed."""
        rewards = [self._judge_one(*one) for one in asked]
        if rewards and all(reward is None for reward in rewards):
            raise RunFailed(
                what=f"{self.path} gave no reward to any of {len(rewards)} samples.",
                why="\n".join(sorted(self._told)),
                fix="Mend the file and start the run anew; checkpoints are safe, but belong to this file.",
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
        if text not in self._told:
            self._told.add(text)
            self._tell("reward_failed", f"warning: a reward failed, and its sample counts for nothing. {text}")

    def _start(self) -> None:
        assert self._folder is not None, "opened with `with`"
        inside = str(Path(self._folder.name) / "reward.py")
        # -I: no variables, no user's packages, not the folder; those installed beside the trainer can be imported.
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
                fix="It needs: def reward(prompt, completion, answer) -> float",
            )
        loose = ", ".join(said["not_bounded"])
        if loose and loose not in self._told:
            self._told.add(loose)
            self._tell("reward_not_bounded", f"{self.path} runs apart, but this system does not bound its {loose}.")

    def _ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        """What it says to one line. A process that is late, gone or talks nonsense is ended."""
        child = self._child
        assert child is not None
        try:
            answer = exchange(child, line, timeout_s=timeout_s, most_bytes=_MOST_ANSWER_BYTES)
            said = _answer(answer)
            if said:
                return said
            problem = "its process said something that is no answer, and was ended"
        except TimeoutError:
            problem = f"no answer within {timeout_s:g} s; its process was ended"
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_LAST_WORD_S)  # for how it ended, before it is ended here
            self._end()
            problem = f"its process ended ({_how_ended(child)})"
        self._end()
        return {"problem": problem, "line": 0}

    def _close(self) -> None:
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _end(self) -> None:
        """With everything that it started, also in sessions of their own: nothing outlives it."""
        child, self._child = self._child, None
        if child is None:
            return
        # The supervisor goes last: as long as it lives, what is orphaned becomes its child and is found here.
        kill_descendants(child.pid, _KILL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        child.wait(timeout=30)


def _answer(line: bytes) -> dict[str, Any]:
    """As `reward_process` says it; nothing where that is not what was said."""
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
            what=f"The reward {path} cannot be read.", why=str(exc), fix="Set reward: in the task to where it is."
        ) from exc
    if sha256 and found != sha256:
        raise DataError(
            what=f"{path} is not the reward that this run was made with.",
            why=f"Its sha256 is {found[:12]}..., run.json says {sha256[:12]}...",
            fix="Put the file back, or begin a run anew with this one.",
        )


def _how_ended(child: subprocess.Popen[bytes]) -> str:
    code = child.poll()
    if code is None:
        return "its output was closed"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
