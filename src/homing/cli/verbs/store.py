"""`homing store ls|get|put|rm`: list a store, copy single files from and to it, remove old checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from homing.api.lookup.find_runs import open_home
from homing.cli import output
from homing.cli.options import Json, Yes
from homing.cli.verb_help import Verb
from homing.cloud.artifacts.prune import not_there, plan_removal, remove
from homing.cloud.artifacts.stored_checkpoints import known_hash
from homing.cloud.home import Home
from homing.errors import UsageError
from homing.store import NotInStore, Store, open_store
from homing.units import format_bytes

__all__ = ["app"]

_REDRAW_S = 0.2
_LINE_S = 30.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Access files in a store.")

Url = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Store such as s3://bucket/prefix or hf:OWNER/NAME; default: the one in $HOMING_HOME.",
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
    with open_home() as home:
        entries = _open(home, store).list(prefix)
        document = {"files": [{"key": entry.key, "num_bytes": entry.num_bytes} for entry in entries]}
        output.emit("store/1", document)
        output.table(["key", "size"], [(entry.key, format_bytes(entry.num_bytes)) for entry in entries])
        output.say(f"{len(entries)} files, {format_bytes(sum(entry.num_bytes for entry in entries))}.")


@app.command("get", cls=Verb)
def get(
    key: Key,
    to: Annotated[Path | None, typer.Argument(metavar="PATH", help="Local file; default: the name of the key.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    store: Url = None,
    json_: Json = False,
) -> None:
    """Copy one file from the store, completely or not at all."""
    target = to or Path(key.rsplit("/", 1)[-1])
    target = target / key.rsplit("/", 1)[-1] if target.is_dir() else target
    if target.exists() and not force:
        raise UsageError(
            f"{target} already exists.", "Files are not overwritten by default.", "Add --force, or use another path."
        )
    with open_home() as home:
        opened = _open(home, store)
        target.parent.mkdir(parents=True, exist_ok=True)
        sha256 = known_hash(opened, key)
        try:
            with _progress(home, opened, key):
                opened.get(key, str(target), sha256)
        except NotInStore as exc:
            known = not_there(opened, key)
            raise NotInStore(known.what, known.why, known.fix) from exc
        document = {"key": key, "path": str(target), "num_bytes": target.stat().st_size, "is_checked": bool(sha256)}
        output.emit("store-get/1", document)
        checked = "hash verified" if sha256 else "size verified; the store has no hash of it"
        output.say(f"{target}: {format_bytes(target.stat().st_size)}, {checked}.")


@app.command("put", cls=Verb)
def put(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Local file.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key, such as files/notes.txt.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    store: Url = None,
    json_: Json = False,
) -> None:
    """Copy one file to the store, and verify it by reading it back."""
    if not path.is_file():
        raise UsageError(f"{path} is not a file.", "Put files one at a time.", "Use a file.")
    with open_home() as home:
        opened = _open(home, store)
        if opened.exists(key) and not force:
            raise UsageError(f"{key} already exists.", "Files are not replaced by default.", "Add --force.")
        with _progress(home, opened, key):
            entry = opened.put(key, str(path))
        if opened.sha256(key) != entry.sha256:
            raise UsageError(f"{key} reads back differently than written.", opened.url, "Try again; check the disk.")
        output.emit("store-put/1", {"key": key, "num_bytes": entry.num_bytes, "sha256": entry.sha256})
        output.say(f"{key}: {format_bytes(entry.num_bytes)}, read back and verified.")


@app.command("rm", cls=Verb)
def rm(key: Key, yes: Yes = False, store: Url = None, json_: Json = False) -> None:
    """Remove a key or a folder.

    The best and the last checkpoint of a run are kept, and so is everything of a live run.
    """
    with open_home() as home:
        opened = _open(home, store)
        removal = plan_removal(opened, key, home)
        what = f"{len(removal.keys)} files, {format_bytes(removal.num_bytes)}"
        question = f"Remove {what}, from {opened.url}? {removal.warning}".rstrip()
        if not output.ask(question, yes=yes):
            output.say("Nothing was removed.")
            return
        remove(opened, removal)
        output.emit("store-rm/1", {"keys": removal.keys, "num_bytes": removal.num_bytes})
        output.say(f"Removed {key}: {format_bytes(removal.num_bytes)}, confirmed.")


@contextmanager
def _progress(home: Home, store: Store, key: str) -> Iterator[None]:
    """Show progress: a running line on a terminal, otherwise a line every half minute; nothing for quick transfers."""
    is_terminal, world = sys.stderr.isatty(), home.world
    begun, last_report, is_open = world.monotonic(), world.monotonic(), False

    def report_progress(done: int, total: int) -> None:
        nonlocal last_report, is_open
        now = world.monotonic()
        if now - last_report < (_REDRAW_S if is_terminal else _LINE_S):
            return
        last_report, is_open = now, is_terminal
        speed = f"{format_bytes(int(done / max(now - begun, 1e-9)))}/s"
        text = f"{key}: {format_bytes(done)} of {format_bytes(total)}, {done / max(total, 1):.0%}, {speed}"
        (output.redraw if is_terminal else output.say)(text)

    store.progress = report_progress
    try:
        yield
    finally:
        if is_open:
            output.say()


def _open(home: Home, url: str | None) -> Store:
    return open_store(url or f"file:{home.path / 'store'}", home.world, create=False)
