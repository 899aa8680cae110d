"""Entry point of the command line: `main` imports only what one verb needs.

    main -> Ctrl-C prints no traceback from here on -> cli/run_verb.py (typer) -> the verb's module -> exit code
    main --help -> the table of verbs, which imports verb_list only

A verb is one module `homing/cli/verbs/VERB.py` with a function `command` (or a typer app `app` for a group such as
`store`). It parses, calls the library and prints; the library never prompts, prints or exits.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

from homing.cli.verb_list import HELP, verb_table

__all__ = ["main"]


def main() -> None:
    # A user who notices a typo presses Ctrl-C before the imports are done. KeyboardInterrupt during an import prints a
    # traceback at best and is swallowed at worst. Nothing has started yet, so there is nothing to undo.
    _open_closed()
    is_ours = _may_interrupt()
    if is_ours:
        signal.signal(signal.SIGINT, _end_now)
    if len(sys.argv) == 2 and sys.argv[1] in HELP and _is_help_printed():
        sys.exit(0)
    from homing.cli.run_verb import call  # imported late: loading the parser takes longer than printing help

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Unloading torch may take longer than the verb itself. All output is written by then, so let
        # Ctrl-C end the process.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    sys.exit(call(sys.argv[1:]))


def _is_help_printed() -> bool:
    """Print the help without importing the parser, which would take longer than everything else here."""
    try:
        print(verb_table(), end="", flush=True)
    except OSError:  # the reader closed the pipe, or the disk is full; `run_verb` reports the error
        return False
    return True


def _open_closed() -> None:
    """Replace closed standard streams with /dev/null.

    Some schedulers start programs with `<&- >&-`; Python then has None there, and every verb would fail.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open for as long as the program


def _may_interrupt() -> bool:
    """Return whether Ctrl-C raises KeyboardInterrupt.

    Leave SIGINT unchanged if it is ignored (nohup) or another handler is installed.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:  # only the main thread may set signal handlers
        return False
    return True


def _end_now(number: int, frame: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(130)


if __name__ == "__main__":
    main()
