"""`python -m homing.lm.train RUN_DIR`: the trainer as a program, the same here and on a rented machine.

Exit codes: 0 every phase is trained, 75 stopped with a checkpoint, 1 failed. The last line says which, and where the
checkpoints are.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from pathlib import Path

from homing.errors import HomingError
from homing.lm.train.control import Wishes
from homing.lm.train.launch import (
    EXIT_LEFT_ALONE,
    RANK,
    count_cards,
    note_failure,
    pick_num_ranks,
    run_ranks,
    watch_starter,
)
from homing.wire import codec, names
from homing.wire.run import Run

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("Usage: python -m homing.lm.train RUN_DIR\n")
        return names.EXIT_FAILED
    run_dir = Path(arguments[0]).absolute()
    is_rank = RANK in os.environ
    wishes = Wishes(run_dir)
    try:
        watch_starter()
        if not is_rank and (count := _num_ranks(run_dir)) > 1:
            return run_ranks(run_dir, count)
        with wishes.listening():
            # Threads that wait sleep instead of spinning. On a machine that other programs use too, spinning threads
            # starve the one that works: steps were 3 to 5 times slower. Read once, when torch loads.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            # Only now: torch takes seconds to load, in which a signal would end the process without a word.
            from homing.lm.train.loop import train

            outcome = train(run_dir, say=_say, wishes=wishes)
    except HomingError as error:
        note_failure()
        for line in (f"error: {error.what}", *error.why.splitlines(), error.fix):
            sys.stderr.write(f"{line}\n")
        _say(f"Training failed | state failed | exit {names.EXIT_FAILED} | {error.what} | {run_dir}")
        return names.EXIT_FAILED
    except OSError as error:
        note_failure()
        # A disk that is full, read-only or gone: nothing is wrong with the program, so no traceback.
        what = f"The disk refused: {error}."
        sys.stderr.write(f"error: {what}\nThe run directory {run_dir} must be writable, and the data readable.\n")
        _say(f"Training failed | state failed | exit {names.EXIT_FAILED} | {what} | {run_dir}")
        return names.EXIT_FAILED
    except RuntimeError as error:
        note_failure()
        # The others are gone, or one of them: whoever started us knows more.
        if is_rank and _is_left_alone(error):
            traceback.print_exc()
            return EXIT_LEFT_ALONE
        raise
    except BaseException:
        note_failure()
        raise
    folder = run_dir / names.CHECKPOINTS / outcome.phase / names.step_dir(outcome.step)
    title = "Training Complete" if outcome.state == "done" else f"Training stopped: {outcome.reason}"
    _say(f"{title} | state {outcome.state} | exit {outcome.exit_code} | step {outcome.step:,} | {folder}")
    return outcome.exit_code


def _is_left_alone(error: RuntimeError) -> bool:
    """Whether the connection to another rank failed, by the kind of the error, or by the source file that gloo puts
    into its message; a path or a variable that is called gloo is nothing."""
    from torch import distributed

    kinds = tuple(
        getattr(distributed, name) for name in ("DistError", "DistBackendError") if hasattr(distributed, name)
    )
    return isinstance(error, kinds) or re.search(r"gloo/\S+\.(cc|h):\d+", str(error)) is not None


def _num_ranks(run_dir: Path) -> int:
    """Of a run that can be read; what is wrong with another, the trainer tells."""
    try:
        run = codec.loads(Run, (run_dir / names.RUN).read_bytes())
    except (OSError, ValueError):
        return 1
    return pick_num_ranks(run, 1 if run.train.num_ranks else count_cards(), _say)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever listened is gone; the run is not
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
