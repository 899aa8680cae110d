"""Copy the output of a local trainer to the terminal and to the run's logs/trainer.log, as on a rented instance.

trainer --stdout, stderr--> one thread each --> the terminal, and one file

Neither a closed terminal nor a full disk may block the trainer: its pipes are always drained.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

from homing.cli import output
from homing.cli.terminal import show_bytes
from homing.redact import redact
from homing.wire import file_names

__all__ = ["log_path", "printing"]

# Time to read what is still in the pipes after the trainer has ended. A process that it left behind may hold them open
# forever.
_LAST_LINES_S = 5.0


def log_path(run_dir: Path) -> Path:
    return run_dir / file_names.LOGS / "trainer.log"


@contextlib.contextmanager
def printing(
    child: subprocess.Popen[bytes], run_dir: Path, *, out: TextIO | None, err: TextIO | None
) -> Iterator[None]:
    """Copy the child's output until its last line. `out`, `err`: streams for people; None: only logged."""
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

    def pass_on(self, source: IO[bytes], terminal: TextIO | None) -> None:
        with source:
            for line in source:
                with self._lock:
                    if self._file is not None:
                        with contextlib.suppress(OSError):
                            self._file.write(_redacted(line))
                    terminal = _show(line, terminal)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _redacted(line: bytes) -> bytes:
    """Mask keys. A line without a key is unchanged, byte for byte."""
    text = line.decode("utf-8", "surrogateescape")
    return redact(text).encode("utf-8", "surrogateescape")


def _show(line: bytes, terminal: TextIO | None) -> TextIO | None:
    """Print the line. Return the terminal for the next line: None once its reader has left."""
    if terminal is None:
        return None
    try:
        show_bytes(line, terminal)
    except OSError:
        output.silence(terminal)
        return None
    return terminal
