"""One invocation of the command line, from the arguments to the exit code.

  arguments -> take -q, -v, --json from any position -> the verb's module -> an error as three lines -> exit code

A verb is imported only when it is called: `homing --help` prints a table and imports none.

`Bars` draws the progress that the library reports: a bar on a terminal, otherwise a line every 30 seconds. Nothing is
drawn under --json or -q, and work that takes less than a moment draws nothing.

  homing.progress.report -> Bars.show -> rich.progress on stderr, erased when the work is over or a message comes
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

import typer
from typer.core import TyperGroup

import homing
from homing import progress
from homing.api import dotenv, notices
from homing.cli import complete, output
from homing.cli.verb_help import Verb
from homing.cli.verb_list import HELP, STORIES, VERBS, verb_table
from homing.errors import HomingError, StillBilling
from homing.progress import SECONDS, Progress
from homing.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.progress import Progress as Drawn

__all__ = ["Bars", "LazyVerbs", "call"]

_LINE_S = 30.0
_QUICK_S = 0.3  # work that is over within this time draws no bar

# typer bundles click under a private name; the base class of its public error gives access to it.
_ClickError: Any = typer.BadParameter.__mro__[2]


class LazyVerbs(TyperGroup):
    """Command group that prints the table of verbs for `homing --help` and imports only the verb that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            from homing.cli import suggestions  # imported late, because its tables are needed only after a mistake

            raise suggestions.verb(cmd_name, sys.argv[1:], VERBS)
        module = importlib.import_module(f"homing.cli.verbs.{cmd_name}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            app.command(cmd_name, cls=Verb, help=module.command.__doc__)(module.command)
        return typer.main.get_command(app)

    # On Ctrl-C or a closed pipe, typer would exit silently, both during parsing and while the verb runs. The notice
    # about instances that may still be billing would not be printed.
    def make_context(self, *args: Any, **settings: Any) -> Any:
        with _aborted():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        with _aborted():
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(verb_table())


@contextlib.contextmanager
def _aborted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise typer.Abort from interrupt
    except BrokenPipeError as left:
        raise _ReaderLeft from left


class _ReaderLeft(Exception):
    """Raised when the reader of our output closes the pipe, as in `homing ledger | head`."""


app = typer.Typer(
    cls=LazyVerbs,
    add_completion=True,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": list(HELP)},
)


def _print_version(value: bool) -> None:
    if value:
        print(f"homing {homing.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """homing"""


def call(typed: list[str]) -> int:
    arguments, loudness = _take_loudness(_fill_watch(_help_first(typed)))
    output.configure(loudness=loudness, is_json="--json" in arguments)
    if "--json" in arguments and set(arguments) <= {"--json", "--version", "-V", *HELP}:
        return _print_verbs()
    arguments = _json_behind(arguments)
    bars = Bars()
    with output.filtered(), notices.listening(output.say), progress.listening(bars.show):
        output.before_output(bars.erase)
        logging.basicConfig(level=logging.DEBUG if loudness > 0 else logging.WARNING, format="%(name)s: %(message)s")
        try:
            with _endings_as_interrupts():
                code, shown = _run_verb(arguments)
        finally:
            bars.erase()
            output.before_output(None)
        if arguments and arguments[0] in VERBS and not any(word in arguments for word in HELP):
            code = _check_billing(code, shown)
    return code


def _print_verbs() -> int:
    """Print the table of verbs as JSON, for `homing --help --json`, `homing --json` and `homing --version --json`."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"schema": "homing.verbs/1", "version": homing.__version__, "verbs": STORIES}))
    return 0


@contextlib.contextmanager
def _endings_as_interrupts() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C: a launch must clean up, even when its terminal closes.

    Only the first signal counts: a system shutdown sends several, and they must not stop the cleanup. A signal that
    was ignored at the start (nohup) stays ignored.
    """
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may set signal handlers

    def interrupt(number: int, frame: object) -> NoReturn:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_verb(arguments: list[str]) -> tuple[int, str]:
    """Run the verb and return its exit code and the first line of the error shown, if any."""
    try:
        if arguments[:1] == [complete.INSTALL]:
            return complete.install(arguments), ""
        if arguments and arguments[0] in VERBS:
            dotenv.load(Path.cwd())
        code = app(arguments, prog_name="homing", standalone_mode=False)
    except HomingError as error:
        if (typed := _run_in(arguments)) is not None:
            error.name_run(typed)
        return _show(error)
    except _ClickError as error:
        # The user typed no verb at all, or a group such as `store` without a subcommand.
        if type(error).__name__ == "NoArgsIsHelpError":
            return _print_help(error.ctx)
        from homing.cli import suggestions

        return _show(suggestions.usage(error, sys.argv[1:], VERBS, lambda verb: LazyVerbs().get_command(None, verb)))
    except (KeyboardInterrupt, typer.Abort):
        with contextlib.suppress(OSError, KeyboardInterrupt):  # the terminal may have been closed
            _say_interrupted()
        return 130, ""
    except (BrokenPipeError, _ReaderLeft):
        return _after_the_reader_left()
    except OSError as error:
        if output.is_verbose():
            traceback.print_exc()
        what = f"The operating system reported an error: {error.strerror or error}."
        fix = "Check that the path exists, its permissions and the free disk space; -v shows where the error occurred."
        return _show(HomingError(what, f"{type(error).__name__}: {error}", fix))
    except Exception:
        traceback.print_exc()
        output.say("This is a bug in homing. Please report it with the lines above.")
        return 1, ""
    return (code if isinstance(code, int) else 0), ""


def _run_in(arguments: list[str]) -> str | None:
    """Return the run as the user typed it, with --set and --smoke.

    Return None if the verb takes no run, or if the user typed a folder.
    """
    from homing.config.home_and_run_files import RUN_SUFFIXES
    from homing.config.load import as_typed, safe_set

    verb, named = [*arguments, "", ""][:2]
    command = LazyVerbs().get_command(None, verb) if verb in VERBS else None
    takes_run = command is not None and any(each.name == "run" for each in command.params[:1])
    if not takes_run or ("/" in named and not named.endswith(RUN_SUFFIXES)):
        return None
    name = "" if not named or named.startswith("-") else shlex.quote(named)
    sets = [safe_set(following) for word, following in itertools.pairwise(arguments) if word == "--set"]
    return f"{name}{as_typed(sets, is_smoke='--smoke' in arguments)}"


def _say_interrupted() -> None:
    """Report the interrupt, and list the runs that continue: interrupting `watch` does not stop a run."""
    # The terminal shows ^C on the current line, so start a new one.
    output.say("\nInterrupted." if sys.stderr.isatty() else "Interrupted.")
    if not _has_ledger() or output.is_quiet():
        return
    from homing.api.lookup.find_runs import still_running

    for line in still_running():
        output.say(line)


def _print_help(context: Any) -> tuple[int, str]:
    """Print the same help as --help and return exit code 0, because running `homing` without a verb is not an error."""
    try:
        print(context.get_help(), flush=True)
    except BrokenPipeError:
        return _after_the_reader_left()
    return 0, ""


def _after_the_reader_left() -> tuple[int, str]:
    output.silence(sys.stdout)
    return 0, ""


def _show(error: HomingError) -> tuple[int, str]:
    try:
        output.show_error(error)
    except OSError:  # stdout was closed, as in `homing plan nope --json | head -c 9`, but stderr may still work
        _after_the_reader_left()
        with contextlib.suppress(OSError):  # if stderr is closed too, the exit code still reports the failure
            output.show_error(error)
    return error.exit_code, error.what


def _has_ledger() -> bool:
    # Check the files directly: importing the ledger would take longer than most verbs do.
    home = os.path.expanduser(os.environ.get("HOMING_HOME") or "~/.homing")
    return any(os.path.exists(os.path.join(home, *path)) for path in (["ledger.sqlite"], ["backup", "ledger.sqlite"]))


def _check_billing(code: int, shown: str) -> int:
    """Report instances not confirmed as destroyed. If one may still be billing, return that error's exit code."""
    if not _has_ledger():
        return code
    from homing.api.lookup.find_runs import last_word

    try:
        error = last_word()
    except (OSError, KeyboardInterrupt):
        return code
    if error is None or error.what == shown:
        return code
    with contextlib.suppress(OSError):
        output.show_error(error)
    return error.exit_code if isinstance(error, StillBilling) else code or error.exit_code


def _help_first(typed: list[str]) -> list[str]:
    """Rewrite `help`, `help VERB`, `--help VERB` and `version` as the equivalent options."""
    if typed[:1] == ["version"]:
        return ["--version", *typed[1:]]
    if typed[:1] in (["help"], ["--help"], ["-h"]):
        return [*typed[1:], "--help"]
    return typed


def _fill_watch(arguments: list[str]) -> list[str]:
    """Add the default interval to `status --watch` if none is given, because click requires a value there."""
    filled = []
    for number, argument in enumerate(arguments):
        filled.append(argument)
        following = arguments[number + 1] if number + 1 < len(arguments) else ""
        if argument == "--watch" and not following[:1].isdigit():
            filled.append("60")
    return filled


def _json_behind(arguments: list[str]) -> list[str]:
    """Move a --json that comes before the verb to the end, because verbs accept it only after their name."""
    if arguments[:1] != ["--json"]:
        return arguments
    kept = arguments[1:]
    end = kept.index("--") if "--" in kept else len(kept)
    return [*kept[:end], "--json", *kept[end:]] if kept and "--json" not in kept[:end] else kept


def _take_loudness(arguments: list[str]) -> tuple[list[str], int]:
    """Remove -q and -v before parsing, so that they work before and after the verb."""
    loudness, kept = 0, []
    for number, argument in enumerate(arguments):
        if argument == "--":
            kept += arguments[number:]
            break
        if argument in ("-q", "--quiet"):
            loudness -= 1
        elif argument in ("-v", "--verbose"):
            loudness += 1
        else:
            kept.append(argument)
    return kept, loudness


# --- progress ---


class Bars:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._what = ""
        self._began_at = self._shown_at = 0.0
        self._drawn: Drawn | None = None
        self._is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")

    def show(self, progress: Progress) -> None:
        if output.is_json() or output.is_quiet():
            return
        with self._lock:
            now = time.monotonic()
            if progress.what != self._what:
                self.erase()
                self._what, self._began_at, self._shown_at = progress.what, now, now
            if not progress.what:
                return
            if self._is_terminal:
                self._draw(progress, now)
            elif now - self._shown_at >= _LINE_S:
                self._shown_at = now
                with contextlib.suppress(OSError):
                    output.say(describe(progress, now - self._began_at))

    def erase(self) -> None:
        """Remove the bar, so that a message or the next bar can take its place. The next report draws it again."""
        with self._lock:
            drawn, self._drawn = self._drawn, None
            if drawn is not None:
                drawn.stop()

    def _draw(self, progress: Progress, now: float) -> None:
        # Without a known end there may be no further report until the work is over, so draw at once.
        if self._drawn is None and progress.total and now - self._began_at < _QUICK_S:
            return
        drawn = self._drawn or _new()
        (task,) = drawn.task_ids
        drawn.update(
            task, completed=progress.done, total=progress.total or None, description=output.safe(progress.what),
            said=_amount(progress, now - self._began_at),
        )  # fmt: skip
        if self._drawn is None:
            self._drawn = drawn
            drawn.start()


def _new() -> Drawn:
    # Imported here because rich takes longer to load than most verbs run.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    console = Console(file=cast(IO[str], _Stderr()), highlight=False, markup=False, emoji=False)
    made = Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[said]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    made.add_task("", total=None, said="")
    return made


def describe(progress: Progress, took_s: float) -> str:
    """Return one line: what is done, how much of it, how fast, and how long it will still take or may take."""
    return f"{progress.what}: {_amount(progress, took_s)}"


def _amount(progress: Progress, took_s: float) -> str:
    if progress.detail:
        return progress.detail
    if progress.unit == SECONDS:
        return f"{format_duration(progress.done)} so far, at most {format_duration(progress.total)}"
    if not progress.total:
        return f"{format_duration(took_s)} so far"
    share = min(1.0, progress.done / progress.total)
    text = f"{format_bytes(progress.done)} of {format_bytes(progress.total)}, {share:.0%}"
    if progress.done and took_s >= 1 and share < 1:
        speed = progress.done / took_s
        text += f", {format_bytes(speed)}/s, eta {format_duration((progress.total - progress.done) / speed)}"
    return text


class _Stderr:
    """The terminal behind stderr, for our own escape sequences."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self.encoding = getattr(sys.stderr, "encoding", "utf-8") or "utf-8"

    def write(self, text: str) -> int:
        # The terminal may be gone. That must not end the work, which may be about to destroy an instance.
        with contextlib.suppress(OSError):
            output.draw(text, self._stream)
        return len(text)

    def flush(self) -> None:
        """Do nothing, because `write` flushes."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()
