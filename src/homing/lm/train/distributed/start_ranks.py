"""Starts and watches one trainer process per GPU, for training on several GPUs of one machine.

    how many   train.num_ranks, or one per GPU; the rows of a step must be divisible by it
    start      start this program once per rank, with the environment variables that torchrun also sets
    watch      write each rank's stderr to logs/rank-N.log; forward signals to rank 0, which decides for all; when a
               rank fails, end the others and show the last lines of its stderr

This process computes nothing and never imports torch, so a GPU failure can take down a rank, but not this process. When
this process exits, its pipe to the ranks is closed, so the ranks notice and exit too.

The environment variables alone make a process a rank. torchrun or srun can therefore start the ranks instead.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from homing.errors import RunFailed, UsageError
from homing.wire import codec, file_names
from homing.wire.event_lines import Outcome
from homing.wire.run_json import Run

__all__ = [
    "COUNT",
    "EXIT_LEFT_ALONE",
    "HOST",
    "LISTEN_FD",
    "LOCAL_COUNT",
    "LOCAL_RANK",
    "PORT",
    "RANK",
    "check_num_ranks",
    "count_cards",
    "is_rank",
    "note_failure",
    "pick_num_ranks",
    "run_ranks",
    "watch_starter",
]

# Exit code of a rank that failed only because another rank was gone, so that its error does not hide the real cause.
EXIT_LEFT_ALONE = 79
# Environment variables of a rank, with the names that torch uses: its number among all ranks and among those of this
# machine, how many there are of each, and the address at which rank 0 listens.
RANK, COUNT, LOCAL_RANK, LOCAL_COUNT = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
HOST, PORT = "MASTER_ADDR", "MASTER_PORT"
# Set only by `run_ranks`: the open socket for this address, which rank 0 inherits, so that no other program can take
# the port before rank 0 has loaded torch; and the folder in which a rank records the time of its error.
LISTEN_FD, NOTES = "HOMING_LISTEN_FD", "HOMING_RANK_NOTES"
_LOOK_EVERY_S = 0.1
_SETTLE_S = 5.0  # after a rank has failed, how long to wait for others to fail, to determine which failed first
_END_S = 20.0
_LAST_LINES = 60


def pick_num_ranks(run: Run, num_cards: int, say: Callable[[str], None]) -> int:
    """Return the number of ranks: the configured number, or one per GPU.

    If the rows of a step are not divisible by this number, raise UsageError if it was configured; otherwise use fewer
    ranks and print a warning.
    """
    wanted = run.train.num_ranks or (max(1, num_cards) if run.train.device in ("auto", "cuda") else 1)
    lower = _most_ranks(run, wanted)
    if lower < wanted and run.train.num_ranks:
        raise _cannot_divide(run, wanted, f"Set train.ranks: {lower}")
    if lower < wanted:
        why = _rows_per_step(run)
        say(
            f"warning: using {lower} of {wanted} GPUs, because the rows cannot be divided evenly among {wanted}: {why}."
        )
    return lower


def check_num_ranks(run: Run, count: int) -> None:
    """Raise UsageError if the run cannot train with `count` ranks, which another program (such as torchrun) started."""
    if run.train.num_ranks not in (0, count):
        raise UsageError(
            what=f"{COUNT} is {count}, but train.ranks is {run.train.num_ranks}.",
            why=f"The environment variables {RANK} and {COUNT} are set, so another program has started this rank.",
            fix=f"Start {run.train.num_ranks} ranks, or set train.ranks: 0 to use as many as were started.",
        )
    if (lower := _most_ranks(run, count)) < count:
        raise _cannot_divide(run, count, f"Start {lower} ranks")


def _most_ranks(run: Run, at_most: int) -> int:
    """Return the largest number of ranks, up to `at_most`, that divides the rows of a step in every phase."""
    steps = [phase.batch_tokens // run.model.context for phase in run.phases]
    return next(count for count in range(at_most, 0, -1) if all(rows % count == 0 for rows in steps))


def _cannot_divide(run: Run, count: int, fix: str) -> UsageError:
    return UsageError(
        what=f"The rows in a step cannot be divided evenly among {count} ranks.",
        why=_rows_per_step(run),
        fix=f"{fix}, or set batch_tokens to a multiple of {count} x model.context.",
    )


def _rows_per_step(run: Run) -> str:
    steps = {phase.kind: phase.batch_tokens // run.model.context for phase in run.phases}
    return ", ".join(f"{kind} has {rows:,} rows per step" for kind, rows in steps.items())


def is_rank() -> bool:
    """Return whether this process was started as a rank, by `run_ranks` or by another program such as torchrun."""
    return RANK in os.environ and COUNT in os.environ


def count_cards() -> int:
    """Return the number of CUDA GPUs visible to a program started by this process; 0 if there is no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        output = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in output.stdout.splitlines())


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    words: collections.deque[str]  # the last lines that the rank wrote to stderr
    reader: threading.Thread
    note: Path | None = None  # file in which the rank records the time of its error


def run_ranks(run_dir: Path, count: int) -> int:
    """Run `count` ranks and return the run's exit code.

    Rank 0 writes outcome.json; if another rank failed first, this process writes it.
    """
    (run_dir / file_names.LOGS).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="homing-ranks-") as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(count)
        kept_end, given_end = os.pipe()
        ranks: list[_Rank] = []
        try:
            # This process keeps the write end of the pipe and never uses it. When this process ends for any reason, the
            # write end is closed, which tells the ranks to exit.
            for number in range(count):
                ranks.append(_start(run_dir, number, count, Path(folder), listener, kept_end))
            os.close(kept_end)
            with _forwarding(ranks[0].process):
                culprit = _watch(ranks)
            return _notify(run_dir, ranks, culprit)
        finally:
            _end(ranks)
            os.close(given_end)


def watch_starter() -> None:
    """Start a thread that ends this process when its parent has exited.

    A rank exits immediately, because its parent can no longer stop it. A trainer started by `homing train` saves a
    checkpoint and stops, as it does for `homing stop`.
    """
    starter_fd = os.environ.get(file_names.STARTER_FD_ENV)
    if starter_fd is None:
        return

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(int(starter_fd), 1)
        if NOTES in os.environ:
            os._exit(EXIT_LEFT_ALONE)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="starter", daemon=True).start()


def _start(
    run_dir: Path, number: int, count: int, notes: Path, listener: socket.socket, alive_fd: int
) -> _Rank:  # fmt: skip
    host, port = listener.getsockname()
    env = os.environ | {
        RANK: str(number), COUNT: str(count), LOCAL_RANK: str(number), LOCAL_COUNT: str(count),
        HOST: host, PORT: str(port), LISTEN_FD: str(listener.fileno()), NOTES: str(notes),
        file_names.STARTER_FD_ENV: str(alive_fd),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "homing.lm.train", str(run_dir)], env=env,
        pass_fds=[alive_fd, listener.fileno()] if number == 0 else [alive_fd],
        stdout=None if number == 0 else subprocess.DEVNULL, stderr=subprocess.PIPE,
        # Start the rank in a new session, so that Ctrl-C reaches only this process, which forwards the signal. A rank
        # that received it twice would exit without saving a checkpoint.
        start_new_session=True,
    )  # fmt: skip
    words: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    log = run_dir / file_names.LOGS / file_names.rank_log(number)
    reader = threading.Thread(target=_listen, args=(process, words, log), daemon=True)
    reader.start()
    return _Rank(number, process, words, reader, _note(notes, number))


def _listen(process: subprocess.Popen[bytes], words: collections.deque[str], log: Path) -> None:
    """Copy a rank's stderr to its log, and keep the last lines.

    If the log cannot be written, go on reading, because a full pipe would block the rank.
    """
    assert process.stderr is not None
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(log, "ab", buffering=0))
        for line in process.stderr:
            words.append(line.decode(errors="replace").rstrip("\n"))
            if file is not None:
                with contextlib.suppress(OSError):
                    file.write(line)


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(ranks: list[_Rank]) -> _Rank | None:
    """Wait for all ranks; return None if all succeeded, else the rank whose failure caused the others."""
    good = (file_names.EXIT_DONE, file_names.EXIT_STOPPED)
    ended: dict[int, float] = {}

    def look() -> None:
        for rank in ranks:
            if rank.process.poll() is not None:
                ended.setdefault(rank.number, time.time())

    while True:
        look()
        codes = [rank.process.poll() for rank in ranks]
        if any(code is not None and code not in good for code in codes):
            break
        if all(code is not None for code in codes):
            return None
        time.sleep(_LOOK_EVERY_S)
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline and any(rank.process.poll() is None for rank in ranks):
        time.sleep(_LOOK_EVERY_S)
        look()
    look()
    failed = [rank for rank in ranks if rank.process.poll() not in (None, *good)]
    alone = [rank for rank in failed if rank.process.returncode != EXIT_LEFT_ALONE]
    return min(alone or failed, key=lambda rank: min(ended[rank.number], _failed_at(rank)))


def _failed_at(rank: _Rank) -> float:
    """Return the time that the rank recorded for its error; infinity if there is none because the rank was killed."""
    try:
        return float(rank.note.read_text(encoding="ascii")) if rank.note is not None else math.inf
    except (OSError, ValueError):
        return math.inf


def note_failure() -> None:
    """Record the time of this rank's error. Call this immediately, before the error makes other ranks fail."""
    if notes := os.environ.get(NOTES):
        with contextlib.suppress(OSError):
            _note(Path(notes), int(os.environ[RANK])).write_text(repr(time.time()), encoding="ascii")


def _note(notes: Path, number: int) -> Path:
    return notes / f"failed-{number}"


def _notify(run_dir: Path, ranks: list[_Rank], culprit: _Rank | None) -> int:
    if culprit is None:
        return int(ranks[0].process.returncode)
    _end(ranks)
    code = int(culprit.process.returncode)
    for line in culprit.words:
        sys.stderr.write(f"{line}\n")
    if culprit.number == 0 and code > 0:
        return file_names.EXIT_FAILED  # rank 0 has already reported its own failure
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    last = next((line for line in reversed(culprit.words) if line.strip()), "it printed nothing")
    error = RunFailed(
        what=f"Rank {culprit.number} of {len(ranks)} {how}; the others were stopped.",
        why=last,
        fix="Run the same command again to resume from the last checkpoint. "
        f"All output of this rank is in {file_names.LOGS}/{file_names.rank_log(culprit.number)}.",
    )
    _write_failure(run_dir, str(error))
    raise error


def _write_failure(run_dir: Path, reason: str) -> None:
    """Write outcome.json. A file that rank 0 wrote is replaced: it may say only that other ranks were lost."""
    path, temporary = run_dir / file_names.OUTCOME, run_dir / f".{file_names.OUTCOME}.partial"
    try:
        before = codec.loads(Outcome, path.read_bytes())
    except (OSError, ValueError):
        before = Outcome("failed", "", file_names.EXIT_FAILED)
    outcome = Outcome(
        "failed", reason, file_names.EXIT_FAILED, phase=before.phase, step=before.step, t=time.time(), is_final=False
    )
    # If the disk is full, ignore the error: the exit code and the last line of the output still report the failure.
    with contextlib.suppress(OSError):
        temporary.write_text(codec.dumps(outcome, indent=1), encoding="utf-8")
        os.replace(temporary, path)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait(timeout=_END_S)
        rank.reader.join(timeout=_END_S)
        if rank.process.stderr is not None:
            rank.process.stderr.close()
