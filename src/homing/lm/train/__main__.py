"""`python -m homing.lm.train RUN_DIR`: the trainer as a program, the same here and on a rented machine.

Exit codes: 0 every phase is trained, 75 stopped with a checkpoint, 1 failed. The last line says which, and where the
checkpoints are.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from homing.errors import HomingError
from homing.lm.train.control import Wishes
from homing.wire import names

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("Usage: python -m homing.lm.train RUN_DIR\n")
        return names.EXIT_FAILED
    run_dir = Path(arguments[0]).absolute()
    wishes = Wishes(run_dir)
    try:
        with wishes.listening():
            # Threads that wait sleep instead of spinning. On a machine that other programs use too, spinning threads
            # starve the one that works: steps were 3 to 5 times slower. Read once, when torch loads.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            # Only now: torch takes seconds to load, in which a signal would end the process without a word.
            from homing.lm.train.loop import train

            outcome = train(run_dir, say=_say, wishes=wishes)
    except HomingError as error:
        for line in (f"error: {error.what}", *error.why.splitlines(), error.fix):
            sys.stderr.write(f"{line}\n")
        _say(f"Training failed | state failed | exit {names.EXIT_FAILED} | {error.what} | {run_dir}")
        return names.EXIT_FAILED
    except OSError as error:
        # A disk that is full, read-only or gone: nothing is wrong with the program, so no traceback.
        what = f"The disk refused: {error}."
        sys.stderr.write(f"error: {what}\nThe run directory {run_dir} must be writable, and the data readable.\n")
        _say(f"Training failed | state failed | exit {names.EXIT_FAILED} | {what} | {run_dir}")
        return names.EXIT_FAILED
    folder = run_dir / names.CHECKPOINTS / outcome.phase / names.step_dir(outcome.step)
    title = "Training Complete" if outcome.state == "done" else f"Training stopped: {outcome.reason}"
    _say(f"{title} | state {outcome.state} | exit {outcome.exit_code} | step {outcome.step:,} | {folder}")
    return outcome.exit_code


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever listened is gone; the run is not
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
