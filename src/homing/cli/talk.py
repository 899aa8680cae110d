"""How the command line speaks: stdout is data, stderr is talk.

emit(document)   the verb's result: one JSON document with a `schema` field under --json, else nothing
emit_all(...)    the same, with the error in it that the verb ends with: then nothing follows it on stdout
table(...)       the same result for people
say(text)        talk: what is being done, what to do next; silent with -q
redraw(text)     a running line on a terminal
ask(question)    yes or no; refuses where there is nobody to answer
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from homing.cli import terminal
from homing.errors import HomingError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "ask",
    "configure",
    "emit",
    "emit_all",
    "go_on_unheard",
    "is_json",
    "is_quiet",
    "is_verbose",
    "redraw",
    "say",
    "show_error",
    "silence",
    "table",
]

_WIDTH_OF_PIPE = 200  # columns, where the reader is a program

_loudness = 0
_is_json = False
_is_all_said = False
_goes_on_unheard = False


def configure(*, loudness: int, is_json: bool) -> None:
    global _loudness, _is_json, _is_all_said, _goes_on_unheard
    _loudness, _is_json, _is_all_said, _goes_on_unheard = loudness, is_json, False, False
    # A letter that the terminal's encoding lacks, or a file's name that is no UTF-8, must not cost the whole answer.
    # stderr is so from the start.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def is_json() -> bool:
    return _is_json


def is_quiet() -> bool:
    return _loudness < 0


def is_verbose() -> bool:
    return _loudness > 0


def go_on_unheard() -> None:
    """By a verb that ends what bills: a reader who left (`| head`), or a log on a full disk, keeps nobody from that."""
    global _goes_on_unheard
    _goes_on_unheard = True


def say(text: str = "", *, end: str = "\n") -> None:
    if not is_quiet():
        # Data that was said before comes before, also where both streams end in one file.
        _print("", "", sys.stdout)
        _print(text, end, sys.stderr)


def redraw(text: str) -> None:
    """A running line on a terminal, in the place of the last one; "" clears it. Silent with -q."""
    if not is_quiet():
        _print(f"\r{terminal.safe(text)}\x1b[K", "", sys.stderr, is_ours=True)


def _print(text: str, end: str, stream: TextIO, *, is_ours: bool = False) -> None:
    """`is_ours`: what came from elsewhere was made safe before, and the escape sequences in it are our own."""
    try:
        if is_ours:
            terminal.draw(text + end, stream)
        else:
            print(text, end=end, file=stream, flush=True)
    except OSError:
        if not _goes_on_unheard:
            raise
        silence(stream)


def silence(stream: TextIO) -> None:
    """Points it at nothing, so that neither the next word nor the interpreter's own last flush fails."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def emit(schema: str, document: dict[str, Any]) -> None:
    """One line of JSON on stdout under --json; otherwise the caller prints its table."""
    if _is_json:
        line = {"schema": f"homing.{schema}", **document}
        # Beyond UTF-8 a letter's number would be no JSON, unless JSON itself writes it.
        is_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
        text = json.dumps(line, ensure_ascii=not is_utf8, default=str, allow_nan=False)
        _print(text, "\n", sys.stdout, is_ours=True)


def emit_all(schema: str, document: dict[str, Any], error: HomingError | None) -> None:
    """For a verb that has a result and may fail all the same: one document tells both."""
    global _is_all_said
    emit(schema, {**document, "error": error.to_dict() if error is not None else None})
    _is_all_said = True


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """A plain table on stdout; nothing where it has no rows, and under --json, where `emit` has said it all."""
    cells = [["" if cell is None else terminal.safe(str(cell)) for cell in row] for row in rows]
    if _is_json or not cells:
        return
    is_piped = not sys.stdout.isatty() and not os.environ.get("FORCE_COLOR") and not title
    plain = _plain(headers, cells) if is_piped else ""
    if plain:
        _print(plain, "\n", sys.stdout)
        return
    # rich is loaded here, not at the top: `--help` must not pay for it.
    from rich.console import Console
    from rich.text import Text

    wide = Console()
    # Off a terminal rich assumes 80 columns and would fold cells that a script wants to read whole.
    width = wide.width if wide.is_terminal else _WIDTH_OF_PIPE
    # Cells hold what others wrote, such as a log: [words] in it are no markup and :words: no pictures.
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    drawn = _drawn(headers, cells)
    # Where not even the longest words fit, they would be cut to two letters each: then row by row, nothing cut.
    if any(headers) and _least_width(headers, cells) > console.width:
        pairs = [pair for row in cells for pair in (*zip(headers, row, strict=False), None)]
        drawn = _drawn(["", ""], [pair or ("", "") for pair in pairs[:-1] if pair is None or pair[1]])
    with console.capture() as said:
        if title:
            console.print(Text(terminal.safe(title), style="table.title"))
        console.print(drawn)
    _print("\n".join(line.rstrip() for line in said.get().splitlines()), "\n", sys.stdout, is_ours=True)


def _plain(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table that rich would draw for a script, at a fraction of the time; "" where cells would have to be folded,
    or have characters whose width is not one column each."""
    shown = [list(headers), *rows] if any(headers) else rows
    if not all(cell.isascii() and cell.isprintable() for row in shown for cell in row):
        return ""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*shown, fillvalue="")]
    if sum(widths) + 2 * (len(widths) - 1) > _WIDTH_OF_PIPE:
        return ""
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in shown]
    return "\n".join(lines)


def _least_width(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Columns of the terminal that the longest word of each column needs, side by side."""
    from rich.cells import cell_len

    columns = itertools.zip_longest(headers, *rows, fillvalue="")
    widths = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    return sum(widths) + len(widths) - 1


def _drawn(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold", show_header=any(headers))
    for header in headers:
        drawn.add_column(header, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def ask(question: str, *, yes: bool) -> bool:
    """The question names the money. `--yes` answers it; with no terminal and no --yes we refuse and say so."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            what="This needs an answer, and there is no terminal to ask on.", why=question, fix="Add --yes to agree."
        )
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def show_error(error: HomingError) -> None:
    """Three lines on stderr; under --json the same as a document on stdout, unless the verb's own has told it."""
    if not _is_all_said:
        emit("error/1", error.to_dict())
    print(f"error: {error.what}", file=sys.stderr)
    for label, text in (("why", error.why), ("fix", error.fix)):
        for number, line in enumerate(text.splitlines()):
            print(f"  {label if number == 0 else '':<4}{line}", file=sys.stderr)
