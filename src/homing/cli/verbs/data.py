"""`homing data check|show`: find mistakes in chat data, and show what a model would learn from it.

check   every line of the files, or of a run: kept, cut, skipped, and why; exit code 2 if a line is invalid
show    one conversation as tokens; a color, or a label where there is no color, marks the tokens that are trained on
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from homing.api.data.inspect_chats import check_chats, show_chat
from homing.cli import output
from homing.cli.options import Json, Sets
from homing.cli.verb_help import Verb

if TYPE_CHECKING:
    from homing.lm.data.chat.check_chats import Finding

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Inspect chat data.")

_LEARNED, _READ, _MARKER, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_MAX_SHOWN, _MAX_ALIKE = 50, 5

Names = Annotated[list[str], typer.Argument(metavar="FILE...|RUN", help="Chat files or glob patterns, or one run.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="DIR", help="Folder with tokenizer.json and the chat template."),
]
Context = Annotated[
    int | None, typer.Option("--context", min=2, help="Maximum tokens per conversation; default: the run's context.")
]


@app.command("check", cls=Verb, short_help="Check every line and report errors.")
def check(
    names: Names,
    validation: Annotated[
        list[str] | None, typer.Option("--validation", metavar="PATH", help="Held-out files; repeatable.")
    ] = None,
    tokenizer: Tokenizer = None,
    context: Context = None,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Check every line for invalid JSON, roles, order, empty turns, length, duplicates and leaks from train to val."""
    done = check_chats(names, validation=validation or [], tokenizer=tokenizer, context=context, sets=sets or [])
    output.emit_all("data-check/1", done.document, done.error)
    if not output.is_json():
        _show_findings(done.findings)
    output.table(
        ["file", "side", "form", "lines", "kept", "cut", "skipped"],
        [(f.path, f.side, f.form, f.num_lines, f.num_kept, f.num_cut, f.num_skipped) for f in done.files],
    )
    if done.error is not None:
        raise done.error
    output.say(f"Next: {done.document['next']}")


def _show_findings(findings: list[Finding]) -> None:
    """Print the findings in order, but only the first few of each kind: in a text file, every line has the same one."""
    seen: Counter[tuple[str, str]] = Counter()
    num_shown = 0
    for finding in findings:
        seen[finding.path, finding.kind] += 1
        if seen[finding.path, finding.kind] <= _MAX_ALIKE and num_shown < _MAX_SHOWN:
            print(finding)
            num_shown += 1
    if num_shown < len(findings):
        kinds = ", ".join(f"{count:,} {kind} in {path}" for (path, kind), count in seen.most_common(_MAX_ALIKE))
        print(f"... and {len(findings) - num_shown:,} more; --json lists all. Most frequent: {kinds}")


@app.command("show", cls=Verb, short_help="Show one conversation as tokens, and which of them are trained on.")
def show(
    name: Annotated[str, typer.Argument(metavar="FILE|RUN", help="Chat file, or a prepared run.")],
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Number of the conversation.")] = 1,
    phase: Annotated[
        str | None, typer.Option("--phase", metavar="PHASE", help="Phase to use if the run has several chat phases.")
    ] = None,
    tokenizer: Tokenizer = None,
    color: Annotated[Literal["auto", "always", "never"], typer.Option("--color")] = "auto",
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Show one conversation as the model reads it: its tokens, and which of them are trained on."""
    shown = show_chat(name, number=number, phase=phase, tokenizer=tokenizer, sets=sets or [])
    document = shown.document
    tokens = document["tokens"]
    output.emit("data-show/1", document)
    if not output.is_json():
        is_colored = color == "always" or (color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
        if is_colored:
            output.draw(_in_color(tokens, shown.markers) + "\n", sys.stdout)
        else:
            print(_in_plain(tokens))
    output.say(f"{document['where']}: {len(tokens):,} tokens, {document['num_learned']:,} of them trained on.")
    if shown.is_last:
        output.say(f"That was the last conversation. Next: homing verify {name}")
    else:
        output.say(f"Next: homing data show {shlex.quote(name)} --number {number + 1}")


def _in_color(tokens: list[dict[str, Any]], markers: set[int]) -> str:
    """Return the tokens as running text: tokens trained on in green, other tokens dimmed, markers in bold."""

    def style(token: dict[str, Any]) -> str:
        return (_LEARNED if token["is_learned"] else _READ) + (_MARKER if token["id"] in markers else "")

    return "".join(f"{style(token)}{output.safe(token['text'])}{_PLAIN}" for token in tokens)


def _in_plain(tokens: list[dict[str, Any]]) -> str:
    """Return one line per token: position, id, whether it is trained on, text."""
    width = max((len(str(token["id"])) for token in tokens), default=1)
    return "\n".join(
        f"{number:>6}  {token['id']:>{width}}  {'learned' if token['is_learned'] else '-      '}"
        f"  {json.dumps(token['text'], ensure_ascii=False)}"
        for number, token in enumerate(tokens)
    )
