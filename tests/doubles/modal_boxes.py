"""A sandbox of the Modal double: its command runs for real, as a process tree in a folder of its own.

The paths that the adapter uses on Modal (its own root, the image's Python) are put into the folder, and `sync` on a
mount is answered by the double: a file in the control folder asks for the commit, and goes when it is done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.doubles.drivers import driver_name
from tests.doubles.modal_volumes import Mount
from tests.doubles.processes import Processes

_SYNC = """#!/bin/sh
# Replaces `sync MOUNT` on a Volume of version 2.
ask={control}/commit-$$
: > "$ask"
tries=0
while [ -e "$ask" ]; do
  tries=$((tries + 1))
  [ $tries -gt 600 ] && exit 1
  sleep 0.05
done
[ -e {control}/refused ] && exit 1
exit 0
"""
_SMI = "#!/bin/sh\ni=0; while [ $i -lt {count} ]; do echo '{name}, 560.35.03'; i=$((i + 1)); done\n"


@dataclass
class Box:
    """The create call of a sandbox, with paths of this computer instead of Modal's."""

    id: str
    folder: Path
    replace: dict[str, str]  # Modal's path -> ours
    argv: list[str]
    env: dict[str, str]
    files: dict[str, bytes]  # path on Modal -> content
    mounts: list[Mount] = field(default_factory=list)
    gpu: tuple[str, int] = ("", 0)
    process: subprocess.Popen[bytes] | None = None

    @property
    def control(self) -> Path:
        return self.folder / "control"

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def here(self, text: str) -> str:
        for reference, ours in self.replace.items():
            text = text.replace(reference, ours)
        return text

    def start(self) -> None:
        self.control.mkdir(parents=True)
        for path, data in self.files.items():
            target = Path(self.here(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            # boot.json alone is text with paths in it; an archive must arrive as it was sent.
            target.write_bytes(self.here(data.decode()).encode() if path.endswith(".json") else data)
        tools = self.folder / "bin"
        tools.mkdir()
        self._tool(tools / "sync", _SYNC.format(control=self.control))
        self._tool(tools / "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # it has what the lock names
        if self.gpu[1]:
            self._tool(tools / "nvidia-smi", _SMI.format(name=driver_name(self.gpu[0]), count=self.gpu[1]))
        env = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "MODAL_TASK_ID": f"ta-{self.id[3:]}",
            "MODAL_IS_REMOTE": "1",
            "MODAL_SANDBOX_ID": self.id,
            **self.env,
            **self._processes.env,
        }
        with (self.folder / "log").open("ab") as log:
            argv = [self.here(word) for word in self.argv]
            where = {"cwd": self.folder, "env": env, "stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            self.process = subprocess.Popen(argv, start_new_session=True, **where)  # type: ignore[call-overload]

    def serve_commits(self, *, is_refused: bool = False) -> None:
        """Whoever asked in the control folder for a commit gets it."""
        for ask in self.control.glob("commit-*"):
            (self.control / "refused").unlink(missing_ok=True)
            if is_refused:
                (self.control / "refused").touch()
            else:
                for mount in self.mounts:
                    mount.commit()
            ask.unlink(missing_ok=True)

    def exit_code(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    def end(self, *, is_lost: bool = False) -> None:
        """All its processes die; what they wrote is committed, unless the machine itself is lost."""
        self._processes.end()
        if self.process is not None:
            self.process.wait(10)
        for mount in self.mounts:
            if not is_lost:
                mount.commit()

    def kill(self, word: str) -> None:
        """Those of its processes with this word in their command: a crash. Its first command lives on."""
        first = self.process.pid if self.process is not None else 0
        for pid in [each for each in self._processes.pids() if each != first]:
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                    os.kill(pid, signal.SIGKILL)

    def processes(self) -> int:
        return len(self._processes.pids())

    def environments(self) -> str:
        """Everything that its processes know: environment and arguments. For canaries."""
        found = []
        for pid in self._processes.pids():
            for part in ("environ", "cmdline"):
                try:
                    found.append(Path(f"/proc/{pid}/{part}").read_bytes().decode("utf-8", "replace"))
                except OSError:
                    continue
        return "\n".join(found)

    @property
    def _processes(self) -> Processes:
        return Processes(f"modal/{self.folder}")

    def _tool(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
