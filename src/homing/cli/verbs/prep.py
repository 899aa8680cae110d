"""`homing prep [RUN]`: turn text into a tokenizer and token shards, and report the steps and epochs.

run file or flags -> homing.api.data.prepare -> report -> steps and epochs -> verify

Also works without a run file: `homing prep --text a.txt --out data/x --vocab-size 10000`. With a
run file, flags are written into it when the work is done, so that later verbs use the same data. `--set` and `--smoke`
affect only the current command.
"""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.data.prepare import prep_run
from homing.cli import output
from homing.cli.options import HeldOutPaths, Json, RunName, Sets, TextPaths
from homing.cli.prep_report import Meter, print_report

__all__ = ["command"]


def command(
    run: RunName = None,
    text: TextPaths = None,
    validation: HeldOutPaths = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Output folder for shards and tokenizer.")
    ] = None,
    vocab_size: Annotated[
        str | None, typer.Option("--vocab-size", metavar="N", help="Vocabulary size, such as 10000 or 32k.")
    ] = None,
    use_existing_tokenizer: Annotated[
        bool,
        typer.Option("--use-existing-tokenizer", help="Use the tokenizer.json in the output folder; never train one."),
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="PATH", help="Use this tokenizer.json; never train one.")
    ] = None,
    specials: Annotated[
        str | None,
        typer.Option(
            "--specials", metavar="standard|one", help="Set of special tokens: standard, or one (only <|endoftext|>)."
        ),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field", metavar="NAME", help="Text field of a .jsonl line, or text column of a .parquet file."
        ),
    ] = None,
    val_fraction: Annotated[
        str | None,
        typer.Option("--val-fraction", metavar="SHARE", help="Share of the text held out for validation, such as 5%."),
    ] = None,
    take: Annotated[
        str | None, typer.Option("--take", metavar="SIZE", help="Use about this much of the text, such as 100MB.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Prepare again even if nothing changed.")] = False,
    is_smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Prepare a smoke run (a scaled-down version of the run) instead of the full run."),
    ] = False,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Turn text into a tokenizer and token shards."""
    try:
        with Meter() as meter:
            done = prep_run(
                run,
                text=text or [],
                validation=validation or [],
                out=out,
                vocab_size=vocab_size,
                use_existing_tokenizer=use_existing_tokenizer,
                tokenizer=tokenizer,
                specials=specials,
                text_field=text_field,
                val_fraction=val_fraction,
                take=take,
                force=force,
                smoke=is_smoke,
                sets=sets or [],
                on_progress=meter.show,
                is_verbose=output.is_verbose(),
            )
    except KeyboardInterrupt:
        output.say("Progress is saved. Run the same command to continue.")
        raise
    result = done.document
    output.emit("prep/1", result)
    if not output.is_json() and "splits" in result:
        print_report(result, is_run=done.is_run)
    for warning in done.warnings:
        output.say(f"warning: {warning}")
    if not done.is_run:
        output.say(f"To use this data, create a run file (homing new NAME --from tiny) and set `data.dir: {done.dir}`.")
    output.say(f"Next: {result['next']}")
