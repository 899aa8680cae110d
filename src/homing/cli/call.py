"""One call of the command line, from what was typed to the exit code.

    what was typed -> -q, -v, --json taken from anywhere -> the verb's module -> an error as three lines -> exit code

Each verb is loaded only when it is called: `homing --help` prints a table and loads none.
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
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

import homing
from homing.cli import complete, dotenv, misread, talk, terminal
from homing.cli.main import HELP, STORIES, VERBS, verb_table
from homing.cli.verb_help import Verb
from homing.errors import HomingError, StillBilling

__all__ = ["LazyVerbs", "call"]

# typer carries a click of its own under a private name; the parent of its public error is the way to it.
_ClickError: Any = typer.BadParameter.__mro__[2]


class LazyVerbs(TyperGroup):
    """`homing --help` prints the table of verbs; only the verb that is called is imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            raise misread.verb(cmd_name, sys.argv[1:], VERBS)
        module = importlib.import_module(f"homing.cli.{cmd_name}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            app.command(cmd_name, cls=Verb, help=module.command.__doc__)(module.command)
        return typer.main.get_command(app)

    # typer itself would make a silent exit of Ctrl-C, and of a reader that left, while it parses or while the verb
    # works; what may still bill would then go unsaid.
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
    """`homing ledger | head`"""


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
    arguments, loudness = _take_loudness(_fill_watch(misread.help_first(typed)))
    talk.configure(loudness=loudness, is_json="--json" in arguments)
    if "--json" in arguments and set(arguments) <= {"--json", "--version", "-V", *HELP}:
        return _print_verbs()
    arguments = _json_behind(arguments)
    with terminal.filtered():
        logging.basicConfig(level=logging.DEBUG if loudness > 0 else logging.WARNING, format="%(name)s: %(message)s")
        with _endings_as_interrupts():
            code, shown = _run_verb(arguments)
        if arguments and arguments[0] in VERBS and not any(word in arguments for word in HELP):
            code = _check_billing(code, shown)
    return code


def _print_verbs() -> int:
    """`homing --help --json`, and --json with nothing else or with --version: the table of verbs, as data."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"schema": "homing.verbs/1", "version": homing.__version__, "verbs": STORIES}))
    return 0


@contextlib.contextmanager
def _endings_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP are Ctrl-C by other hands: a launch must undo what it started, also when its terminal closes.

    The first one counts and the rest are ignored: a system that goes down sends several, and the undo must not be cut
    short by its own cause. One that was ignored when we started (nohup) stays ignored.
    """
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may set handlers; whoever calls us from another has its own

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
    """The exit code, and the first line of the error that was shown."""
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
        if type(error).__name__ == "NoArgsIsHelpError":  # no verb at all, or a group such as `store` without its own
            return _print_help(error.ctx)
        return _show(misread.usage(error, sys.argv[1:], VERBS, lambda verb: LazyVerbs().get_command(None, verb)))
    except (KeyboardInterrupt, typer.Abort):
        with contextlib.suppress(OSError, KeyboardInterrupt):  # the terminal itself may be what is gone
            _say_interrupted()
        return 130, ""
    except (BrokenPipeError, _ReaderLeft):
        return _after_the_reader_left()
    except OSError as error:
        if talk.is_verbose():
            traceback.print_exc()
        what = f"This computer refused: {error.strerror or error}."
        fix = "Check that the path is there, its permissions, and the disk's space; -v shows where it happened."
        return _show(HomingError(what, f"{type(error).__name__}: {error}", fix))
    except Exception:
        traceback.print_exc()
        talk.say("This is a mistake in homing, not yours. Please report it with the lines above.")
        return 1, ""
    return (code if isinstance(code, int) else 0), ""


def _run_in(arguments: list[str]) -> str | None:
    """The run that was typed, and what was changed of its file; None where the verb takes none, or a folder was."""
    from homing.cli.options import as_typed
    from homing.config.paths import RUN_SUFFIXES
    from homing.config.sets import safe

    verb, named = [*arguments, "", ""][:2]
    command = LazyVerbs().get_command(None, verb) if verb in VERBS else None
    takes_run = command is not None and any(each.name == "run" for each in command.params[:1])
    if not takes_run or ("/" in named and not named.endswith(RUN_SUFFIXES)):
        return None
    name = "" if not named or named.startswith("-") else shlex.quote(named)
    sets = [safe(following) for word, following in itertools.pairwise(arguments) if word == "--set"]
    return f"{name}{as_typed(sets, is_smoke='--smoke' in arguments)}"


def _say_interrupted() -> None:
    """What Ctrl-C does not end is named: a run goes on without whoever watched it."""
    # A terminal shows ^C behind the question that was open.
    talk.say("\nInterrupted." if sys.stderr.isatty() else "Interrupted.")
    if not _has_ledger() or talk.is_quiet():
        return
    from homing.cli.control import still_running

    for line in still_running():
        talk.say(line)


def _print_help(context: Any) -> tuple[int, str]:
    """As --help does it: somebody who types `homing` and nothing else has made no mistake."""
    try:
        print(context.get_help(), flush=True)
    except BrokenPipeError:
        return _after_the_reader_left()
    return 0, ""


def _after_the_reader_left() -> tuple[int, str]:
    talk.silence(sys.stdout)
    return 0, ""


def _show(error: HomingError) -> tuple[int, str]:
    try:
        talk.show_error(error)
    except OSError:  # `homing plan nope --json | head -c 9`: the talk goes elsewhere, and may be read there
        _after_the_reader_left()
        with contextlib.suppress(OSError):  # the exit code tells it all the same
            talk.show_error(error)
    return error.exit_code, error.what


def _has_ledger() -> bool:
    # Looked for by hand, because loading the control plane costs more than most verbs that do not need it.
    home = os.path.expanduser(os.environ.get("HOMING_HOME") or "~/.homing")
    return any(os.path.exists(os.path.join(home, *path)) for path in (["ledger.sqlite"], ["backup", "ledger.sqlite"]))


def _check_billing(code: int, shown: str) -> int:
    """An end that no provider confirmed is said after whatever verb it was, and its exit code wins over all others."""
    if not _has_ledger():
        return code
    from homing.cli.control import last_word

    try:
        error = last_word()
    except (OSError, KeyboardInterrupt):
        return code
    if error is None or error.what == shown:
        return code
    with contextlib.suppress(OSError):
        talk.show_error(error)
    return error.exit_code if isinstance(error, StillBilling) else code or error.exit_code


def _fill_watch(arguments: list[str]) -> list[str]:
    """`status --watch` may stand without its seconds, and click knows no option whose value may be left out."""
    filled = []
    for number, argument in enumerate(arguments):
        filled.append(argument)
        following = arguments[number + 1] if number + 1 < len(arguments) else ""
        if argument == "--watch" and not following[:1].isdigit():
            filled.append("60")
    return filled


def _json_behind(arguments: list[str]) -> list[str]:
    """--json may stand before the verb too, and each verb knows it only behind; without a verb there is the help."""
    if arguments[:1] != ["--json"]:
        return arguments
    kept = arguments[1:]
    end = kept.index("--") if "--" in kept else len(kept)
    return [*kept[:end], "--json", *kept[end:]] if kept and "--json" not in kept[:end] else kept


def _take_loudness(arguments: list[str]) -> tuple[list[str], int]:
    """-q and -v work before and after the verb, so they are taken out before anyone parses."""
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
