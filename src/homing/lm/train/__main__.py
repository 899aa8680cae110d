"""Entry point of the trainer: `python -m homing.lm.train RUN_DIR`, the same on every machine, rented or not.

With several GPUs it starts one process per GPU. If torchrun or srun has already done that, it is one of them.

Exit codes: 0 (all phases are complete), 75 (stopped, with a checkpoint), 1 (failed). The last line of the output
repeats the exit code and says where the checkpoints are.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from pathlib import Path

from homing.errors import HomingError
from homing.lm.train.distributed.start_ranks import (
    EXIT_LEFT_ALONE,
    RANK,
    count_cards,
    is_rank,
    note_failure,
    pick_num_ranks,
    run_ranks,
    watch_starter,
)
from homing.lm.train.stop_requests import ControlRequests
from homing.wire import codec, file_names
from homing.wire.run_json import Run

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("Usage: python -m homing.lm.train RUN_DIR\n")
        return file_names.EXIT_FAILED
    run_dir = Path(arguments[0]).absolute()
    # With torchrun, all ranks share one terminal. Only the first one prints its progress and result there.
    say = _say if not is_rank() or os.environ[RANK] == "0" else lambda line: None
    requests = ControlRequests(run_dir)
    try:
        watch_starter()
        if not is_rank() and (count := _num_ranks(run_dir)) > 1:
            return run_ranks(run_dir, count)
        with requests.listening():
            # Make idle OpenMP threads sleep instead of spin. On a machine shared with other programs, spinning threads
            # take CPU time from the threads that work, and steps were 3 to 5 times slower. OpenMP reads this variable
            # only once, when torch is loaded.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            # Import torch only after installing the signal handlers: torch takes seconds to load, and during that time
            # a signal would kill the process without a message.
            from homing.lm.train.loop import train

            outcome = train(run_dir, say=say, requests=requests)
    except HomingError as error:
        note_failure()
        for line in (f"error: {error.what}", *error.why.splitlines(), error.fix):
            sys.stderr.write(f"{line}\n")
        _say(f"Training failed | state failed | exit {file_names.EXIT_FAILED} | {error.what} | {run_dir}")
        return file_names.EXIT_FAILED
    except OSError as error:
        note_failure()
        # The disk is full, read-only or unavailable. That is not a bug in the program, so print no traceback.
        what = f"Disk error: {error}."
        sys.stderr.write(f"error: {what}\nThe run directory {run_dir} must be writable and the data readable.\n")
        _say(f"Training failed | state failed | exit {file_names.EXIT_FAILED} | {what} | {run_dir}")
        return file_names.EXIT_FAILED
    except RuntimeError as error:
        note_failure()
        # If another rank has died, this rank only exits with a special code; the launcher reports the cause.
        if is_rank() and _is_left_alone(error):
            traceback.print_exc()
            return EXIT_LEFT_ALONE
        raise
    except BaseException:
        note_failure()
        raise
    folder = run_dir / file_names.CHECKPOINTS / outcome.phase / file_names.step_dir(outcome.step)
    title = "Training Complete" if outcome.state == "done" else f"Training stopped: {outcome.reason}"
    say(f"{title} | state {outcome.state} | exit {outcome.exit_code} | step {outcome.step:,} | {folder}")
    return outcome.exit_code


def _is_left_alone(error: RuntimeError) -> bool:
    """Return whether the error means that the connection to another rank was lost.

    Such an error is recognized by its exception type, or by the source location (`gloo/file.cc:123`) that gloo puts
    into its messages. A path or variable that merely contains "gloo" does not match.
    """
    from torch import distributed

    kinds = tuple(
        getattr(distributed, name) for name in ("DistError", "DistBackendError") if hasattr(distributed, name)
    )
    return isinstance(error, kinds) or re.search(r"gloo/\S+\.(cc|h):\d+", str(error)) is not None


def _num_ranks(run_dir: Path) -> int:
    """Return the number of ranks to start; 1 if run.json cannot be read (the trainer reports that error later)."""
    try:
        run = codec.loads(Run, (run_dir / file_names.RUN).read_bytes())
    except (OSError, ValueError):
        return 1
    return pick_num_ranks(run, 1 if run.train.num_ranks else count_cards(), _say)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # keep training even if the process that reads our stdout has exited
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
