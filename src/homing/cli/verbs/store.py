"""`homing store ls|get|put|rm`: list a store, copy single files to and from it, remove old checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homing import progress
from homing.api.tools.store_files import get_file, list_files, put_file, remove_files
from homing.cli import output
from homing.cli.options import Json, Yes
from homing.cli.verb_help import Verb
from homing.store.base import Progress
from homing.units import format_bytes

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Access files in a store.")

Url = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Store, such as s3://bucket/prefix or hf:OWNER/NAME; default: the one in $HOMING_HOME.",
    ),
]
Key = Annotated[str, typer.Argument(metavar="KEY", help="Key or folder, as listed by `homing store ls`.")]


@app.command("ls", cls=Verb)
def ls(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="List only keys with this prefix.")] = "",
    store: Url = None,
    json_: Json = False,
) -> None:
    """List every key with its size."""
    entries = list_files(prefix, store=store)
    document = {"files": [{"key": entry.key, "num_bytes": entry.num_bytes} for entry in entries]}
    output.emit("store/1", document)
    output.table(["key", "size"], [(entry.key, format_bytes(entry.num_bytes)) for entry in entries])
    output.say(f"{len(entries)} files, {format_bytes(sum(entry.num_bytes for entry in entries))}.")


@app.command("get", cls=Verb)
def get(
    key: Key,
    to: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="Local file to write; default: the last part of the key.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    store: Url = None,
    json_: Json = False,
) -> None:
    """Copy one file from the store, completely or not at all."""
    done = get_file(key, to, force=force, store=store, on_progress=_progress(f"Copying {key}"))
    progress.finished()
    output.emit("store-get/1", done)
    checked = "hash verified" if done["is_checked"] else "size verified; the store has no hash for it"
    output.say(f"{done['path']}: {format_bytes(done['num_bytes'])}, {checked}.")


@app.command("put", cls=Verb)
def put(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Local file.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key, such as files/notes.txt.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    store: Url = None,
    json_: Json = False,
) -> None:
    """Copy one file to the store, and verify it by reading it back."""
    done = put_file(path, key, force=force, store=store, on_progress=_progress(f"Copying {path.name}"))
    output.emit("store-put/1", done)
    output.say(f"{key}: {format_bytes(done['num_bytes'])} stored, read back and verified.")


@app.command("rm", cls=Verb)
def rm(key: Key, yes: Yes = False, store: Url = None, json_: Json = False) -> None:
    """Remove a key or a folder.

    The best and the last checkpoint of a run are kept, and so are all files of a live run.
    """
    done = remove_files(key, store=store, agrees=lambda question: output.ask(question, yes=yes))
    if done is None:
        output.say("Nothing was removed.")
        return
    output.emit("store-rm/1", {"keys": done.keys, "num_bytes": done.num_bytes})
    output.say(f"Removed {key}: {format_bytes(done.num_bytes)}, confirmed.")


def _progress(what: str) -> Progress:
    return lambda done, total: progress.report(what, done, total)
