"""What a trainer here prints: to the terminal as it comes, and into the run's logs/trainer.log, as on a rented machine.

    trainer --stdout, stderr--> a thread each --> the terminal, and one file

Neither a terminal that is gone nor a disk that is full may hold the trainer up: its pipes are emptied all the same.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

from homing.cli import talk
from homing.cli.terminal import show_bytes
from homing.redact import redact
from homing.wire import names

__all__ = ["log_path", "printing"]

# For what is still in the pipes when the trainer has ended. A program that it left behind may hold them open for ever.
_LAST_LINES_S = 5.0


def log_path(run_dir: Path) -> Path:
    return run_dir / names.LOGS / "trainer.log"


@contextlib.contextmanager
def printing(
    child: subprocess.Popen[bytes], run_dir: Path, *, out: TextIO | None, err: TextIO | None
) -> Iterator[None]:
    """For as long as the child lives, and until its last line is told. `out`, `err`: for people; None: only kept."""
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
        self._lock = threading.Lock()  # a line of one stream never lies inside one of the other
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):  # the terminal has it all the same, and metrics.jsonl the numbers
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
    """Only a line with a key in it is changed: the log keeps every other byte."""
    text = line.decode("utf-8", "surrogateescape")
    return redact(text).encode("utf-8", "surrogateescape")


def _show(line: bytes, terminal: TextIO | None) -> TextIO | None:
    """The terminal for the next line: none, once whoever read it has left."""
    if terminal is None:
        return None
    try:
        show_bytes(line, terminal)
    except OSError:
        talk.silence(terminal)
        return None
    return terminal
