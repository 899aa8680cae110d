"""Output of the command line: stdout is for data, stderr for messages.

emit(document)   the verb's result: one JSON document with a `schema` field under --json, else nothing
emit_all(...)    the same, including the verb's final error; nothing else follows on stdout
table(...)       the result as a table, for people
say(text)        a message about progress or the next step; silent with -q
before_output()  erase a progress bar (`run_verb`) before anything is printed
ask(question)    a yes-or-no question; raises an error if there is no terminal

Names, logs, samples and errors come from stores, models and providers, so printed text is never trusted: it must not
move the cursor, change the title or show a secret. JSON documents are written unchanged, because JSON itself escapes
control characters. Stdout that is redirected to a file is also written unchanged.

filtered()       pass everything that a command prints to stdout and stderr through `safe`
safe(text)       replace control characters, but keep newlines and tabs
draw(...)        write without `safe`; used only for the few escape sequences of our own
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

from homing.errors import HomingError, UsageError
from homing.redact import redact

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "ask",
    "before_output",
    "configure",
    "draw",
    "emit",
    "emit_all",
    "filtered",
    "ignore_output_errors",
    "is_json",
    "is_quiet",
    "is_verbose",
    "line_writer",
    "safe",
    "say",
    "show_error",
    "silence",
    "table",
]

# The C0 and C1 control characters except newline and tab, the delete character, and bidirectional overrides. A C1
# character may also be a single raw byte, which is decoded to a surrogate.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\udc80-\udc9f]")
_SHOWN = "\N{REPLACEMENT CHARACTER}"
_RED, _YELLOW, _RESET = "\x1b[1;31m", "\x1b[33m", "\x1b[0m"
# The color of a cell in a column named `state` or `billing`, by its first word. The word itself is always there.
_STATE_COLORS = {
    "running": "green", "training": "green", "done": "green", "launching": "cyan", "failed": "red", "unfinished": "red",
    "unknown": "red", "stopped": "yellow", "yes": "yellow",
}  # fmt: skip
_WIDTH_OF_PIPE = 200  # table width, in characters, if stdout is not a terminal

_loudness = 0
_is_json = False
_is_all_said = False
_ignores_output_errors = False
_before: Callable[[], None] | None = None


def configure(*, loudness: int, is_json: bool) -> None:
    global _loudness, _is_json, _is_all_said, _ignores_output_errors
    _loudness, _is_json, _is_all_said, _ignores_output_errors = loudness, is_json, False, False
    # A character that the terminal's encoding lacks, or a file name that is not UTF-8, must not make printing fail.
    # stderr uses the same error handler by default.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def is_json() -> bool:
    return _is_json


def is_quiet() -> bool:
    return _loudness < 0


def is_verbose() -> bool:
    return _loudness > 0


def ignore_output_errors() -> None:
    """Ignore output errors from now on.

    A verb that ends billing must not fail because the reader of its output exits (`| head`) or a disk is full.
    """
    global _ignores_output_errors
    _ignores_output_errors = True


def before_output(call: Callable[[], None] | None) -> None:
    """Set what must happen before a message or a result is printed, such as erasing a progress bar."""
    global _before
    _before = call


def say(text: str = "", *, end: str = "\n") -> None:
    if not is_quiet():
        # Flush stdout first, so that the order is right if both streams go to one file.
        _print("", "", sys.stdout)
        label = "warning:"
        if text.startswith(label) and _has_color(sys.stderr):
            _print(f"{_YELLOW}{label}{_RESET}", "", sys.stderr, is_ours=True)
            text = text.removeprefix(label)
        _print(text, end, sys.stderr)


def _print(text: str, end: str, stream: TextIO, *, is_ours: bool = False) -> None:
    """Print to a stream. `is_ours`: keep the escape sequences, which are our own; external text is already safe."""
    if _before is not None and text:
        _before()
    try:
        if is_ours:
            draw(text + end, stream)
        else:
            print(text, end=end, file=stream, flush=True)
    except OSError:
        if not _ignores_output_errors:
            raise
        silence(stream)


def silence(stream: TextIO) -> None:
    """Redirect the stream to /dev/null, so that later output and the interpreter's final flush do not fail."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def line_writer(stream: TextIO | None) -> Callable[[bytes], bool] | None:
    """Return a function that prints one line of a program's output and returns False once stdout is closed."""
    if stream is None:
        return None

    def write(line: bytes) -> bool:
        try:
            _show_bytes(line, stream)
        except OSError:
            silence(stream)
            return False
        return True

    return write


def emit(schema: str, document: dict[str, Any]) -> None:
    """Print one line of JSON on stdout under --json; otherwise print nothing, and the caller prints its table."""
    if _is_json:
        line = {"schema": f"homing.{schema}", **document}
        # If stdout is not UTF-8, let JSON escape the characters: `backslashreplace` escapes would not be valid JSON.
        is_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
        text = json.dumps(line, ensure_ascii=not is_utf8, default=str, allow_nan=False)
        _print(text, "\n", sys.stdout, is_ours=True)


def emit_all(schema: str, document: dict[str, Any], error: HomingError | None) -> None:
    """Emit the result and the error in one document, for a verb that has a result even if it fails."""
    global _is_all_said
    emit(schema, {**document, "error": error.to_dict() if error is not None else None})
    _is_all_said = True


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Print a plain table on stdout. Print nothing if there are no rows, or under --json, which uses `emit` instead."""
    cells = [["" if cell is None else safe(str(cell)) for cell in row] for row in rows]
    if _is_json or not cells:
        return
    is_piped = not sys.stdout.isatty() and not os.environ.get("FORCE_COLOR") and not title
    plain = _plain(headers, cells) if is_piped else ""
    if plain:
        _print(plain, "\n", sys.stdout)
        return
    # rich is imported here, not at the top, so that it does not slow down `--help`.
    from rich.console import Console
    from rich.text import Text

    wide = Console()
    # Without a terminal rich assumes 80 columns and would wrap cells that a script wants to read whole.
    width = wide.width if wide.is_terminal else _WIDTH_OF_PIPE
    # Cells contain external text, such as logs, in which [words] are not markup and :words: are not emoji.
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    drawn = _drawn(headers, cells)
    # If not even the longest words fit side by side, rich would cut them to two letters each. Print one cell per line
    # instead, uncut.
    if any(headers) and _least_width(headers, cells) > console.width:
        pairs = [pair for row in cells for pair in (*zip(headers, row, strict=False), None)]
        drawn = _drawn(["", ""], [pair or ("", "") for pair in pairs[:-1] if pair is None or pair[1]])
    with console.capture() as said:
        if title:
            console.print(Text(safe(title), style="table.title"))
        console.print(drawn)
    _print("\n".join(line.rstrip() for line in said.get().splitlines()), "\n", sys.stdout, is_ours=True)


def _plain(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the same table that rich would draw for a script, but much faster.

    Return "" if a cell would have to be wrapped, or contains characters that are not exactly one column wide.
    """
    shown = [list(headers), *rows] if any(headers) else rows
    if not all(cell.isascii() and cell.isprintable() for row in shown for cell in row):
        return ""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*shown, fillvalue="")]
    if sum(widths) + 2 * (len(widths) - 1) > _WIDTH_OF_PIPE:
        return ""
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in shown]
    return "\n".join(lines)


def _least_width(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the smallest width of a table in which the longest word of every column fits."""
    from rich.cells import cell_len

    columns = itertools.zip_longest(headers, *rows, fillvalue="")
    widths = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    return sum(widths) + len(widths) - 1


def _drawn(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold", show_header=any(headers))
    for header in headers:
        drawn.add_column(header, overflow="fold")
    for row in rows:
        named = itertools.zip_longest(headers, row, fillvalue="")
        drawn.add_row(*(Text(cell, style=_color_of(header, cell)) for header, cell in named))
    return drawn


def _color_of(header: str, cell: str) -> str:
    word = (re.split(r"[\s:,]", cell.strip(), maxsplit=1) or [""])[0]
    return _STATE_COLORS.get(word, "") if header in ("state", "billing") else ""


def ask(question: str, *, yes: bool) -> bool:
    """Ask the user for confirmation; the question states the cost.

    With `yes`, return True without asking. Otherwise, raise UsageError if there is no terminal.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            what="Confirmation required, but there is no terminal.", why=question, fix="Add --yes to confirm."
        )
    if _before is not None:
        _before()
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def show_error(error: HomingError) -> None:
    """Print an error as three lines on stderr; under --json also as a document, unless `emit_all` printed it."""
    if not _is_all_said:
        emit("error/1", error.to_dict())
    if _before is not None:
        _before()
    if _has_color(sys.stderr):
        draw(f"{_RED}error:{_RESET}", sys.stderr)
        print(f" {error.what}", file=sys.stderr)
    else:
        print(f"error: {error.what}", file=sys.stderr)
    for label, text in (("why", error.why), ("fix", error.fix)):
        for number, line in enumerate(text.splitlines()):
            print(f"  {label if number == 0 else '':<4}{line}", file=sys.stderr)


def _has_color(stream: TextIO) -> bool:
    """Return True if our own labels may be colored: on a terminal, unless NO_COLOR is set or it cannot do colors."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")


# --- what printed text must not do ---


def safe(text: str) -> str:
    return _CONTROL.sub(_SHOWN, text.replace("\r\n", "\n"))


@contextlib.contextmanager
def filtered() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Filtered(sys.stdout, is_exact=_is_file(sys.stdout)))
    sys.stderr = cast(TextIO, _Filtered(sys.stderr, is_exact=False))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def draw(text: str, stream: TextIO) -> None:
    """Write text, keeping its escape sequences. The caller must pass any external text through `safe` first."""
    raw = stream.raw_stream if isinstance(stream, _Filtered) else stream
    raw.write(redact(text))
    raw.flush()


def _show_bytes(data: bytes, stream: TextIO) -> None:
    """Write a program's output to a terminal: replace control characters, but keep bytes that are not UTF-8."""
    # Bytes that are not UTF-8 become surrogates here. Those in the C1 range count as control characters, because some
    # terminals obey them.
    text = data.decode("utf-8", "surrogateescape")
    if not (isinstance(stream, _Filtered) and stream.is_exact):
        text = redact(safe(text))
    stream.buffer.write(text.encode("utf-8", "surrogateescape"))
    stream.buffer.flush()


class _Filtered:
    """Wraps a text stream: sanitizes what is written, and delegates everything else to the wrapped stream."""

    def __init__(self, stream: Any, *, is_exact: bool) -> None:
        self.raw_stream, self.is_exact = stream, is_exact

    def write(self, text: str) -> int:
        self.raw_stream.write(text if self.is_exact else redact(safe(text)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False
