"""`homing new NAME --from PRESET`: write a commented run file to ./runs; `--list` shows the presets."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from homing.api.data.new_run import NewRun, list_presets, new_run
from homing.api.data.new_run_data import CHATS
from homing.cli import output
from homing.cli.options import HeldOutPaths, Json, TextPaths
from homing.units import counted

__all__ = ["command"]


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the run.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="PRESET", help="Preset to start from, or open weights: hf:OWNER/NAME, ./FOLDER."
        ),
    ] = None,
    text: TextPaths = None,
    validation: HeldOutPaths = None,
    chat: Annotated[
        list[str] | None,
        typer.Option("--chat", metavar="PATH", help="Chat data to fine-tune on; repeatable."),
    ] = None,
    is_listing: Annotated[bool, typer.Option("--list", help="List the presets and their sizes.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing run file.")] = False,
    json_: Json = False,
) -> None:
    """Write a run file from a preset or from open weights."""
    if is_listing:
        _list()
        return
    made = new_run(name, preset, text=text, validation=validation, chat=chat, force=force)
    if made.loaded is None:
        _report_open(made, chat or [])
    else:
        _report(made)


def _list() -> None:
    rows = list_presets()
    output.emit("presets/1", {"presets": rows})
    output.table(
        ("preset", "parameters", "layers", "width", "context", "vocabulary", "for"),
        [
            (
                row["preset"],
                f"{row['num_params']:,}",
                row["num_layers"],
                row["width"],
                row["context"],
                f"{row['vocab_size']:,}",
                row["about"],
            )
            for row in rows
        ],
    )
    output.say("\nStart from a preset: homing new NAME --from tiny --text YOUR_TEXT.txt")
    output.say("Add chat data: homing new NAME --from tiny --text YOUR_TEXT.txt --chat YOUR_CHATS.jsonl")
    output.say("Start from open weights: homing new NAME --from hf:OWNER/NAME --chat YOUR_CHATS.jsonl")


def _report(made: NewRun) -> None:
    assert made.loaded is not None, "open weights have their own report"
    name, run, absent = made.name, made.loaded.run, made.absent
    document = {"run": name, "file": str(made.file), "preset": made.source, "num_params": run.sizes.num_params}
    output.emit(
        "new/1", {**document, "text": made.loaded.prep.text, "changes": made.changes, "next": f"homing prep {name}"}
    )
    if not output.is_json():
        print(f"{made.file}: {run.sizes.num_params:,} parameters, from {made.source}.")
    if absent:
        output.say(f"No text found at {', '.join(absent)}: put your text there, or change data.text in {made.file}.")
    for change in made.changes:
        output.say(f"Note: {change}")
    for phase in run.phases if made.loaded.phase_preps else []:
        length = counted(phase.num_steps, "step") if phase.num_steps else "steps set by `homing prep`"
        output.say(f"  {phase.kind}: {length} of {phase.batch_tokens:,} tokens, in rows of {run.model.context:,}")
    output.say(f"{'Then prepare it' if absent else 'Prepare the text'}: homing prep {name}")


def _report_open(made: NewRun, chats: list[str]) -> None:
    from homing.find_source_files import is_in_store

    name, target = made.name, made.file
    output.emit("new/1", {"run": name, "file": str(target), "from": made.source, "next": f"homing prep {name}"})
    if not output.is_json():
        print(f"{target}: {made.source}, with adapters.")
    if not chats and not Path(CHATS).exists():
        output.say(f"No conversations found at {CHATS}: put your chats there, or change data.chat in {target}.")
    # `homing data check` reads files from a store only if it is passed a run, so suggest that for such files.
    looked_at = name if any(map(is_in_store, chats)) else shlex.join(chats or [CHATS])
    output.say(f"Check the data: homing data check {looked_at}   Then: homing prep {name}")
