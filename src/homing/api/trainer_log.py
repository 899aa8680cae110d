"""Copy the output of a local trainer to the caller and to the run's logs/trainer.log, as on a rented instance.

trainer --stdout, stderr--> one thread each --> the caller's writers, and one file

Neither a closed terminal nor a full disk may block the trainer: its pipes are always drained.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from homing.redact import redact
from homing.wire import file_names

__all__ = ["Write", "log_path", "printing"]

Write = Callable[[bytes], bool]  # shows one line; False: its reader has left, do not call it again

# Time to read what is still in the pipes after the trainer has ended. A process that it left behind may hold them open
# forever.
_LAST_LINES_S = 5.0


def log_path(run_dir: Path) -> Path:
    return run_dir / file_names.LOGS / "trainer.log"


@contextlib.contextmanager
def printing(child: subprocess.Popen[bytes], run_dir: Path, *, out: Write | None, err: Write | None) -> Iterator[None]:
    """Copy the child's output until its last line. `out`, `err`: what shows its lines; None: only logged."""
    assert child.stdout is not None, "it must be opened with pipes"
    assert child.stderr is not None, "it must be opened with pipes"
    keeper = _Keeper(log_path(run_dir))
    pairs = ((child.stdout, out), (child.stderr, err))
    threads = [threading.Thread(target=keeper.pass_on, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(_LAST_LINES_S)
        keeper.close()


class _Keeper:
    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()  # keeps lines of the two streams from mixing
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):  # the terminal still shows it, and metrics.jsonl has the numbers
            path.parent.mkdir(exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()

    def pass_on(self, source: IO[bytes], write: Write | None) -> None:
        with source:
            for line in source:
                with self._lock:
                    if self._file is not None:
                        with contextlib.suppress(OSError):
                            self._file.write(_redacted(line))
                    if write is not None and not write(line):
                        write = None

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _redacted(line: bytes) -> bytes:
    """Mask keys. A line without a key is unchanged, byte for byte."""
    text = line.decode("utf-8", "surrogateescape")
    return redact(text).encode("utf-8", "surrogateescape")
